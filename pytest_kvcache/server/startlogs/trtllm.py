"""The start-up lines of TensorRT-LLM: trtllm-serve and Triton's backend.

Source: TensorRT-LLM, ``cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp`` and ``tensorrt_llm/_torch/pyexecutor``. The PyTorch runtime
allocates twice (an estimate first), so the later line counts.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pytest_kvcache.server.startlogs.reading import FLOAT, INT, Found, LogReader, Rule, Sourced, to_bytes, to_flag, to_int


class TrtllmLog(LogReader):
    """Models with several attention windows have a pool for each; blocks are then their sum."""

    ENGINE = "trtllm_serve"
    TITLE = "TensorRT-LLM"
    HINT = re.compile(r"kv.cache|k/v cache|tokens per block|max_seq_len|max_batch_size|maxBatchSize|maxSequenceLen|enable_block_reuse", re.IGNORECASE)
    SIGN = re.compile(r"\[TensorRT-LLM\]|\[TRT-LLM\]|\btensorrt_llm\b|paged KV cache|k/v cache\.")
    VERSION = re.compile(r"TensorRT[- ]LLM version: ([0-9][\w.]{0,30})")
    START = "LLM version: "
    ONE: ClassVar[tuple[Rule, ...]] = (
        ("block_size", re.compile(rf"Number of tokens per block: {INT}"), to_int),
        ("pool_blocks", re.compile(rf"Number of blocks in KV cache primary pool: {INT}"), to_int),
        ("pool_tokens", re.compile(rf"for max tokens in paged KV cache \({INT}\)"), to_int),
        ("pool_tokens", re.compile(rf"Using {INT} tokens in paged KV cache"), to_int),
        ("pool_bytes", re.compile(r"Allocate ([0-9]{1,18}) bytes for k/v cache"), float),
        ("max_model_len", re.compile(rf"\bmax_seq_len={INT}, "), to_int),
        ("max_model_len", re.compile(rf"TRTGptModel maxSequenceLen: {INT}"), to_int),
        ("max_model_len", re.compile(rf"Adjusted max_seq_len to {INT}"), to_int),
        # The number of requests is the batch's; where the line states both, the latter counts.
        ("max_num_seqs", re.compile(rf"\bmax_seq_len=[0-9][^\n]{{0,200}}?\bmax_num_requests={INT}"), to_int),
        ("max_num_seqs", re.compile(rf"\bmax_seq_len=[0-9][^\n]{{0,200}}?\bmax_batch_size={INT}"), to_int),
        ("max_num_seqs", re.compile(rf"TRTGptModel maxBatchSize: {INT}"), to_int),
        ("prefix_caching", re.compile(r"\benable_block_reuse[=:] ?(True|False)"), to_flag),
    )
    ALLOCATED = re.compile(rf"Allocated {FLOAT} (GiB|MiB) for max tokens in paged KV cache")
    WINDOW = re.compile(
        rf"Max KV cache blocks per sequence: [0-9]{{1,12}} \[window size=([0-9]{{1,12}})\], tokens per block={INT}, primary blocks={INT}"
    )

    def __init__(self) -> None:
        super().__init__()
        self.windows: dict[int, tuple[int, int, str]] = {}
        self.is_allocated = False

    def restart(self) -> None:
        """Forget the windows of an earlier start."""
        self.windows.clear()
        self.is_allocated = False

    def read(self, line: str) -> Found:
        """Return what one line states."""
        found = super().read(line)
        match = self.ALLOCATED.search(line)
        if match is not None:
            found["pool_bytes"] = to_bytes(match.group(1), match.group(2))
            self.is_allocated = True
        match = self.WINDOW.search(line)
        if match is not None:
            self.score += 2
            if self.is_allocated:
                # The windows of one allocation stand before its size: what follows it is the next one, for which a window may differ.
                self.windows.clear()
                self.is_allocated = False
            window, size, blocks = (to_int(text) for text in match.groups())
            self.windows[window] = (blocks, size, line)
            found["block_size"] = size
        return found

    def totals(self) -> Sourced:
        """Return the blocks of all windows; tokens only where there is one window and no line states them."""
        found: Sourced = {}
        if self.windows:
            blocks, size, line = self.windows[max(self.windows)]
            count = len(self.windows)
            found["pool_blocks"] = (
                sum(held for held, _, _ in self.windows.values()),
                line if count == 1 else f"the sum over {count} windows, the largest: {line}",
            )
            if count == 1 and "pool_tokens" not in self.found:
                found["pool_tokens"] = (blocks * size, f"primary blocks x tokens per block: {line}")
        elif "pool_tokens" not in self.found and {"pool_blocks", "block_size"} <= self.found.keys():
            blocks_told, line = self.found["pool_blocks"]
            found["pool_tokens"] = (int(blocks_told) * int(self.found["block_size"][0]), f"blocks x tokens per block: {line}")
        return found

    def notes(self) -> list[str]:
        """Return what TensorRT-LLM changed by itself."""
        notes = []
        length = self.found.get("max_model_len")
        if length is not None and "Adjusted max_seq_len" in length[1]:
            notes.append(f"TensorRT-LLM shrank max_seq_len to {length[0]} by itself, because the pool is small")
        if len(self.windows) > 1:
            shown = "; ".join(f"window {window}: {blocks} blocks" for window, (blocks, _, _) in sorted(self.windows.items()))
            notes.append(f"one pool for each attention window ({shown[:200]}): the fullest of them binds, and their sum is no capacity")
        return notes
