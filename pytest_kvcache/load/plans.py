"""What a profile plans for one request: how long its prompt and its answer are, its lane, and what of it others share."""

from __future__ import annotations

from typing import NamedTuple

USER = "user"
ASSISTANT = "assistant"
SYSTEM = "system"


class Part(NamedTuple):
    """A piece of a prompt that has a name: the same ``key`` and number of tokens give the same text in every request of a run.

    With the chat API each part is a message of its ``role``; elsewhere parts follow one another.
    """

    tokens: int
    key: str
    role: str = USER


class Plan(NamedTuple):
    """One request. ``prompt`` is its whole length in tokens, with ``before`` and with all that the server adds; 0 means that
    ``before`` is all of it.

    ``lane`` names it in reports where one user class has several lanes; ``think_s`` is the pause after its answer, in place of
    ``--kv-think-s``. ``shared`` names a text that other prompts begin with too, and how many tokens of ``before`` are of it.
    """

    prompt: int
    output: int
    lane: str = ""
    before: tuple[Part, ...] = ()
    think_s: float | None = None
    shared: tuple[str, int] | None = None
