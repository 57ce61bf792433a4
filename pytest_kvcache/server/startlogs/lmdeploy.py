"""The start-up lines of LMDeploy: TurboMind and the PyTorch engine.

Source: LMDeploy, ``src/turbomind/models/llama/BlockManager.cc`` and ``lmdeploy/pytorch/config.py`` (``CacheConfig``).
"""

from __future__ import annotations

import re
from typing import ClassVar

from pytest_kvcache.server.startlogs.reading import FLOAT, INT, Found, LogReader, Rule, Sourced, to_bytes, to_flag, to_int

_CACHE = r"\A[^\n]{0,300}?\bCacheConfig\([^\n]{0,1500}?\b"


class LmdeployLog(LogReader):
    """TurboMind prints the bytes of a block and their number; the PyTorch engine prints its configuration."""

    ENGINE = "lmdeploy"
    TITLE = "LMDeploy"
    HINT = re.compile(r"BlockManager|CacheConfig|session_len|prefix caching|total gpu cache blocks|cache_block_seq_len")
    SIGN = re.compile(r"\blmdeploy\b|\[TM\]\[|No enough gpu memory for|Engine \(running/waiting\)")
    ONE: ClassVar[tuple[Rule, ...]] = (
        ("pool_blocks", re.compile(rf"\[BlockManager\] max_block_count = {INT}"), to_int),
        ("pool_blocks", re.compile(rf"{_CACHE}num_gpu_blocks={INT}"), to_int),
        ("pool_blocks", re.compile(rf"total gpu cache blocks: {INT}"), to_int),
        ("block_size", re.compile(rf"{_CACHE}block_size={INT}"), to_int),
        ("block_size", re.compile(rf"\bcache_block_seq_len['\"]?\s{{0,3}}[:=]\s{{0,3}}{INT}"), to_int),
        ("max_num_seqs", re.compile(rf"{_CACHE}max_batches={INT}"), to_int),
        ("max_model_len", re.compile(rf"`session_len` truncated to {INT}"), to_int),
        ("prefix_caching", re.compile(r"\[SegMgr\] prefix caching is (enabled|disabled)"), lambda text: text == "enabled"),
        ("prefix_caching", re.compile(rf"{_CACHE}enable_prefix_caching=(True|False)"), to_flag),
    )
    BLOCK = re.compile(rf"\[BlockManager\] block_size = {FLOAT} (MB)")

    def __init__(self) -> None:
        super().__init__()
        self.block_bytes = 0.0

    def read(self, line: str) -> Found:
        """Return what one line states."""
        match = self.BLOCK.search(line)
        if match is not None:
            self.score += 2
            self.block_bytes = to_bytes(match.group(1), match.group(2))
        return super().read(line)

    def totals(self) -> Sourced:
        """Return the memory and the tokens of all blocks, where the log states enough for them."""
        found: Sourced = {}
        if "pool_blocks" in self.found:
            blocks, line = self.found["pool_blocks"]
            if self.block_bytes:
                found["pool_bytes"] = (float(blocks) * self.block_bytes, f"block_size x max_block_count: {line}")
            if "block_size" in self.found:
                found["pool_tokens"] = (int(blocks) * int(self.found["block_size"][0]), f"blocks x tokens per block: {line}")
        return found

    def notes(self) -> list[str]:
        """Return what LMDeploy changed by itself."""
        length = self.found.get("max_model_len")
        return [f"LMDeploy truncated session_len to {length[0]} by itself, because the pool is small"] if length is not None else []
