"""Recorded traffic again: Mooncake, vLLM's timed_trace, BurstGPT, Azure LLM inference, ShareGPT, or JSONL of your own.

By hand: locust -f loadprofiles/trace.py -H http://127.0.0.1:8000 --kv-trace FILE (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.replay import OPTIONS, Replay


class Trace(Replay):
    lane = "trace"
    users = 8
    options = OPTIONS
