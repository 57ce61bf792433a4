"""Conversations that grow: each question brings all that was said before, after a pause to think.

The answers in the history are stand-ins of the planned length, drawn from the seed: so every length is exact, and a prefix
cache can reuse each earlier prompt but not the tokens that it had generated itself.

By hand: locust -f loadprofiles/multiturn.py -H http://127.0.0.1:8000 (--kv-help lists the options)
"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_kvcache.load.plans import ASSISTANT
from pytest_kvcache.load.users import Draw, KvUser, Part, Plan, ProfileOption


class MultiTurn(KvUser):
    lane = "multiturn"
    users = 8
    shares = True
    defaults = {"think_s": 1.0}
    options = (
        ProfileOption("turns", 6, "questions in a conversation; it ends sooner where the context is full"),
        ProfileOption("first_tokens", 256, "median length of the first question in tokens"),
        ProfileOption("next_tokens", 64, "median length of each further question in tokens"),
    )

    def conversation(self, draw: Draw, limit: int | None) -> Iterator[Plan]:
        said: tuple[Part, ...] = ()
        for turn in range(max(1, self.option("turns"))):
            median = self.option("next_tokens" if turn else "first_tokens")
            question = draw.lognormal(median, 0.5, 8, min(8 * median, (limit or 1 << 30) // 4))
            said = (*said, Part(question, f"{self.lane} {draw.number} question {turn}"))
            if turn and limit and self.whole(said) + self.output_tokens > limit:
                return
            talk = (f"{self.lane} {draw.number}", sum(part.tokens for part in said))
            yield Plan(0, self.output_tokens, before=said, think_s=draw.exponential(self.think_s), shared=talk)
            said = (*said, Part(self.output_tokens, f"{self.lane} {draw.number} answer {turn}", ASSISTANT))
