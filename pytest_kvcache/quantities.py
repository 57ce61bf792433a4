"""What is measured: every canonical quantity with its unit and which way is better; ``Reading`` and ``Missing``.

A quantity's value is a Reading or it is Missing. Missing is a type and not a number: it cannot be compared with
anything, counted with, or turned into a float, so a gate cannot pass on it by accident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

Better = Literal["lower", "higher", ""]
Kind = Literal["gauge", "counter", "config"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """One canonical quantity. ``name`` is its name in every file; ``better`` says which way is better ("" = neither)."""

    name: str
    unit: str
    kind: Kind
    better: Better
    title: str
    help: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured value: ``value`` in ``unit``, ``source`` (series, endpoint or log line), ``wall_s`` Unix seconds (0: timeless)."""

    value: float | str | bool
    unit: str
    source: str
    wall_s: float = 0.0

    def number(self) -> float:
        """Return the value as a float. Raises TypeError for a text value."""
        if isinstance(self.value, str):
            raise TypeError(f"{self.value!r} ({self.source}) is text and not a number")
        return float(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Missing:
    """A value that is not there, and why. ``cannot_happen`` marks what the engine can never do (llama.cpp never preempts)."""

    reason: str
    cannot_happen: bool = False

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(f"a missing value cannot be compared or counted with: {self.reason}")

    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __float__ = __int__ = __bool__ = __index__ = __round__ = _refuse

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Missing):
            self._refuse()
        return (self.reason, self.cannot_happen) == (other.reason, other.cannot_happen)

    def __hash__(self) -> int:
        return hash((self.reason, self.cannot_happen))


Value = Reading | Missing


def _q(name: str, unit: str, kind: Kind, better: Better, title: str, help: str) -> tuple[str, Quantity]:
    return name, Quantity(name, unit, kind, better, title, help)


QUANTITIES: dict[str, Quantity] = dict(
    [
        _q("pool_blocks", "blocks", "config", "higher", "pool blocks", "blocks of the KV pool, as the engine counts them (vLLM: with the null block)"),
        _q("usable_blocks", "blocks", "config", "higher", "usable blocks", "blocks that requests can hold (vLLM: pool_blocks - 1 per engine)"),
        _q("block_size", "tokens", "config", "", "block size", "tokens per block"),
        _q("pool_tokens", "tokens", "config", "higher", "pool tokens", "tokens that the pool holds, by the engine's own definition"),
        _q("pool_bytes", "bytes", "config", "higher", "pool bytes", "memory of the KV pool"),
        _q("weights_bytes", "bytes", "config", "", "weights", "memory of the model's weights on one card (rank), as the server states it"),
        _q("sliding_window", "tokens", "config", "", "window", "tokens that every layer looks back, where all layers slide"),
        _q("max_concurrency", "requests", "config", "higher", "max concurrency", "requests at max_model_len that fit at once, by the engine's own figure"),
        _q("max_model_len", "tokens", "config", "", "max model length", "longest prompt + output of one request"),
        _q("max_num_seqs", "requests", "config", "", "seats", "most requests that run at once (llama.cpp: slots)"),
        _q("kv_dtype", "", "config", "", "KV dtype", "data type of the KV cache, as the engine states it"),
        _q("prefix_caching", "", "config", "", "prefix caching", "whether prefix caching is on"),
        _q("gpu_memory_utilization", "ratio", "config", "", "memory utilization", "share of the card that the engine was told to use"),
        _q("num_gpu_blocks_override", "blocks", "config", "", "pool override", "an artificial pool size that the user set"),
        _q("used_blocks", "blocks", "gauge", "lower", "used blocks", "blocks that live requests hold"),
        _q("free_blocks", "blocks", "gauge", "higher", "free blocks", "blocks that a new request could take (idle cached blocks are free in vLLM and SGLang)"),
        _q("used_tokens", "tokens", "gauge", "lower", "used tokens", "tokens of the pool that live requests hold"),
        _q("free_tokens", "tokens", "gauge", "higher", "free tokens", "tokens of the pool that a new request could take"),
        _q("usage", "ratio", "gauge", "lower", "KV usage", "used share of the usable pool, 0 to 1"),
        _q("running", "requests", "gauge", "", "running", "requests in the running batch"),
        _q("waiting", "requests", "gauge", "lower", "waiting", "requests that wait"),
        _q("waiting_capacity", "requests", "gauge", "lower", "waiting for KV or a seat", "requests that wait because there is no KV or no seat"),
        _q("swapped", "requests", "gauge", "lower", "swapped", "requests swapped out to host memory (vLLM V0)"),
        _q("preemptions", "events", "counter", "lower", "preemptions", "running requests put back into the queue, since the server started"),
        _q("rejections", "requests", "counter", "lower", "admission rejections", "requests that the engine's own queue limit refused"),
        _q("prefix_queries", "tokens", "counter", "", "prefix queries", "tokens looked up in the prefix cache"),
        _q("prefix_hits", "tokens", "counter", "higher", "prefix hits", "tokens found in the prefix cache"),
        _q("prompt_tokens", "tokens", "counter", "", "prompt tokens", "prompt tokens processed"),
        _q("generation_tokens", "tokens", "counter", "", "generated tokens", "tokens generated"),
        _q("finished", "requests", "counter", "", "finished", "requests that the engine finished"),
        _q("finished_stop", "requests", "counter", "", "finished by stop", "requests finished by an end token or stop word"),
        _q("finished_length", "requests", "counter", "", "finished by length", "requests finished by their length limit"),
        _q("finished_abort", "requests", "counter", "", "finished by abort", "requests that were aborted"),
        _q("finished_error", "requests", "counter", "lower", "finished by error", "requests that ended in an error"),
        _q("start_time", "s", "gauge", "", "start time", "Unix time at which the server process, or its counters, began"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Known:
    """A quantity that conditions may name: its unit, which way is better, whether each lane and rejection class has its own."""

    unit: str
    better: Better
    title: str
    lanes: bool = False
    classes: bool = False


def _known() -> dict[str, Known]:
    ratio, s, tokens, requests = "ratio", "s", "tokens", "requests"
    found = {
        "usage.peak": Known(ratio, "lower", "peak KV usage"),
        "usage.mean": Known(ratio, "lower", "mean KV usage"),
        "usage.hottest": Known(ratio, "lower", "peak KV usage of the fullest replica or rank"),
        "usage.spread": Known(ratio, "lower", "widest distance between the mean KV usage of two replicas or ranks"),
        "free_blocks.min": Known("blocks", "higher", "fewest free blocks"),
        "free_blocks.tightest": Known("blocks", "higher", "fewest free blocks of any replica"),
        "free_tokens.min": Known(tokens, "higher", "fewest free tokens"),
        "free_tokens.tightest": Known(tokens, "higher", "fewest free tokens of any replica"),
        "used_blocks.peak": Known("blocks", "lower", "most used blocks"),
        "used_tokens.peak": Known(tokens, "lower", "most used tokens"),
        "running.peak": Known(requests, "", "most running requests"),
        "running.mean": Known(requests, "", "mean of running requests"),
        "running.at_peak": Known(requests, "", "running requests at peak usage"),
        "waiting.peak": Known(requests, "lower", "most waiting requests"),
        "mean_length.at_peak": Known(tokens, "", "mean length of live requests at peak usage"),
        "payload.peak": Known(tokens, "", "most tokens that our live requests had in the cache, lower bound"),
        "payload.peak_upper": Known(tokens, "", "most tokens that our live requests had in the cache, upper bound"),
        "preemptions": Known("events", "lower", "preemptions"),
        "rejections_engine": Known(requests, "lower", "requests refused by the engine's own queue limit"),
        "rejections": Known(requests, "lower", "rejected requests", lanes=True, classes=True),
        "requests.sent": Known(requests, "", "requests sent", lanes=True),
        "requests.ok": Known(requests, "higher", "requests answered in full", lanes=True),
        "requests.stopped_early": Known(requests, "", "requests that stopped before their length", lanes=True),
        "requests.cut_off": Known(requests, "", "requests in flight when the load ended", lanes=True),
        "prompt_tokens": Known(tokens, "", "prompt tokens of our requests", lanes=True),
        "output_tokens": Known(tokens, "", "output tokens of our requests", lanes=True),
        "prompt_length.mean": Known(tokens, "", "mean prompt length", lanes=True),
        "prompt_length.max": Known(tokens, "", "longest prompt", lanes=True),
        "prompt_length.off": Known(requests, "lower", "prompts with another length than planned, by any token", lanes=True),
        "throughput": Known("tokens/s", "higher", "output tokens a second", lanes=True),
        "gap.max": Known(s, "lower", "longest gap inside an answer", lanes=True),
        "prefix_hits": Known(tokens, "", "tokens found in the prefix cache"),
        "scrape.coverage": Known(ratio, "higher", "share of the window that telemetry covers"),
        "idle.usage": Known(ratio, "lower", "KV usage after the load"),
        "idle.used_blocks": Known("blocks", "lower", "used blocks after the load"),
        "idle.used_tokens": Known(tokens, "lower", "used tokens after the load"),
        "idle.running": Known(requests, "lower", "running requests after the load"),
        "idle.waiting": Known(requests, "lower", "waiting requests after the load"),
        "ledger.squeezed_bytes": Known("bytes", "lower", "memory that the pool lacks of what share and weights leave"),
        "ledger.squeezed_share": Known(ratio, "lower", "share of the expected pool that it lacks"),
        "ledger.expected_pool_bytes": Known("bytes", "", "pool that share and weights leave"),
        "ledger.idle_bytes": Known("bytes", "lower", "free memory that the engine may not take"),
        "ledger.idle_inside_bytes": Known("bytes", "lower", "free memory within the engine's share"),
        "ledger.over_bytes": Known("bytes", "lower", "memory taken beyond the share of the card"),
        "ledger.other_bytes": Known("bytes", "lower", "memory of other processes on the card"),
        "ledger.free_bytes": Known("bytes", "higher", "free memory of the card"),
        "ledger.server_bytes": Known("bytes", "lower", "memory of the server's processes"),
        "ledger.rest_bytes": Known("bytes", "lower", "memory of the server beside pool and weights"),
        "server.cpu_s": Known(s, "lower", "CPU time of the server's processes over the load"),
        "waste.padded_share": Known(ratio, "higher", "payload share if every request were padded to the longest"),
        "waste.paged_share": Known(ratio, "higher", "payload share in pages of the engine's block size"),
        "length.mean": Known(tokens, "", "mean length that requests reached"),
        "length.max": Known(tokens, "", "longest length that a request reached"),
        "balance.usage_over_mean": Known("factor", "lower", "highest mean KV usage over the mean of all members"),
        "balance.live_over_mean": Known("factor", "lower", "highest mean of live requests over the mean of all members"),
        "balance.live_surely": Known("factor", "lower", "the same, its lower 95 % bound: what is more than chance"),
        "balance.running_spread": Known(requests, "lower", "widest distance between the mean running requests of two members"),
        "balance.waiting_spread": Known(requests, "lower", "widest distance between the mean waiting requests of two members"),
        "balance.gpu_memory_spread": Known("bytes", "lower", "widest distance between the memory in use of two cards"),
        "balance.gpu_over_mean": Known("factor", "lower", "most memory in use on a card of a server over the mean of its cards"),
        "balance.idle_while_waiting": Known(ratio, "lower", "share of the load in which one member made requests wait while another idled"),
        "balance.idle_surely": Known(ratio, "lower", "the same, its lower 95 % bound: what is more than chance"),
        "fill.mean": Known(ratio, "higher", "tokens of our requests over slots held, mean"),
        "fill.at_peak": Known(ratio, "higher", "tokens of our requests over slots held, at peak usage"),
        "accounting.agreement": Known(ratio, "higher", "share of samples that our requests explain within one step"),
        "other_traffic.running": Known(requests, "lower", "requests on the server that are not ours"),
        "leak.blocks": Known("blocks", "lower", "blocks held while nothing ran or waited"),
        "leak.tokens": Known(tokens, "lower", "tokens held while nothing ran or waited"),
        "live_length.mean": Known(tokens, "", "mean length of our running requests"),
        "live_length.max": Known(tokens, "", "longest of our running requests"),
        "level.prompt": Known(tokens, "", "prompt tokens of one request alone in the cache, at the highest level"),
        "level.generated": Known(tokens, "", "generated tokens in the cache, at the highest level"),
        "level.common": Known(tokens, "", "tokens in the cache that several requests share, at the highest level"),
        "prefill.at_peak": Known(ratio, "", "share of live requests without a token yet, at peak usage"),
        "demand.peak": Known(ratio, "lower", "what was asked of one server at once at full length, over its pool"),
        "demand.planned": Known(ratio, "lower", "the longest request for every planned user, over the pool"),
        "demand.largest": Known(ratio, "lower", "the largest request that was sent, at its full length, over one server's pool"),
        "headroom": Known(requests, "higher", "largest requests that would have fitted beside the rest at the tightest moment", lanes=True),
        "waiting.capacity_peak": Known(requests, "lower", "most requests that waited for blocks or a seat"),
        "waiting.deferred_peak": Known(requests, "lower", "most requests that waited for another reason"),
        "preempted.tokens": Known(tokens, "lower", "tokens of preempted requests that had to be computed again, lower bound"),
        "prefix.saved": Known(tokens, "higher", "prompt tokens that the prefix cache gave"),
        "prefix.hit_rate": Known(ratio, "higher", "share of looked-up tokens that the prefix cache gave"),
        "prefix.shared": Known(ratio, "", "share of our prompt tokens that a prompt before had"),
        "prefix.would_save": Known(tokens, "", "prompt tokens that a prefix cache could give, upper bound"),
        "prefix.unexplained_hits": Known(tokens, "lower", "prefix hits beyond what our prompts repeat"),
        "client.lag_p99": Known(s, "lower", "lag of the load client from intended to sent start, p99"),
        "client.loop_lag_p99": Known(s, "lower", "lag of the load client's event loop, p99"),
        "client.cpu_share": Known(ratio, "lower", "CPU use of the busiest load process, of one core"),
        "client.held": Known(requests, "lower", "arrivals that waited for the cap on requests in flight"),
        "seats.used": Known(ratio, "", "most running requests over the seats"),
        "length.mean_over_max": Known(ratio, "", "mean length of our requests over the longest"),
        "bound.seats": Known(ratio, "lower", "share of the busy time in which requests waited for a seat while blocks were free"),
        "bound.kv": Known(ratio, "lower", "share of the busy time in which requests waited for blocks"),
        "bound.budget": Known(ratio, "lower", "share of the busy time in which requests waited while seats and blocks were free"),
        "bound.free": Known(ratio, "lower", "share of the busy time in which requests waited while blocks were free, where the seats are not told"),
        "bound.deferred": Known(ratio, "lower", "share of the busy time in which requests waited for something else than blocks or a seat"),
        "looks.busy": Known("looks", "higher", "looks inside the load at which something was held"),
        "stale.seconds": Known(s, "lower", "longest time in which gauges said that requests run and no token moved"),
        "stuck.seconds": Known(s, "lower", "longest time in which requests waited and no token moved"),
        "stuck.alone": Known(s, "lower", "longest time in which requests waited while nothing ran, blocks were free and no token moved"),
        "stuck.waiting": Known(requests, "lower", "most requests that waited in that time"),
        "held.seconds": Known(s, "lower", "longest time in which something was held while nothing ran or waited"),
        "held.steps": Known("events", "lower", "waves of requests in a row after which more stayed held than after the one before"),
        "requests.finished": Known(requests, "", "requests that the engine finished in the window"),
        "preemptions.per_request": Known(ratio, "lower", "preemptions for each request that finished"),
        "endpoint.seen": Known(ratio, "", "tokens that the server counted over those that we received"),
        "served.throughput": Known("tokens/s", "higher", "tokens a second by the server's own counter"),
        "prefix.on": Known(ratio, "", "whether prefix caching is on (1) or off (0)"),
        "prefix.longest": Known(tokens, "", "longest text that several of our prompts begin with"),
        "prefix.used": Known(ratio, "higher", "share of what our prompts repeat that the prefix cache gave"),
        "card.other_bytes": Known("bytes", "lower", "memory of other processes on a card of this server"),
        "card.free_share": Known(ratio, "higher", "free share of the tightest card of this server"),
        "nearmax.room": Known(requests, "higher", "requests of max_model_len that fit beside the mean level"),
        "nearmax.fits": Known(requests, "higher", "requests of max_model_len that an empty pool holds"),
        "slots.per_request": Known(tokens, "lower", "token slots held for each running request, at the highest level"),
        "climb.tokens": Known(tokens, "lower", "rise of the level from the start of the window to its end"),
        "climb.generated": Known(ratio, "", "tokens generated over the rise of the level"),
        "quality.pass_rate": Known(ratio, "higher", "pass rate of the quality items"),
        "quality.items": Known("items", "", "quality items asked"),
        "quality.pressed": Known(ratio, "higher", "pass rate of the quality items asked under pressure"),
        "quality.tasks": Known(ratio, "higher", "pass rate of the tasks of lm-evaluation-harness"),
        "agreement.equal": Known(ratio, "higher", "share of greedy tokens that are equal: asked twice, and in a comparison on both sides"),
    }
    wastes = {
        "rounding": "the empty rest of last blocks", "shared": "prefixes held once (below zero)", "reserved": "room reserved ahead",
        "not_ours": "what requests hold that are not ours", "held_after": "what stays held after its request", "unexplained": "what nothing explains",
    }  # fmt: skip
    for name, title in wastes.items():
        found[f"waste.{name}"] = Known(ratio, "lower", f"{title}, share of the slots held")
        found[f"waste.{name}_blocks"] = Known("blocks", "lower", f"{title}, at the highest level")
    for name in ("idle", "prefill", "decode", "drain"):
        found[f"phase.{name}"] = Known(ratio, "", f"share of the load's time in the phase {name}")
    times = {"ttft": "time to first token", "latency": "time to last token"}
    for name, title in times.items():
        for share in ("p50", "p95"):
            found[f"{name}.{share}"] = Known(s, "lower", f"{title}, {share}, from the intended start", lanes=True)
            found[f"{name}_sent.{share}"] = Known(s, "lower", f"{title}, {share}, from the moment of sending", lanes=True)
    for quantity in QUANTITIES.values():
        if quantity.kind == "config" and quantity.unit:
            found[quantity.name] = Known(quantity.unit, quantity.better, quantity.title)
    return found


KNOWN: dict[str, Known] = _known()
"""Every quantity that a condition may name; the keys of ``Analysis.values`` are these and the textual configuration."""
