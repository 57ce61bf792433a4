"""Greedy agreement: the same probes answered twice by each side, token by token, so that a change is held against the server's own noise.

Greedy decoding is not taken to be deterministic: each probe is asked ``REPEATS`` times, and how far the answers of one side agree with each
other is the floor that the agreement of two sides is read against.
"""

from __future__ import annotations

import re
import statistics
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pytest_kvcache.errors import CannotWrite, EndpointUnreachable
from pytest_kvcache.quality.ask import digest
from pytest_kvcache.quality.items import Item
from pytest_kvcache.records import AgreementRow
from pytest_kvcache.runfolder import encode_line
from pytest_kvcache.server.endpoint import Completion, Endpoint, complete

PROBES = 24
TOKENS = 32
REPEATS = 2
TOP = 5
LIKELY = -10.0
"""Log-probabilities below this (one in 22,000) are not compared: a model never says them."""

_LEAST = -30.0
_CONCURRENCY = 4
_PIECE = re.compile(r"\s*\S+")


def choose_probes(items: Sequence[Item], count: int = PROBES) -> list[Item]:
    """Return ``count`` of the items, evenly over their lengths; the same ones on both sides."""
    ordered = sorted(items, key=lambda item: (item.length_tokens, item.id))
    if count >= len(ordered):
        return ordered
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


def ask_agreement(
    endpoint: Endpoint, probes: Sequence[Item], path: Path, *, tokens: int = TOKENS, timeout_s: float = 300.0, replica: int = 0
) -> list[AgreementRow]:
    """Ask each probe ``REPEATS`` times for ``tokens`` greedy tokens and append a row an answer to ``path``.

    A server that gives no log-probabilities is asked without. A probe that gets no answer is a row with ``error``. Raises CannotWrite.
    """
    rows: list[AgreementRow] = []
    try:
        with path.open("ab") as file, endpoint.client(timeout_s) as client, ThreadPoolExecutor(_CONCURRENCY) as pool:
            gives = _gives_logprobs(endpoint, client, probes[0], timeout_s) if probes else False

            def ask(asked: tuple[int, Item]) -> AgreementRow:
                return _ask(endpoint, client, asked[1], asked[0], tokens, timeout_s, gives, replica)

            # the second time in another order: a batch of other neighbours is part of the noise
            order = [(repeat, probe) for repeat in range(REPEATS) for probe in (probes if repeat % 2 == 0 else probes[::-1])]
            for row in pool.map(ask, order):
                file.write(encode_line(row))
                rows.append(row)
    except OSError as error:
        raise CannotWrite(f"cannot write the greedy answers: {error.strerror or error}", where=str(path), hint="free space") from None
    return rows


def _wish(endpoint: Endpoint) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": TOP} if endpoint.api == "chat" else {"logprobs": TOP}


def _gives_logprobs(endpoint: Endpoint, client: httpx.Client, probe: Item, timeout_s: float) -> bool:
    try:
        done = _complete(endpoint, client, probe, 1, timeout_s, _wish(endpoint))
    except EndpointUnreachable:  # vLLM's CPU build compiles at the first such request, which may take minutes
        return False
    return not done.error and bool(read_tokens(done.body, 0)[1])


def _complete(endpoint: Endpoint, client: httpx.Client, probe: Item, tokens: int, timeout_s: float, more: Mapping[str, Any]) -> Completion:
    body: dict[str, Any] = dict(more)
    if not isinstance(probe.prompt, str):
        body["messages"] = list(probe.prompt)
    prompt = probe.prompt if isinstance(probe.prompt, str) else ""
    return complete(endpoint, prompt, tokens, timeout_s=timeout_s, client=client, **body)


def _ask(
    endpoint: Endpoint, client: httpx.Client, probe: Item, repeat: int, tokens: int, timeout_s: float, gives: bool, replica: int
) -> AgreementRow:
    hashed = digest(probe)
    salt = zlib.crc32(hashed.encode())
    fields: dict[str, Any] = {"endpoint": replica, "wall_s": time.time(), "length_tokens": probe.length_tokens, "expected_hash": hashed}
    try:
        done = _complete(endpoint, client, probe, tokens, timeout_s, _wish(endpoint) if gives else {})
    except EndpointUnreachable as gone:
        return AgreementRow(probe.id, repeat, error=gone.what[:500], **fields)
    if done.status != 200 or done.error:
        return AgreementRow(probe.id, repeat, error=(done.error or f"HTTP {done.status}")[:500], **fields)
    said, top = read_tokens(done.body, salt)
    if not said:
        said = [zlib.crc32(piece.encode(), salt) for piece in _PIECE.findall(done.text)]
    return AgreementRow(probe.id, repeat, tokens=said[:tokens], top=top[:tokens], **fields)


def read_tokens(body: Mapping[str, Any], salt: int) -> tuple[list[int], list[dict[int, float]]]:
    """Return the tokens of an answer as hashes, and the likeliest ones at each; both empty where it has no log-probabilities.

    Reads the form of the completions API (vLLM) and that of chat, which llama.cpp uses for both.
    """
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        return [], []

    def hashed(token: Any) -> int:
        return zlib.crc32(str(token).encode("utf-8", "surrogatepass"), salt)

    content = found.get("content")
    if isinstance(content, list):
        steps = [step for step in content if isinstance(step, dict)]
        tops: list[Any] = [step.get("top_logprobs") for step in steps]
        return [hashed(step.get("token")) for step in steps], [
            {hashed(one.get("token")): likely for one in top if isinstance(one, dict) and (likely := _number(one.get("logprob"))) > _LEAST}
            if isinstance(top, list)
            else {}
            for top in tops
        ]
    tokens, listed = found.get("tokens"), found.get("top_logprobs")
    if not isinstance(tokens, list):
        return [], []
    tops = listed if isinstance(listed, list) else []
    return [hashed(token) for token in tokens], [
        {hashed(token): likely for token, value in top.items() if (likely := _number(value)) > _LEAST} if isinstance(top, dict) else {}
        for top in tops
    ]


def _number(value: Any) -> float:
    # engines write minus infinity in their own ways
    return round(float(value), 5) if isinstance(value, (int, float)) and value > _LEAST else _LEAST


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two answers to each of ``probes`` agree.

    ``equal`` is the mean share of equal tokens, ``shares`` that of each probe by id, ``diverged`` how many probes differ anywhere and
    ``first`` the median token (from 0) at which those do. ``drift`` and ``drift_max`` are the mean and largest difference of the
    log-probabilities of likely tokens (``LIKELY``) until answers diverge; None where the server gave none.
    """

    probes: int
    equal: float
    diverged: int
    first: float | None
    drift: float | None
    drift_max: float | None
    shares: Mapping[str, float]


def agree(left: Iterable[AgreementRow], right: Iterable[AgreementRow]) -> Agreement | None:
    """Return how far the answers of two sets of rows agree, paired by probe; None where no probe was answered in both.

    Of several rows of one probe in a set the first counts. Probes that ask something else in the two sets do not pair.
    """
    theirs = _first(right)
    pairs = [(row, theirs[key]) for key, row in _first(left).items() if key in theirs]
    if not pairs:
        return None
    shares, firsts, drifts = {}, [], []
    for one, other in pairs:
        longest = max(len(one.tokens), len(other.tokens))
        equal = sum(a == b for a, b in zip(one.tokens, other.tokens, strict=False))
        at = next((i for i in range(longest) if one.tokens[i : i + 1] != other.tokens[i : i + 1]), None)
        shares[one.item] = equal / longest if longest else 1.0
        firsts += [at] if at is not None else []
        until = longest if at is None else at + 1  # the step at which they diverge still has the same context
        for a, b in zip(one.top[:until], other.top[:until], strict=False):
            drifts += _drifts(a, b)
    return Agreement(
        probes=len(pairs),
        equal=statistics.fmean(shares.values()),
        diverged=len(firsts),
        first=statistics.median(firsts) if firsts else None,
        drift=statistics.fmean(drifts) if drifts else None,
        drift_max=max(drifts) if drifts else None,
        shares=shares,
    )


def _first(rows: Iterable[AgreementRow]) -> dict[tuple[str, str], AgreementRow]:
    found: dict[tuple[str, str], AgreementRow] = {}
    for row in rows:
        if not row.error:
            found.setdefault((row.item, row.expected_hash), row)
    return found


def _drifts(left: Mapping[int, float], right: Mapping[int, float]) -> list[float]:
    """Return the differences at one step. A token that only one side lists is at most as likely on the other as the last that it lists."""
    if not left or not right:
        return []
    # of a list that was cut at the likeliest few; a shorter one holds all that is likely at all
    floors = [min(side.values()) if len(side) >= TOP else _LEAST for side in (left, right)]
    found = []
    for token in {*left, *right}:
        a, b = left.get(token, floors[0]), right.get(token, floors[1])
        if max(a, b) < LIKELY:
            continue
        # where it is not listed the true difference is at least this
        found.append(abs(max(a, LIKELY) - max(b, LIKELY)))
    return found


def noise_floor(rows: Sequence[AgreementRow]) -> Agreement | None:
    """Return how far one side agrees with itself: each probe's first answer against its second."""
    return agree([row for row in rows if row.repeat == 0], [row for row in rows if row.repeat == 1])
