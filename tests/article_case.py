"""The article's case as a Run made from its figures: an A100-80G at a steady 92 %, with 22 GB of the card free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from finding_cases import GIB, card, worker
from made_run import T0, MadeRun, request, sample, snapshot

from pytest_kvcache.analysis.timeline import Analysis, analyse
from pytest_kvcache.records import MemoryRow, RequestRow

TOKEN_BYTES = 512 * 1024  # Llama-2-7B in fp16
BLOCKS = 18 * GIB // (16 * TOKEN_BYTES)
SYSTEM = 640


def article_rows() -> list[RequestRow]:
    """Return sixteen requests that all begin with the same system prompt: one of 4,000 tokens, the others near a quarter of it."""
    return [
        request(i, 0.02 * i, prompt=3500 if i == 0 else 700, output=500 if i == 0 else 100, length_s=5.0, prefix_id="system", prefix_tokens=SYSTEM)
        for i in range(16)
    ]


def article_case(folder: Path) -> Analysis:
    """Return the Analysis of the Run: pool 18 GB of the 58 that share and weights leave, held in the length of the longest, caching off."""
    rows = article_rows()
    held = round(0.92 * (BLOCKS - 1))
    level = {"usage": 0.92, "used_blocks": float(held), "free_blocks": float(BLOCKS - 1 - held), "running": 16.0}
    samples = [sample(rows, T0 - 0.3 + i / 10, usable=BLOCKS - 1, **(level if i > 8 else {})) for i in range(52)]
    memory = MemoryRow(512 * GIB, 400 * GIB, processes={"1": 4 * GIB})
    samples[20] = msgspec.structs.replace(samples[20], gpus=[card(used=58, ours=58)], memory=memory)
    about: dict[str, Any] = {
        "gpu_memory_utilization": 0.9,
        "prefix_caching": False,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "pool_bytes": 18.0 * GIB,
    }
    before = [snapshot(T0 - 0.5, usable=BLOCKS - 1, **about)]
    after = [snapshot(T0 + 6, usable=BLOCKS - 1, **about)]
    start = [worker(pool=18, weights=14, activation=9, graphs=3)]
    return analyse(MadeRun(rows=rows, samples=samples, before=before, after=after, record={"start_memory": start}).write(folder))
