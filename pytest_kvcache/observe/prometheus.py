"""A Prometheus server that scrapes a fleet already, as the source: the same quantities, now and for windows that are past.

Source: Prometheus HTTP API v1, ``/api/v1/label/__name__/values``, ``/api/v1/query`` and ``/api/v1/query_range`` (at most 11,000 points a
series; a value is repeated for up to five minutes after its scrape, or until the target is marked stale). The series go through the
dialects' own readers, target by target: nothing is computed by PromQL.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec

from pytest_kvcache.engines import (
    DIALECTS,
    NOT_OVER_MODELS,
    Dialect,
    RawState,
    Sample,
    Samples,
    clean,
    detect,
    models_of,
    read,
    read_values,
    shown_models,
    wanted_by,
)
from pytest_kvcache.errors import CannotJudge, EndpointRefused, UnknownEngine, UsageError
from pytest_kvcache.observe.joining import telling_servers_apart
from pytest_kvcache.observe.moments import TooMany, at_steps, moments
from pytest_kvcache.observe.refusals import no_prometheus, refused
from pytest_kvcache.observe.sampled import SAMPLED
from pytest_kvcache.observe.series import TARGET, Key, Marked, Series, by_target, key_of, millis, name_of, samples_of, series_of, utc
from pytest_kvcache.quantities import Missing, Reading, Value
from pytest_kvcache.records import SnapshotRecord, TelemetryRow, ValueRecord
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.server.transport import ask
from pytest_kvcache.settings import Settings

MOST_LOOKS = 100_000
_BYTES = 32 << 20
_SELECTOR = re.compile(r'\s*+\{?(\s*+(?:[a-zA-Z_][a-zA-Z0-9_]*+\s*+(?:=~|!~|!=|=)\s*+"(?:[^"\\\n]++|\\.)*+"\s*+(?:,\s*+|(?=\}|\Z)))*+)\}?\s*+\Z')


@dataclass(frozen=True)
class Target:
    """One scraped server in a window of time. ``dialect`` is None, and ``error`` says why, where none reads its series.

    ``rows`` are in order of time, one a step; ``values`` of a row are the numeric quantities, and ``error`` says that nothing was there.
    ``models`` are those that its series name, ``repeats`` the places of the rows that show the same scrape as the row before them.
    """

    name: str
    labels: Mapping[str, str]
    dialect: Dialect | None
    rows: list[TelemetryRow] = field(default_factory=list)
    error: str = ""
    models: tuple[str, ...] = ()
    repeats: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Fleet:
    """All targets at one moment: ``whole`` combines them by the rule of each quantity (pools add, usage is weighted by blocks).

    ``skipped`` are targets that the selector matches and no dialect reads, ``labels`` those of the targets that are read.
    """

    whole: SnapshotRecord
    targets: dict[str, SnapshotRecord]
    title: str = ""
    skipped: tuple[str, ...] = ()
    labels: tuple[Mapping[str, str], ...] = ()


class Prometheus:
    """Asks one Prometheus server; a context manager.

    ``url`` is its address with its path prefix, without /api. No key is sent but the one in the environment variable
    ``api_key_env``; user-info of the address becomes Basic authorization of that address. Raises UsageError for an address or a
    selector (``job="vllm",namespace="prod"``) that cannot be meant. ``model`` names the one that is read, where the series name several.
    """

    def __init__(
        self,
        url: str,
        selector: str = "",
        *,
        api_key_env: str = "",
        ca: str = "",
        proxy: str = "",
        timeout_s: float = 30.0,
        dialects: Iterable[Dialect] | None = None,
        model: str = "",
    ) -> None:
        settings = Settings(metrics_api_key_env=api_key_env, ca=ca, proxy=proxy)
        self.endpoint: Endpoint = parse_endpoint(re.sub(r"/(?:api/v1|graph|query)/?\Z", "", url.strip()), settings)
        self.selector = _matchers(selector)
        self.timeout_s = timeout_s
        self.model = model
        self.dialects = list(DIALECTS.values() if dialects is None else dialects)
        self._wanted = wanted_by(self.dialects)
        self._names_held: list[str] = []
        self._client = self.endpoint.client(timeout_s=timeout_s, metrics=True)

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def window(self, start_wall_s: float, end_wall_s: float, step_s: float | None = None) -> list[Target]:
        """Return every target with one row a step from ``start_wall_s`` to ``end_wall_s`` (Unix seconds), both included.

        Without ``step_s`` the step follows the length of the window. Raises UsageError for a window that cannot be meant or has too
        many points, CannotJudge where no series is there, and EndpointUnreachable or EndpointRefused where the server does not answer
        as a Prometheus.
        """
        return at_steps(end_wall_s - start_wall_s, step_s, lambda step: self._window(moments(start_wall_s, end_wall_s, step)))

    def _window(self, times: Sequence[int]) -> list[Target]:
        names = self._names(times[0] / 1000, times[-1] / 1000)
        targets = by_target(self._range(self._query(names), times))
        if len(targets) * len(times) > MOST_LOOKS:
            raise TooMany(
                f"{len(targets)} targets x {len(times):,} points are more than {MOST_LOOKS:,}",
                hint="a longer step, a shorter window or a narrower selector",
            )
        scraped = self._scraped(targets, times)
        read_ones = [
            _with_repeats(target, scraped.get(key, {}))
            for key, found in sorted(targets.items())
            if (target := read_target(self.dialects, key, found, times, self.model)) is not None
        ]
        if not read_ones:
            raise CannotJudge(
                f"{len(targets)} targets match, and no dialect reads any of them",
                where=self.endpoint.shown,
                hint="a selector that matches the engines",
            )
        return read_ones

    def _range(self, query: str, times: Sequence[int]) -> list[Series]:
        """Return the samples at ``times`` (of ``moments``): where the last is no step from the one before, it is asked for by itself."""
        step = times[1] - times[0] if len(times) > 1 else 1000
        parts = [times] if (times[-1] - times[0]) % step == 0 else [times[:-1], times[-1:]]
        found: dict[Key, Series] = {}
        for part in parts:
            form = {"query": query, "start": f"{part[0] / 1000:.3f}", "end": f"{part[-1] / 1000:.3f}", "step": f"{step / 1000:.3f}"}
            for labels, points in self._result("/api/v1/query_range", form, "matrix"):
                found.setdefault(tuple(sorted(labels.items())), (labels, []))[1].extend(points)
        return list(found.values())

    def _scraped(self, targets: Mapping[Key, Sequence[Marked]], times: Sequence[int]) -> dict[Key, dict[int, float]]:
        """Return when the value at each moment was scraped, by target; nothing of a server that does not tell."""
        names = Counter(name for found in targets.values() for name in {labels.get("__name__", "") for labels, _ in found})
        if not names:
            return {}
        ((name, _),) = names.most_common(1)
        try:
            series = self._range(f"timestamp({self._query([name])})", times)
        except (EndpointRefused, TooMany):
            return {}
        stamps: dict[Key, dict[int, float]] = {}
        for labels, points in series:
            of = stamps.setdefault(key_of(labels), {})
            for at, value in points:
                of[millis(at)] = max(value, of.get(millis(at), 0.0))
        return stamps

    def snapshot(self, at_wall_s: float | None = None) -> Fleet:
        """Return all targets as they were at ``at_wall_s`` (Unix seconds; default: now). Raises what ``window`` raises, and UnknownEngine."""
        wall_s = time.time() if at_wall_s is None else at_wall_s
        names = self._names(wall_s - 300, wall_s)
        series = self._result("/api/v1/query", {"query": self._query(names), "time": f"{wall_s:.3f}"}, "vector")
        if not series:
            raise CannotJudge(
                f"no series was there at that time ({utc(wall_s)})", where=self.endpoint.shown, hint="another --at, or a wider selector"
            )
        targets: dict[str, SnapshotRecord] = {}
        states: list[tuple[Dialect, Samples]] = []
        labels_of: list[Mapping[str, str]] = []
        skipped: list[str] = []
        for key, found in sorted(by_target(series).items()):
            samples = samples_of((labels, value[0][1]) for labels, value in found)
            raw = state_of(self.dialects, samples, self.model)
            try:
                dialect = detect(raw, self.dialects)
            except UnknownEngine as error:
                if "several engines" in error.what:
                    raise UnknownEngine(f"{name_of(key)}: {error.what}", where=self.endpoint.shown, hint=error.hint) from None
                skipped.append(name_of(key))
                continue
            if _is_other(dialect, models_of(dialect, raw), self.model):
                continue
            targets[name_of(key)] = read(dialect, raw, wall_s, name_of(key))
            states.append((dialect, samples))
            labels_of.append(dict(key))
        if not states:
            raise CannotJudge(
                f"no target serves {clean(self.model, 80)}" if self.model else f"{len(skipped)} targets match, and no dialect reads any of them",
                where=self.endpoint.shown,
                hint="a selector that matches the engines",
            )
        first = states[0][0]
        if any(dialect.name != first.name for dialect, _ in states):
            engines = sorted({dialect.title for dialect, _ in states})
            raise UnknownEngine(
                f"cannot judge: the selector matches several engines: {', '.join(engines)}", where=self.endpoint.shown, hint="a narrower selector"
            )
        joined: dict[str, list[Sample]] = {}
        for _, samples in states:
            for name, rows in samples.rows.items():
                joined.setdefault(name, []).extend(rows)
        several = telling_servers_apart(first, *TARGET) if len(states) > 1 else first
        state = state_of(self.dialects, Samples(joined, frozenset(joined)), self.model)
        whole = read(several, state, wall_s, self.endpoint.shown)
        models = [] if self.model else models_of(several, state)
        if len(models) > 1:
            why = ValueRecord.of(
                Missing(f"the selector matches {len(models)} models ({shown_models(models)}), of which each has its own row: name one (--model)")
            )
            whole = msgspec.structs.replace(whole, quantities={**whole.quantities, **dict.fromkeys(NOT_OVER_MODELS, why)})
        return Fleet(whole, targets, first.title, tuple(skipped), tuple(labels_of))

    def series(self, names: Iterable[str], selector: str, start_wall_s: float, end_wall_s: float, step_s: float) -> list[Series]:
        """Return series of other targets by name, each with its labels and samples at the steps; [] where there are none. Raises what ``window`` raises."""
        return self._range(self._query(names, _matchers(selector)), moments(start_wall_s, end_wall_s, step_s))

    def latest(self, wall_s: float, reach_s: float = 60.0) -> tuple[Samples, dict[Key, float]]:
        """Return the newest samples of all targets in the ``reach_s`` seconds before ``wall_s``, and when each was scraped.

        Unlike ``snapshot`` it sees when a value was scraped, and takes none that is older. Raises what ``window`` raises.
        """
        if not self._names_held:
            self._names_held = self._names(wall_s - 3600, wall_s)
        query = f"{self._query(self._names_held)}[{round(reach_s * 1000)}ms]"
        series = self._result("/api/v1/query", {"query": query, "time": f"{wall_s:.3f}"}, "matrix")
        if not series:
            raise CannotJudge(f"Prometheus has scraped none of the targets for {reach_s:g} s", where=self.endpoint.shown)
        newest: dict[Key, float] = {}
        for labels, points in series:
            key = key_of(labels)
            newest[key] = max(newest.get(key, 0.0), points[-1][0])
        return samples_of((labels, points[-1][1]) for labels, points in series), newest

    def _query(self, names: Iterable[str], selector: str | None = None) -> str:
        pattern = "|".join(re.escape(name) for name in names).replace("\\", "\\\\")
        matchers = self.selector if selector is None else selector
        return f'{{__name__=~"{pattern}"{"," + matchers if matchers else ""}}}'

    def _names(self, start_wall_s: float, end_wall_s: float) -> list[str]:
        """Return the names of series that a dialect reads and the server holds. Raises CannotJudge, with the reason, where there are none."""
        form = {"start": f"{start_wall_s:.3f}", "end": f"{end_wall_s:.3f}"}
        if self.selector:
            form["match[]"] = f"{{{self.selector}}}"
        held = self._data("/api/v1/label/__name__/values", form, "GET")
        if not isinstance(held, list):
            raise no_prometheus(self.endpoint, "its list of names has another form")
        names = [name for name in held if isinstance(name, str)]
        known = sorted(name for name in names if name in self._wanted)
        if known:
            return known
        where = self.endpoint.shown
        if not names:
            hint = "look at the labels of a target under /targets of the server" if self.selector else "does it scrape anything yet?"
            when = f"between {utc(start_wall_s)} and {utc(end_wall_s)}"
            raise CannotJudge(
                f"no series matches {{{self.selector}}} {when}" if self.selector else f"it holds no series {when}", where=where, hint=hint
            )
        shown = ", ".join(clean(name, 60) for name in names[:8])
        raise CannotJudge(
            f"{len(names)} series match, and no dialect reads any of them: {shown}",
            where=where,
            hint="a selector that matches the engines' own targets",
        )

    def _result(self, path: str, form: dict[str, str], kind: str) -> list[Series]:
        data = self._data(path, form, "POST")
        if not isinstance(data, dict) or data.get("resultType") != kind or not isinstance(data.get("result"), list):
            raise no_prometheus(self.endpoint, f"its result is no {kind}")
        series = series_of(data["result"])
        if series is None:
            raise no_prometheus(self.endpoint, "a series of its result has another form")
        return series

    def _data(self, path: str, form: dict[str, str], method: str) -> Any:
        if method == "GET":
            import httpx

            answer = ask(self.endpoint, self._client, "GET", f"{path}?{httpx.QueryParams(form)}", timeout_s=self.timeout_s, limit_bytes=_BYTES)
        else:
            answer = ask(self.endpoint, self._client, "POST", path, form=form, timeout_s=self.timeout_s, limit_bytes=_BYTES)
        body = answer.value
        if answer.status == 200 and not answer.cut and isinstance(body, dict) and body.get("status") == "success":
            return body.get("data")
        raise refused(self.endpoint, path, answer)


def state_of(dialects: Iterable[Dialect], samples: Samples, model: str = "") -> RawState:
    """Return samples of a Prometheus server as the state of a server, whose JSON bodies are not there."""
    state = RawState(metrics=samples, model=model)
    state.json = {path.path: Missing(f"{path.path} is not in Prometheus") for dialect in dialects for path in dialect.json_paths}
    return state


def read_target(dialects: Sequence[Dialect], key: Key, found: Sequence[Marked], times: Sequence[int], model: str = "") -> Target | None:
    """Return one target with a row for each of ``times`` (milliseconds); None where it is no engine at all (an exporter of something else),
    or serves another model than the one that was asked for.
    """
    name, labels = name_of(key), dict(key)
    every = state_of(dialects, samples_of((own, math.nan) for own, _ in found))
    try:
        dialect = detect(every, dialects)
    except UnknownEngine as error:
        return Target(name, labels, None, error=error.what) if "several engines" in error.what else None
    models = models_of(dialect, every)
    if _is_other(dialect, models, model):
        return None
    at = [(own, dict(values)) for own, values in found]
    rows = []
    for mark in times:
        wall_s = mark / 1000
        samples = samples_of((own, values[mark]) for own, values in at if mark in values)
        if not samples.rows:
            rows.append(TelemetryRow(wall_s=wall_s, error="Prometheus holds no sample of this target at this time"))
            continue
        values = read_values(dialect, state_of(dialects, samples, model), wall_s, only=SAMPLED)
        numbers = _numbers(values.whole)
        ranks = {rank: _numbers(told) for rank, told in values.ranks.items()}
        rows.append(TelemetryRow(wall_s=wall_s, values=numbers, ranks=ranks, error="" if numbers else "no quantity could be read at this time"))
    return Target(name, labels, dialect, rows, models=tuple(models))


def _with_repeats(target: Target, scraped: Mapping[int, float]) -> Target:
    """Return the target with the places of its rows that show the scrape of the row before; ``scraped`` tells when each moment's value was scraped."""
    rows = [(scraped.get(millis(row.wall_s)), bool(row.values)) for row in target.rows]
    same = [now == before and now[0] is not None and now[1] for before, now in pairwise(rows)]
    return replace(target, repeats=frozenset(place for place, repeated in enumerate(same, start=1) if repeated))


def _is_other(dialect: Dialect, models: Sequence[str], asked: str) -> bool:
    """Say whether a server names its models and the one that was asked for is not among them."""
    folded = asked.lower() if dialect.model_in_any_case else asked
    return bool(asked and models) and folded not in models


def _numbers(values: Mapping[str, Value]) -> dict[str, float]:
    return {name: value.number() for name, value in values.items() if isinstance(value, Reading) and not isinstance(value.value, str)}


def window(url: str, selector: str, start_wall_s: float, end_wall_s: float, step_s: float | None = None, **how: Any) -> list[Target]:
    """Return the targets of a window, like ``Prometheus.window``; ``how`` are the keywords of ``Prometheus``."""
    with Prometheus(url, selector, **how) as server:
        return server.window(start_wall_s, end_wall_s, step_s)


def snapshot(url: str, selector: str = "", at_wall_s: float | None = None, **how: Any) -> Fleet:
    """Return a fleet at one moment, like ``Prometheus.snapshot``; ``how`` are the keywords of ``Prometheus``."""
    with Prometheus(url, selector, **how) as server:
        return server.snapshot(at_wall_s)


def _matchers(selector: str) -> str:
    """Return the matchers of a selector without its braces. Raises UsageError: what is no list of matchers never reaches the server."""
    match = _SELECTOR.fullmatch(selector) if len(selector) <= 2000 else None
    opened, closed = selector.strip()[:1] == "{", selector.strip()[-1:] == "}"
    if match is None or opened != closed:
        raise UsageError("this is no label selector", where=clean(selector, 200), hint='label matchers, as in job="vllm",namespace=~"prod.*"')
    inner = match.group(1).strip().rstrip(",").strip()
    if re.match(r"(?:.*,)?\s*__name__\s*[=!]", inner):
        raise UsageError("the selector cannot name the series: the dialects choose them", where=clean(selector, 200), hint="leave __name__ out")
    return inner
