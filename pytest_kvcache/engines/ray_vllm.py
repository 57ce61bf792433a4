"""vLLM behind Ray Serve: ``ray_vllm_*`` (older: ``ray_vllm:*``) on the metrics port of each node, one part per replica.

Ray shows a counter after its first event only, and then bare and with ``_total``: one of them is taken. The quantities are vLLM's.
Source: vLLM 0.32.0, ``vllm/v1/metrics/ray_wrappers.py``; Ray's observability documentation.
"""

from __future__ import annotations

import dataclasses

from pytest_kvcache.engines._dialect import Series
from pytest_kvcache.engines._state import RawState
from pytest_kvcache.engines.vllm import DIALECT as VLLM
from pytest_kvcache.engines.vllm import HITS, QUERIES

UNBORN = "Ray shows a counter only after its first event"


def _claims(raw: RawState) -> bool:
    return raw.metrics is not None and any(name.startswith(("ray_vllm_", "ray_vllm:")) for name in raw.metrics.names)


DIALECT = dataclasses.replace(
    VLLM,
    name="ray_vllm",
    title="vLLM behind Ray Serve",
    owned_by="",
    claims=_claims,
    covers=("vllm", "llm_d_sim"),
    metrics_paths=("/metrics",),
    since={**VLLM.since, "": "Ray 2.x"},
    reads={
        **VLLM.reads,
        # The engine's gauges are of the same registry: where they are told, a counter that is not there has had no event.
        "preemptions": Series(
            ("vllm:num_preemptions_total", "vllm:num_preemptions"),
            unborn=UNBORN,
            alive=("vllm:num_requests_running", "vllm:num_requests_waiting"),
        ),
        # Looked up and never found: the counter of lookups is there, that of hits is not yet.
        "prefix_hits": Series(HITS, unborn=UNBORN, alive=QUERIES[:1]),
    },
)
