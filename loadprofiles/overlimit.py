"""Longer than the server can take: every request must be refused, cleanly and as over_length.

By hand: locust -f loadprofiles/overlimit.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.users import Draw, KvUser, ProfileOption


class OverLimit(KvUser):
    lane = "overlimit"
    users = 1
    default_output_tokens = 16
    needs_limit = True
    options = (ProfileOption("excess", 16, "tokens by which the prompt is longer than the longest context"),)

    def plan(self, draw: Draw, limit: int | None) -> tuple[int, int]:
        return (limit or 0) + self.option("excess"), self.output_tokens
