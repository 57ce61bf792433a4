"""What verdict.json keeps of a finding."""

from __future__ import annotations

import msgspec


class FindingRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rule says of a session's Runs, with its numbers. ``beside`` holds what a usage ratio in ``text`` is never shown without.

    ``why`` is the rule's condition with what was measured, ``run`` the path of the Run inside the session folder, ``rules`` the user's file that
    the rule stands in (empty: one of this package).
    """

    id: str
    severity: str
    title: str
    text: str
    beside: str = ""
    do: list[str] = []
    avoid: str = ""
    reason: str = ""
    why: str = ""
    run: str = ""
    rules: str = ""
