"""The plainest Locust loop over a stream, to compare with: it reads lines and counts them, and writes nothing down."""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import gevent
from locust import FastHttpUser, constant, events, task

BODY = json.dumps({"model": "mock", "prompt": "hello " * 64, "max_tokens": 64, "stream": True, "stream_options": {"include_usage": True}})
count = {"tokens": 0, "cpu_s": 0.0}


class PlainUser(FastHttpUser):
    wait_time = constant(0)

    def on_start(self) -> None:
        gevent.sleep(random.random() * float(os.environ.get("BENCHMARK_RAMP_S", "0")))

    @task
    def stream(self) -> None:
        headers = {"Content-Type": "application/json"}
        with self.client.post("/v1/completions", data=BODY, headers=headers, stream=True, catch_response=True) as response:
            reader: Any = response._response
            events_seen = 0
            while line := reader.readline(b"\n"):
                events_seen += line.startswith(b"data:")
            response.success()
        count["tokens"] += events_seen - 2


def begin(**_: Any) -> None:
    count["cpu_s"] = time.process_time()


def end(**_: Any) -> None:
    print(json.dumps({"tokens": count["tokens"], "cpu_s": time.process_time() - count["cpu_s"]}), flush=True)


hooks: Any = events
hooks.test_start.add_listener(begin)
hooks.test_stop.add_listener(end)
