"""A campaign day: everyday traffic with a share of long documents, which take a pool from half full to nearly full.

By hand: locust -f loadprofiles/mixed.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.users import Draw, KvUser, Plan, ProfileOption


class Mixed(KvUser):
    lane = "normal"
    lanes = ("normal", "longctx")
    users = 12
    needs_limit = True
    options = (
        ProfileOption("long_share", 0.1, "share of the requests that are long"),
        ProfileOption("median", 512, "median length of the others in tokens"),
        ProfileOption("sigma", 0.8, "their spread: standard deviation of the logarithm of the prompt length"),
        ProfileOption("min_share", 0.5, "shortest long prompt as a share of the longest context"),
        ProfileOption("max_share", 0.8, "longest long prompt as a share of the longest context"),
    )

    def plan(self, draw: Draw, limit: int | None) -> Plan:
        output, whole = self.output_tokens, limit or 0
        longest = max(1, whole - output - 8)
        if draw.unit() < self.option("long_share"):
            high = min(int(whole * self.option("max_share")), longest)
            return Plan(max(1, draw.uniform(min(int(whole * self.option("min_share")), high), high)), output, lane="longctx")
        return Plan(draw.lognormal(self.option("median"), self.option("sigma"), min(32, longest), longest), output)
