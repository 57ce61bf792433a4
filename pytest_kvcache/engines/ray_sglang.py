"""SGLang behind Ray Serve: ``ray_sglang_*`` and ``ray_serve_sglang_*`` on the metrics port of each node, one part per replica.

Ray shows a counter after its first event only; its adapter counts from its own first look on, so that counters begin near zero
when the replica is old. The quantities are SGLang's. Source: Ray, ``python/ray/llm/_internal/serve/engines/sglang``.
"""

from __future__ import annotations

import dataclasses

from pytest_kvcache.engines._dialect import Series
from pytest_kvcache.engines._state import RawState
from pytest_kvcache.engines.ray_vllm import UNBORN
from pytest_kvcache.engines.sglang import DIALECT as SGLANG


def _claims(raw: RawState) -> bool:
    return raw.metrics is not None and any(name.startswith(("ray_sglang", "ray_serve_sglang")) for name in raw.metrics.names)


DIALECT = dataclasses.replace(
    SGLANG,
    name="ray_sglang",
    title="SGLang behind Ray Serve",
    owned_by="",
    claims=_claims,
    covers=("sglang",),
    since={**SGLANG.since, "": "Ray 2.x"},
    reads={
        **SGLANG.reads,
        "preemptions": Series(
            ("sglang:num_retracted_requests_total", "sglang:num_retracted_requests"),
            unborn=UNBORN,
            alive=("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        ),
    },
)
