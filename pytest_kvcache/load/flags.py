"""The ``--kv-*`` options of a profile on Locust's command line and web page, declared once, and read back as one value."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load.arrivals import PROCESSES, SHAPES, is_listed, parse_stages, total_s
from pytest_kvcache.load.contract import ProfileOption
from pytest_kvcache.load.prompts import SOURCES

STOP_TIMEOUT_S = 30
BY_HAND_RUN_TIME_S = 300
LONGEST_RAMP_S = 1.0

# name, default, help, whether the web page's form shows it
_SERVER: tuple[tuple[str, Any, str, bool], ...] = (
    ("endpoints", [], "URL of a server, in place of -H; repeat it or part with commas: users are spread over them in turn", False),
    ("model", "", "model name to ask for; default: the only one that the server lists", True),
    ("api", "completions", "which API is used: completions or chat", True),
    ("header", [], "extra HTTP header as 'Name: value'; repeatable", False),
    ("extra_body", "", "JSON object merged into every request body", False),
    ("api_key_env", "", "environment variable that holds the API key", False),
    ("ca", "", "CA bundle that TLS certificates are verified with", False),
    ("proxy", "", "HTTP proxy; proxies of the environment are not used", False),
    ("metrics_url", [], "where the KV page and line read telemetry, if not at /metrics of the one server; repeatable", False),
    ("metrics_api_key_env", "", "environment variable that holds a key for /metrics; the API key is never sent there", False),
)
_LOAD: tuple[tuple[str, Any, str, bool], ...] = (
    ("output_tokens", 0, "tokens asked for in each request; 0 takes the profile's own", True),
    ("max_model_len", 0, "longest context in tokens that lengths are made from; 0 asks the server", True),
    ("requests", 0, "stop after that many requests in all; 0 does not count", True),
    ("duration_s", 0.0, "length of the load in seconds after its preparation; 0 leaves it to Locust's -t", False),
    ("seed", 1, "seed of lengths and prompts", True),
    ("nonce", "", "text that makes the prompts of this run differ from all others; default: a new one for each run", False),
    ("content", "", "text file that prompts are cut from, or JSONL of prompts of your own; default: words drawn from the seed", False),
    ("lengths", "auto", f"how exact lengths are made: auto, {', '.join(SOURCES)}", True),
    ("rate", 0.0, "requests a second that start whatever earlier ones do (open loop); 0 leaves it to the users (closed loop)", True),
    ("arrivals", "poisson", f"how the requests of --kv-rate arrive: {', '.join(PROCESSES)}", True),
    ("burstiness", 1.0, "evenness of gamma arrivals: 1 as Poisson, below 1 more uneven, above 1 more even", True),
    ("burst_size", 8, "requests that start at once in burst arrivals", True),
    ("max_in_flight", 2000, "most requests of an open loop in flight at once; arrivals above it wait, and that is reported", True),
    ("stages", "", f"level over time: {', '.join(SHAPES)}, or a list as 30s:2,1m:2-8 of requests a second (--kv-rate) or users", True),
    ("ramp_s", -1.0, "seconds over which the users start, evenly; 0 starts all at once, in lockstep; -1 is a tenth of the load, at most 1 s", True),
    ("think_s", 0.0, "seconds that a user waits after an answer", True),
    ("backoff_s", 0.25, "seconds that a user waits after a refusal or a broken connection, and a first retry where no Retry-After says it", True),
    ("retries", 0, "how often a request that was refused, or failed before its first token, is sent again; each attempt is a row of its own", True),
    ("request_timeout_s", 300.0, "longest time in seconds that one request may take", True),
    ("rows", "", "file that gets one row a request; default: reports/<time>-locust-<profile>/requests.jsonl", False),
    ("keep_text", False, "keep prompts and answers in the rows", False),
)
_CHOICES = {"api": ("completions", "chat"), "lengths": ("auto", *SOURCES), "arrivals": PROCESSES}


@dataclass(frozen=True)
class Knobs:
    """The options of one load, as they are now: the web page may change them from one start to the next."""

    endpoints: tuple[str, ...] = ()
    model: str = ""
    api: str = "completions"
    header: tuple[str, ...] = ()
    extra_body: str = ""
    api_key_env: str = ""
    ca: str = ""
    proxy: str = ""
    metrics_url: tuple[str, ...] = ()
    metrics_api_key_env: str = ""
    output_tokens: int = 0
    max_model_len: int = 0
    requests: int = 0
    duration_s: float = 0.0
    seed: int = 1
    nonce: str = ""
    content: str = ""
    lengths: str = "auto"
    rate: float = 0.0
    arrivals: str = "poisson"
    burstiness: float = 1.0
    burst_size: int = 8
    max_in_flight: int = 2000
    stages: str = ""
    ramp_s: float = -1.0
    think_s: float = 0.0
    backoff_s: float = 0.25
    retries: int = 0
    request_timeout_s: float = 300.0
    rows: str = ""
    keep_text: bool = False
    profile_options: Mapping[str, Any] = field(default_factory=dict)

    def of_server(self) -> dict[str, Any]:
        """Return the settings of the server by their names in ``Settings``."""
        return {name: getattr(self, name) for name in ("model", "api", "header", "extra_body", "api_key_env", "ca", "proxy")}

    def of_telemetry(self) -> dict[str, Any]:
        """Return the settings of where telemetry is read, by their names in ``Settings``."""
        return {name: getattr(self, name) for name in ("metrics_url", "metrics_api_key_env")}

    def ramp_over_s(self, length_s: float) -> float:
        """Return the seconds over which the users of a load of ``length_s`` seconds start (0: it has no end of its own).

        A counted load starts them all at once unless told otherwise: the first ones could send all there is.
        """
        if self.ramp_s >= 0 or self.requests:
            return max(0.0, self.ramp_s)
        return min(LONGEST_RAMP_S, length_s / 10) if length_s > 0 else LONGEST_RAMP_S


class Unasked(int):
    """The time of a run in seconds where nobody gave -t: stages that hold times of their own last longer than that."""


class OuterBound(float):
    """Locust's own -t in seconds, late enough that the load itself ends first; it reads as the length of the load."""

    def __new__(cls, length_s: float, more_s: float) -> OuterBound:
        """Return ``length_s + more_s``, which is shown as ``length_s``."""
        bound = super().__new__(cls, length_s + more_s)
        bound.length_s = length_s
        return bound

    length_s: float

    def __str__(self) -> str:
        return f"{self.length_s:g}"


def own_clock(options: Any, spare_s: float) -> None:
    """Let a load that was started by hand last as long as was asked for, from its begin on.

    Locust counts -t from before the preparation, on a clock that is late by the time of its imports: a load of 30 s would last 28. So -t becomes
    the load's own length, and Locust's clock only bounds the whole, ``spare_s`` later. Stages with times of their own need no -t.
    """
    asked = options.run_time
    if not asked:
        return
    length_s = float(options.kv_duration_s)
    if not isinstance(asked, Unasked):
        length_s = min(float(asked), length_s or math.inf)
    elif not length_s and is_listed(str(options.kv_stages)):
        with contextlib.suppress(UsageError):  # it is told when the load starts
            length_s = total_s(parse_stages(str(options.kv_stages), 1.0, 0.0))
    options.kv_duration_s = length_s or float(asked)
    options.run_time = OuterBound(options.kv_duration_s, spare_s)


def flag(name: str) -> str:
    """Return the flag of an option: ``output_tokens`` is ``--kv-output-tokens``."""
    return "--kv-" + name.replace("_", "-")


def _kind(default: Any, where: str) -> Any:
    def parse(text: str) -> Any:
        try:
            value = type(default)(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{where} takes a number, not {text[:80]!r}") from None
        if isinstance(value, (int, float)) and not min(0, default) <= value < 1e15:
            raise argparse.ArgumentTypeError(f"{where} takes a number from {min(0, default):g} on, not {text[:80]!r}")
        return value

    return parse


def declare(parser: Any, options: Iterable[ProfileOption], defaults: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
    """Add our options and the profile's to Locust's parser, and put its own defaults where a KV load needs them.

    ``defaults`` holds the users of the profile, ``own`` its defaults of our options by name. Locust's listeners get the loopback address unless
    told otherwise, a run by hand ends by itself, and what is in flight at its end may finish.
    """
    group = parser.add_argument_group(
        "KV load options (pytest-kvcache)",
        f"A load ends after {BY_HAND_RUN_TIME_S} s unless -t says otherwise. The web page and a master listen on 127.0.0.1 unless "
        "--web-host and --master-bind-host say otherwise.",
    )
    for name, default, text, shown in (*_SERVER, *_LOAD):
        _add(group, name, type(default)((own or {}).get(name, default)), text, shown)
    # Locust answers --help before it has read the profile, and so without what the profile adds.
    group.add_argument("--kv-help", action="help", help="show all options, with those of the profile, and exit")
    extra = parser.add_argument_group("Options of this profile")
    for option in {option.name: option for option in options}.values():
        _add(extra, option.name, option.default, option.help, True)
    parser.set_defaults(
        web_host="127.0.0.1",
        master_bind_host="127.0.0.1",
        stop_timeout=STOP_TIMEOUT_S,
        run_time=Unasked(BY_HAND_RUN_TIME_S),
        num_users=defaults["users"],
        spawn_rate=min(100, max(1, defaults["users"])),
    )


def _add(group: Any, name: str, default: Any, text: str, shown: bool) -> None:
    extra: dict[str, Any] = {}
    if isinstance(default, bool):
        extra["action"] = "store_true"
    elif isinstance(default, list):
        extra["action"] = "append"
        extra["metavar"] = "HEADER" if name == "header" else "URL"
    else:
        extra["type"] = _kind(default, flag(name)) if isinstance(default, (int, float)) else str
        extra["metavar"] = "TEXT" if isinstance(default, str) else "N"
    if name in _CHOICES:
        extra["choices"] = _CHOICES[name]
        del extra["metavar"]
    shown_default = "" if default in ("", [], False) else f" (default {default})"
    action = group.add_argument(flag(name), dest=f"kv_{name}", default=default, help=(text + shown_default).replace("%", "%%"), **extra)
    # Locust's web page shows the actions that carry these attributes; its own add_argument sets them, a group's does not.
    if shown:
        action.include_in_web_ui = True
        action.is_secret = action.is_required = action.is_multiple = False


def knobs(parsed: Any, options: Iterable[ProfileOption]) -> Knobs:
    """Return the options as they are in a parsed namespace of Locust."""
    values: dict[str, Any] = {}
    for name, default, _, _ in (*_SERVER, *_LOAD):
        value = getattr(parsed, f"kv_{name}", default)
        if isinstance(default, list):
            value = tuple(value or ())
        values[name] = value
    addresses = [part.strip() for text in values["endpoints"] for part in str(text).split(",") if part.strip()]
    values["endpoints"] = tuple(addresses)
    chosen = {option.name: getattr(parsed, f"kv_{option.name}", option.default) for option in options}
    return Knobs(**values, profile_options=chosen)
