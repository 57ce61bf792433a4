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
