"""Everyday traffic: prompt lengths from a lognormal distribution, many short and a few long, or from a histogram of your own.

By hand: locust -f loadprofiles/normal.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.users import Draw, KvUser, Plan, ProfileOption


class Normal(KvUser):
    lane = "normal"
    users = 8
    options = (
        ProfileOption("median", 512, "median prompt length in tokens"),
        ProfileOption("sigma", 0.8, "spread: standard deviation of the logarithm of the prompt length"),
        ProfileOption("shortest", 32, "shortest prompt in tokens"),
        ProfileOption("histogram", "", "prompt lengths of your own: 100-200:60,4000:5 (tokens:weight), or a file of low,high,weight"),
        ProfileOption("output_histogram", "", "output lengths of your own, in the same way; default: all as --kv-output-tokens"),
    )

    def plan(self, draw: Draw, limit: int | None) -> Plan:
        prompts, outputs = self.histogram("histogram"), self.histogram("output_histogram")
        output = draw.of(outputs) if outputs else self.output_tokens
        longest = max(1, limit - output - 8) if limit else 1 << 30 if prompts else 8 * self.option("median")
        if prompts:
            return Plan(min(draw.of(prompts), longest), output)
        prompt = draw.lognormal(self.option("median"), self.option("sigma"), self.option("shortest"), longest)
        return Plan(min(prompt, longest), output)
