"""As long as the server lets a request be: prompt + output + margin is exactly its longest context.

By hand: locust -f loadprofiles/nearmax.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.users import Draw, KvUser, ProfileOption


class NearMax(KvUser):
    lane = "nearmax"
    users = 2
    default_output_tokens = 32
    needs_limit = True
    options = (ProfileOption("margin", 8, "tokens of the longest context that stay unused"),)

    def plan(self, draw: Draw, limit: int | None) -> tuple[int, int]:
        output = self.output_tokens
        return max(1, (limit or 0) - output - self.option("margin")), output
