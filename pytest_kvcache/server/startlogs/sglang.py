"""The start-up lines of SGLang. Each tensor-parallel rank prints the size of its own share: those lines repeat and are not added.

Source: SGLang 0.5, ``python/sglang/srt/mem_cache/memory_pool.py``, ``managers/scheduler.py`` and ``server_args.py``.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pytest_kvcache.server.startlogs.reading import FLOAT, INT, Found, LogReader, Rule, Sourced, to_bytes, to_flag, to_int

_ARGS = r"\A[^\n]{0,300}?\bserver_args=ServerArgs\([^\n]{0,6000}?\b"


class SglangLog(LogReader):
    """Pools are kept per data-parallel rank (added) and per other rank (not added)."""

    ENGINE = "sglang"
    TITLE = "SGLang"
    HINT = re.compile(r"KV [Cc]ache|#retracted|max_total_num_tokens|ServerArgs|Mamba Cache|max_total_tokens")
    SIGN = re.compile(
        r"\bsglang\b|SGLANG_|derived context_length|mem[-_]fraction[-_]static|#(?:running|queue)-req|\bmax_total_num_tokens=|KV Cache is allocated|#retracted_reqs: |is larger than the profiled value|[0-9] (?:DP[0-9]+ )?TP[0-9]+\]"
    )
    VERSION = re.compile(r"\bsglang[ =v]{1,12}([0-9]+\.[0-9][\w.]{0,20})", re.IGNORECASE)
    START = "server_args=ServerArgs("
    ONE: ClassVar[tuple[Rule, ...]] = (
        ("kv_dtype", re.compile(rf"{_ARGS}kv_cache_dtype='([\w.]{{1,40}})'"), str),
        ("kv_dtype", re.compile(r"\bUsing KV cache dtype: ([\w.]{1,40})"), str),
        ("block_size", re.compile(rf"{_ARGS}page_size={INT}"), to_int),
        ("gpu_memory_utilization", re.compile(rf"{_ARGS}mem_fraction_static={FLOAT}"), float),
        ("prefix_caching", re.compile(rf"{_ARGS}disable_radix_cache=(True|False)"), lambda text: not to_flag(text)),
        ("max_model_len", re.compile(rf"\bmax_total_num_tokens=[0-9][^\n]{{0,400}}?\bcontext_len={INT}"), to_int),
    )
    TOTAL = re.compile(rf"\bmax_total_num_tokens={INT}, [^\n]{{0,300}}?\bmax_running_requests={INT}")
    POOL = re.compile(
        rf"KV Cache is allocated\. (?:dtype: [\w.]{{1,40}}, )?#tokens: ([0-9]{{1,18}})"
        rf"(?:, K size: {FLOAT} (GB|MB|GiB), V size: {FLOAT} (?:GB|MB|GiB)|, KV size: {FLOAT} (GB|MB|GiB))?"
    )
    DTYPE = re.compile(r"KV Cache is allocated\. dtype: ([\w.]{1,40}),")
    STATE = re.compile(rf"Mamba Cache is allocated\.[^\n]{{0,120}}?conv_state size: {FLOAT} ?(GB|GiB), ssm_state size: {FLOAT} ?(?:GB|GiB)")
    RETRACTED = re.compile(r"Retract requests\.[^\n]{0,80}?#retracted_reqs: ([0-9]{1,9})\b")
    CAPPED = re.compile(rf"max_total_tokens={INT} is larger than the profiled value {INT}")
    RANK = re.compile(r"^\W{0,3}[0-9-]{8,10} [0-9:.,]{5,16}((?: [A-Z]{2,5}[0-9]{1,4}){1,6})\]")

    def __init__(self) -> None:
        super().__init__()
        self.totals_by_dp: dict[str, tuple[int, int, str]] = {}
        self.pools: dict[str, dict[str, list[tuple[int, float, str]]]] = {}
        self.capped = ""
        self.retracted: list[int] = []

    def restart(self) -> None:
        """Forget the pools of an earlier start."""
        self.totals_by_dp.clear()
        self.retracted.clear()
        self.pools.clear()

    def read(self, line: str) -> Found:
        """Return what one line states, and keep the pools by rank."""
        found = super().read(line)
        match = self.DTYPE.search(line)
        if match is not None:
            found["kv_dtype"] = match.group(1)
        match = self.RANK.match(line)
        words = match.group(1).split() if match else []
        data_rank = next((word for word in words if word.startswith("DP")), "")
        rank = " ".join(words)
        match = self.TOTAL.search(line)
        if match is not None:
            self.score += 2
            self.totals_by_dp[data_rank] = (to_int(match.group(1)), to_int(match.group(2)), line)
        self._pool(line, data_rank, rank)
        match = self.RETRACTED.search(line)
        if match is not None:
            self.score += 1
            self.retracted.append(int(match.group(1)))
        match = self.CAPPED.search(line)
        if match is not None:
            self.capped = f"--max-total-tokens {match.group(1)} was asked for and the memory bears {match.group(2)}: the smaller figure is in use"
        return found

    def _pool(self, line: str, data_rank: str, rank: str) -> None:
        pools = self.pools.setdefault(data_rank, {}).setdefault(rank, [])
        match = self.POOL.search(line)
        if match is not None:
            tokens, k_size, k_unit, v_size, size, unit = match.groups()
            # Keys and values are printed apart; "GB" is 2^30 there.
            held = to_bytes(k_size, k_unit) + to_bytes(v_size, k_unit) if k_size else to_bytes(size, unit) if size else 0.0
            pools.append((to_int(tokens), held, line))
            self.score += 2
        match = self.STATE.search(line)
        if match is not None:
            pools.append((0, to_bytes(match.group(1), match.group(2)) + to_bytes(match.group(3), match.group(2)), line))
            self.score += 2

    def totals(self) -> Sourced:
        """Return pools and seats summed over data-parallel ranks, and the memory of one rank of each."""
        found: Sourced = {}
        if self.totals_by_dp:
            parts = list(self.totals_by_dp.values())
            note = "" if len(parts) == 1 else f"the sum over {len(parts)} data-parallel ranks, the last of them: "
            found["pool_tokens"] = (sum(tokens for tokens, _, _ in parts), note + parts[-1][2])
            found["max_num_seqs"] = (sum(seats for _, seats, _ in parts), note + parts[-1][2])
        memory, tokens, ranks, line = 0.0, 0, 0, ""
        for by_rank in self.pools.values():
            told = [pools for pools in by_rank.values() if pools]
            if not told:
                continue
            # Ranks of one engine hold the same tokens: one of them, that with the least memory, speaks for all.
            least = min(told, key=lambda pools: sum(held for _, held, _ in pools))
            memory += sum(held for _, held, _ in least)
            tokens += min(max(size for size, _, _ in pools) for pools in told)
            ranks += len(told)
            line = max(least, key=lambda pool: pool[0])[2]
        if memory:
            found["pool_bytes"] = (memory, line if ranks == 1 else f"the memory of one rank; {ranks} ranks print a line of their own: {line}")
        if tokens and "pool_tokens" not in found:
            found["pool_tokens"] = (tokens, line)
        return found

    def notes(self) -> list[str]:
        """Return what SGLang did otherwise than it was asked, and whose memory is shown."""
        ranks = sum(1 for by_rank in self.pools.values() for pools in by_rank.values() if pools)
        kinds = [len(pools) for by_rank in self.pools.values() for pools in by_rank.values()]
        notes = [self.capped] if self.capped else []
        if self.retracted:
            often = "once" if len(self.retracted) == 1 else f"{len(self.retracted):,} times"
            notes.append(
                f"the pool was full {often}, requests that were put back (retracted): {sum(self.retracted):,}; one that is put back is computed"
                " again, which its client sees as a pause"
            )
        if ranks > len([1 for by_rank in self.pools.values() if any(by_rank.values())]):
            notes.append(f"{ranks} ranks print their pool: the tokens are the same on each and are not added; pool_bytes is of one rank")
        if kinds and max(kinds) > 1:
            notes.append("several pools in one rank (full attention, sliding window or state): pool_tokens is the largest, pool_bytes their sum")
        return notes
