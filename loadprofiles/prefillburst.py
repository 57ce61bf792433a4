"""Many long prompts at once with tiny answers: all prefill and hardly any decoding, in bursts.

By hand: locust -f loadprofiles/prefillburst.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.users import Draw, KvUser, Plan, ProfileOption


class PrefillBurst(KvUser):
    lane = "prefillburst"
    users = 8
    default_output_tokens = 2
    needs_limit = True
    defaults = {"rate": 0.8, "arrivals": "burst", "burst_size": 8}  # eight at once every ten seconds
    options = (
        ProfileOption("min_share", 0.25, "shortest prompt as a share of the longest context"),
        ProfileOption("max_share", 0.5, "longest prompt as a share of the longest context"),
    )

    def plan(self, draw: Draw, limit: int | None) -> Plan:
        output, whole = self.output_tokens, limit or 0
        longest = max(1, min(int(whole * self.option("max_share")), whole - output - 8))
        return Plan(draw.uniform(min(int(whole * self.option("min_share")), longest), longest), output)
