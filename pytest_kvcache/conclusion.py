"""The end of a session: its folder's name, its verdict over all that was judged, and the files that tell it."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvcache.analysis.timeline import Analysis
from pytest_kvcache.judge.baseline import save_baseline
from pytest_kvcache.judge.compare import config_diff
from pytest_kvcache.judge.gates import INCONCLUSIVE, session_verdict, worst
from pytest_kvcache.machine import machine_facts, version_facts
from pytest_kvcache.records import SCHEMA_VERSION, VerdictRecord
from pytest_kvcache.report.model import NOT_RUN
from pytest_kvcache.report.write import write_session
from pytest_kvcache.server.shown import shown_command
from pytest_kvcache.settings import Settings

if TYPE_CHECKING:
    from pytest_kvcache.session import Session

_MOST_NOTES = 20


def session_folder(settings: Settings, short_id: str = "") -> Path:
    """Return the path of a new session's folder, ``<reports>/<utc>-<name>-<short id>``; nothing is created."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", settings.name).strip("-.")[:60] or "session"
    return Path(settings.reports) / f"{stamp}-{name}-{short_id or secrets.token_hex(3)}"


def conclude(session: Session, before: Sequence[Analysis], after: Sequence[Analysis]) -> VerdictRecord:
    """Write what a session found (verdict.json, summary.md, report.html, the saved baseline) and return its verdict. Raises CannotWrite."""
    settings = session.settings
    verdict, notes = session_verdict(session.gates, session.deselected)
    if session.not_run:
        verdict = worst([verdict, INCONCLUSIVE])
        notes.append(f"the session ended before {len(session.not_run)} of its tests had run, so not everything was judged")
    if settings.save:
        notes.append(f"kept as the baseline {settings.save!r} under {settings.reports}")
    sides = [*before, *after]
    first = sides[-1].run.record if sides else None
    record = VerdictRecord(
        schema_version=SCHEMA_VERSION,
        verdict=verdict,
        session=session.folder.name,
        name=settings.name,
        engine=first.engine if first else "",
        engine_version=first.engine_version if first else "",
        model=first.model if first else "",
        embedded=session.embedded,
        comparison=_comparison_text(settings),
        started_wall_s=session.started_wall_s,
        ended_wall_s=time.time(),
        gates=list(session.gates),
        config_diff=config_diff(before[0].run, after[0].run) if before and after else [],
        problems=list(dict.fromkeys([*session.problems, *(problem.text for analysis in sides for problem in analysis.problems)])),
        notes=[*session.notes, *_of_loads(sides), *notes],
        deselected=[*session.deselected, *(f"{name} ({NOT_RUN})" for name in session.not_run)],
        repeat=list(session.repeat),
        versions=version_facts(first.engine, first.engine_version) if first else {},
        machine=machine_facts(),
    )
    record = write_session(session.folder, record, list(before), list(after), session.rules)
    if settings.save:
        save_baseline(session.folder, Path(settings.reports), settings.save)
    return record


def _of_loads(sides: Sequence[Analysis]) -> list[str]:
    """Return in what recorded traffic was sent otherwise than it was, once for each profile."""
    records = [analysis.run.record for analysis in sides]
    told = dict.fromkeys(f"{record.profile}: {note}" for record in records if record.load_argv for note in record.notes)
    return list(told)[:_MOST_NOTES]


def _comparison_text(settings: Settings) -> str:
    if settings.before:
        return f"{shown_command(settings.before)}  against  {shown_command(settings.after)}"
    return f"baseline {settings.baseline}" if settings.baseline else ""
