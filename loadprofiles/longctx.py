"""Long documents: prompts of half to four fifths of the longest context that the live server takes.

By hand: locust -f loadprofiles/longctx.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.users import Draw, KvUser, ProfileOption


class LongContext(KvUser):
    lane = "longctx"
    users = 4
    needs_limit = True
    options = (
        ProfileOption("min_share", 0.5, "shortest prompt as a share of the longest context"),
        ProfileOption("max_share", 0.8, "longest prompt as a share of the longest context"),
    )

    def plan(self, draw: Draw, limit: int | None) -> tuple[int, int]:
        output, whole = self.output_tokens, limit or 0
        longest = min(int(whole * self.option("max_share")), whole - output - 8)
        return max(1, draw.uniform(min(int(whole * self.option("min_share")), longest), longest)), output
