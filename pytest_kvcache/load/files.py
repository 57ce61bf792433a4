"""Files that options of the load name. A relative path starts where the user stands, and not in the Run's folder."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load.draws import Histogram, parse_histogram
from pytest_kvcache.load.target import Handed

TEXT_LIMIT = 64 * 2**20


def locate(handed: Handed | None, text: str) -> Path:
    """Return the file that an option names, seen from the folder of pytest's side where that handed the load over."""
    return Path(handed.folder if handed is not None else "") / Path(text).expanduser()


def stamp(handed: Handed | None, text: str) -> str:
    """Return the name of a file and a hash over its bytes; empty for no file. Raises UsageError."""
    if not text:
        return ""
    path = locate(handed, text)
    try:
        with path.open("rb") as file:
            return f"{path.name} sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
    except OSError as error:
        raise UsageError(f"the file cannot be read: {error.strerror or error}", where=text) from None


def read_text(path: Path) -> str:
    """Return a file's text, of a longer one the first 64 MiB. Raises UsageError."""
    try:
        with path.open("rb") as file:
            return file.read(TEXT_LIMIT).decode("utf-8-sig", "replace")
    except OSError as error:
        raise UsageError(f"the file cannot be read: {error.strerror or error}", where=str(path)) from None


def histogram(handed: Handed | None, text: str) -> Histogram:
    """Return the histogram that a text lists, or that the file of that name holds; read once. Raises UsageError."""
    return _histogram(text if ":" in text else "", "" if ":" in text else str(locate(handed, text)))


@lru_cache(maxsize=64)
def _histogram(listed: str, path: str) -> Histogram:
    return parse_histogram(listed or read_text(Path(path)))
