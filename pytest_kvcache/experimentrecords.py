"""The record of an experiment of two launched sides: its cells, and how the number of its repeats was chosen."""

from __future__ import annotations

from typing import Any

import msgspec


class CellRun(msgspec.Struct, frozen=True):
    """One Run of a finished cell: the entry of the plan (-1: the quality items), its window, and its folder below ``runs/``."""

    entry: int
    window: int
    folder: str


class CellRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A cell of an experiment that is finished: one side, once, with everything that was to be measured in it."""

    repeat: int
    side: str
    runs: list[CellRun] = []
    began_wall_s: float = 0.0
    ended_wall_s: float = 0.0


class SpreadRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much one quantity spreads from pair to pair, in ``unit``, or as a share of its value before where ``relative``.

    ``spread`` is the standard deviation of the paired differences (of their logarithms where ``relative``), whatever their mean is, and ``margin``
    how much worse the quantity may be, on that scale. ``needs`` is how many repeats this quantity alone would need (None: beyond what is counted).
    """

    gate: str
    quantity: str
    lane: str
    spread: float
    margin: float
    unit: str = ""
    relative: bool = False
    needs: int | None = None


class RepeatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many ``repeats`` were chosen from the spread of the first ``pilot`` pairs, at most ``most``.

    ``wanted`` is the number before that cap (None: beyond what is counted), ``chance`` the least chance that an equal candidate passes
    all gates on values with ``repeats``. ``spreads`` are in the order of what they need, most first; ``left_out`` names what had none.
    """

    pilot: int
    repeats: int
    most: int
    wanted: int | None = None
    chance: float = 0.0
    spreads: list[SpreadRecord] = []
    left_out: list[str] = []


class ExperimentRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """experiment.json: what an experiment is (``design``: all that both halves of a broken one must agree on) and its finished cells.

    ``id`` makes its prompts, ``longest`` is the context in tokens that both sides serve where one was chosen. ``resumed_wall_s`` holds when
    it was taken up again, ``judged_repeats`` how many repeats it had at each verdict, ``unsound_repeats`` those that were measured again.
    ``pilot_repeats`` is how many repeats the number of all of them is chosen after (0: it was given), ``choice`` what was chosen.
    """

    schema_version: int
    id: str
    design: dict[str, Any]
    longest: int | None = None
    finished: list[CellRecord] = []
    resumed_wall_s: list[float] = []
    judged_repeats: list[int] = []
    unsound_repeats: list[int] = []
    pilot_repeats: int = 0
    choice: RepeatChoice | None = None
