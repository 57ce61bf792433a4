"""What happens before a load: its file is opened, the server is asked what the load needs, and the start line is written."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import gevent

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load import contract, files
from pytest_kvcache.load.arrivals import BURST, GAMMA, Stage, arrivals, parse_stages
from pytest_kvcache.load.asking import choose_model
from pytest_kvcache.load.client import Asker
from pytest_kvcache.load.content import is_jsonl, make_source
from pytest_kvcache.load.counting import TextCounter
from pytest_kvcache.load.prepare import prepare
from pytest_kvcache.load.prompts import PromptSource
from pytest_kvcache.load.provenance import argv, versions
from pytest_kvcache.load.rejections import clean_text
from pytest_kvcache.load.rowsfile import RowsFile, rows_path
from pytest_kvcache.load.target import Target, named_by_hand
from pytest_kvcache.records import LoadNote, LoadStart
from pytest_kvcache.server.redaction import redact_json

if TYPE_CHECKING:
    from pytest_kvcache.load.openloop import OpenLoop
    from pytest_kvcache.load.session import LoadSession

PROBE_TIMEOUT_S = 120.0
SPARE_FILES = 50


def open_rows(session: LoadSession) -> None:
    """Open the file of rows, or the line to the master. Raises CannotWrite."""
    if session.link is not None:
        session.rows = session.link.opens(session.load, session.went, session.halted)
        return
    session.rows = RowsFile(rows_path(session.knobs.rows, session.shape.profile, fixed=session.handed is not None))


def open_files() -> int:
    """Let this process open as many files as its hard limit allows, and return how many; 0 where there is no limit to be found."""
    try:
        import resource
    except ImportError:
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return 0 if soft == resource.RLIM_INFINITY else soft


def learn(session: LoadSession) -> None:
    """Learn from the server what the load needs. Raises UsageError, EndpointRefused, EndpointUnreachable."""
    knobs = session.knobs
    if session.handed is not None:
        targets = list(session.handed.targets)
    else:
        host = session.environment.host
        targets = named_by_hand(list(knobs.endpoints) or ([host] if host else []), knobs.of_server())
    session.environment.host = session.environment.host or targets[0].root
    timeout_s = min(knobs.request_timeout_s, PROBE_TIMEOUT_S)
    wanted = knobs.max_model_len or None
    session.prepared = prepare(
        Asker(targets[0], timeout_s),
        targets[0],
        max_model_len=wanted,
        source=knobs.lengths,
        nonce=session.nonce,
        messages=session.shape.shares,
        sleep=gevent.sleep,
    )
    limits = [session.prepared.max_model_len]
    session.targets = [session.prepared.target]
    for target in targets[1:]:
        asker = Asker(target, timeout_s)
        model, limit = choose_model(asker, target)
        session.targets.append(Target(**{name: getattr(target, name) for name in target.__struct_fields__} | {"model": model}))
        limits.append(limit)
    known = [limit for limit in limits if limit]
    session.max_model_len = wanted or (min(known) if known else None)
    if session.shape.needs_limit and session.max_model_len is None:
        raise UsageError(
            f"the profile {session.shape.profile} needs the longest context, and the server does not tell it",
            where=targets[0].root,
            hint="give it with --kv-max-model-len",
        )
    room = open_files()
    if session.planned_users + SPARE_FILES > room > 0:
        raise UsageError(
            f"{session.planned_users:,} users need as many connections, and this process may open {room:,} files",
            hint="raise ulimit -n, or spread the users over more processes (--processes)",
        )
    for target in session.targets:
        target.request_headers()
    session.own_connections = [False] * len(session.targets)
    _make_source(session)


def _make_source(session: LoadSession) -> None:
    prepared, target = session.prepared, session.targets[0]
    assert prepared is not None
    chat = target.api == "chat"
    if not session.knobs.content:
        session.source = PromptSource(prepared.vocabulary, session.nonce, chat=chat)
        return
    path = files.locate(session.handed, session.knobs.content)
    asker = Asker(target, min(session.knobs.request_timeout_s, PROBE_TIMEOUT_S))
    session.source, notes = make_source(path, asker, target.model, prepared.vocabulary, session.nonce, chat=chat, max_model_len=session.max_model_len)
    prepared.notes.extend(notes)
    session.shares = session.shares or is_jsonl(path)


def _shown_options(session: LoadSession) -> dict[str, Any]:
    named = {option.name for cls in session.shape.classes for option in cls.options if option.file}
    return {name: files.stamp(session.handed, str(value)) if name in named else value for name, value in session.knobs.profile_options.items()}


def text_counter(session: LoadSession) -> TextCounter:
    """Return what counts the tokens of a text as the first server does."""
    target = session.targets[0]
    return TextCounter(Asker(target, min(session.knobs.request_timeout_s, PROBE_TIMEOUT_S)), target.model)


def stages_of(session: LoadSession) -> tuple[Stage, ...]:
    """Return the stages of the load, in requests a second where a rate is given, else in users. Raises UsageError."""
    knobs = session.knobs
    base = knobs.rate or float(getattr(session.environment.parsed_options, "num_users", 0) or 1)
    return parse_stages(knobs.stages, base, knobs.duration_s or session.run_time_s)


def make_loop(session: LoadSession) -> OpenLoop | None:
    """Return the open loop of this worker, by --kv-rate or by the profile's own times; None for the closed loop. Raises UsageError."""
    from pytest_kvcache.load.openloop import OpenLoop

    knobs, classes = session.knobs, session.shape.classes
    own = next((plan for cls in classes if (plan := cls.schedule(session)) is not None), None)
    if not knobs.rate and own is None:
        return None
    plan = None if knobs.rate else own
    if plan is None:
        if knobs.arrivals == GAMMA and not knobs.burstiness > 0:
            raise UsageError("--kv-burstiness must be above 0", hint="1 is Poisson, 0.25 is uneven, 4 is even")
        stages = session.stages or (Stage(math.inf, knobs.rate, knobs.rate),)
        plan = partial(arrivals, knobs.arrivals, stages, knobs.seed, burstiness=knobs.burstiness, burst_size=max(1, knobs.burst_size))
    room = open_files()
    most = min(knobs.max_in_flight, room - SPARE_FILES) if room else knobs.max_in_flight
    return OpenLoop(session, list(classes), plan, max(1, most))


def _left_over(session: LoadSession) -> list[str]:
    """Tell what of a schedule of the profile's own (a trace) lies behind the end of the load."""
    loop, length_s = session.loop, session.length_s()
    if loop is None or session.knobs.rate or length_s <= 0:
        return []
    whole, within = loop.scheduled(0.0), loop.scheduled(length_s)
    what = f"the load ends after {length_s:g} s: only {within:,} of {whole:,} scheduled requests start before that (-t, --kv-duration-s)"
    return [what] if within < whole else []


def write_start(session: LoadSession) -> None:
    """Write the start line, and say on the terminal what was learnt."""
    prepared, knobs, rows = session.prepared, session.knobs, session.rows
    assert prepared is not None
    assert rows is not None
    options = {
        "lanes": list(session.shape.lanes),
        "users": session.planned_users,
        "duration_s": session.length_s(),
        "requests": knobs.requests,
        "output_tokens": session.output_tokens,
        "max_model_len": session.max_model_len,
        "api": session.targets[0].api,
        "model": session.targets[0].model,
        "endpoints": [target.root for target in session.targets],
        "extra_body": redact_json(session.targets[0].extra_body),
        "nonce": session.nonce,
        "length_source": prepared.vocabulary.source,
        "length_overhead": prepared.vocabulary.overhead,
        "ignore_eos": prepared.ignore_eos,
        "expects_usage": prepared.expects_usage,
        "ramp_s": knobs.ramp_over_s(session.length_s()),
        "rate": knobs.rate,
        "scheduled": session.loop.scheduled(session.length_s()) if session.loop is not None else None,
        "arrivals": knobs.arrivals if knobs.rate else "own" if session.loop is not None else "",
        "burstiness": knobs.burstiness if knobs.rate and knobs.arrivals == GAMMA else None,
        "burst_size": knobs.burst_size if knobs.rate and knobs.arrivals == BURST else None,
        "max_in_flight": knobs.max_in_flight if session.loop is not None else None,
        "stages": knobs.stages,
        "think_s": knobs.think_s,
        "backoff_s": knobs.backoff_s,
        "retries": knobs.retries,
        "request_timeout_s": knobs.request_timeout_s,
        "stop_timeout_s": float(session.environment.stop_timeout or 0),
        "profile_options": _shown_options(session),
        "content": files.stamp(session.handed, knobs.content),
        "shared_prompts": session.shares,
    }
    rows.put(LoadStart(session.now_s(), session.shape.profile, session.worker, knobs.seed, options, versions(), argv()))
    rows.put(LoadNote(session.now_s(), "prepared", "what the preparation asked of the server", prepared.spent))
    if session.max_model_len and session.output_tokens >= session.max_model_len:
        what = f"answers of {session.output_tokens:,} tokens do not fit the longest context of {session.max_model_len:,}: they will be clamped or refused"
        prepared.notes.append(what)
    told = [("prepared", note) for note in (*prepared.notes, *_left_over(session))] + [(contract.OTHER_NOTE, note) for note in prepared.differs]
    for subject, note in told:
        session.note(subject, note)
        session.say(note)
    session.say(
        f"{session.shape.profile}: model {clean_text(session.targets[0].model, 100)}, longest context {session.max_model_len or 'unknown'}, "
        f"lengths by {prepared.vocabulary.source}, rows in {rows.path}"
    )
