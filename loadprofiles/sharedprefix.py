"""Few system prompts, many users of each: what prefix caching is for. Each question is its own; what stands before it is shared.

By hand: locust -f loadprofiles/sharedprefix.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from pytest_kvcache.load.plans import SYSTEM
from pytest_kvcache.load.users import Draw, KvUser, Part, Plan, ProfileOption


class SharedPrefix(KvUser):
    lane = "sharedprefix"
    users = 16
    shares = True
    options = (
        ProfileOption("prompts", 4, "how many system prompts there are; the users are spread over them evenly"),
        ProfileOption("prefix_tokens", 1024, "length of each system prompt in tokens"),
        ProfileOption("question_tokens", 128, "median length of what follows it in tokens, with all that the server adds"),
    )

    def plan(self, draw: Draw, limit: int | None) -> Plan:
        output, shared = self.output_tokens, self.option("prefix_tokens")
        question = draw.lognormal(self.option("question_tokens"), 0.5, 32, 8 * self.option("question_tokens"))
        if limit:
            question = max(1, min(question, limit - output - 8))
            shared = max(1, min(shared, limit - output - question - 8))
        system = Part(shared, f"system {draw.number % max(1, self.option('prompts'))}", SYSTEM)
        return Plan(shared + question, output, before=(system,), shared=(system.key, shared))
