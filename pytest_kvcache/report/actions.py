"""The job summary of GitHub Actions: a file of Markdown that a job appends to (docs.github.com, workflow commands, 2026)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GITHUB_STEP_SUMMARY"
LARGEST_BYTES = 1 << 20
"""What GitHub takes of one step; beyond it the whole summary would be dropped."""


def append_job_summary(markdown: str, environ: Mapping[str, str] | None = None) -> str:
    """Append a session's Markdown to the job summary where this runs in GitHub Actions; return why it could not, empty where all is well."""
    environ = os.environ if environ is None else environ
    name = environ.get(VARIABLE, "")
    if environ.get("GITHUB_ACTIONS") != "true" or not name:
        return ""
    path = Path(name)
    text = markdown.rstrip() + "\n\n"
    try:
        there = path.stat().st_size if path.exists() else 0
        if there + len(text.encode()) > LARGEST_BYTES:
            return f"the job summary is full ({there:,} bytes of {LARGEST_BYTES:,}): this session is not in it"
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return f"the job summary could not be written: {error.strerror or error}"
    return ""
