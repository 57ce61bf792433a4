"""Everyday traffic: prompt lengths from a lognormal distribution, many short and a few long.

By hand: locust -f loadprofiles/normal.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.users import Draw, KvUser, ProfileOption


class Normal(KvUser):
    lane = "normal"
    users = 8
    options = (
        ProfileOption("median", 512, "median prompt length in tokens"),
        ProfileOption("sigma", 0.8, "spread: standard deviation of the logarithm of the prompt length"),
        ProfileOption("shortest", 32, "shortest prompt in tokens"),
    )

    def plan(self, draw: Draw, limit: int | None) -> tuple[int, int]:
        output = self.output_tokens
        longest = (limit - output - 8) if limit else 8 * self.option("median")
        prompt = draw.lognormal(self.option("median"), self.option("sigma"), self.option("shortest"), longest)
        return min(prompt, max(1, longest)), output
