"""What is to be measured: the servers of one side, a load profile with numbers of one's own, and one window of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_kvcache.engines import Dialect
from pytest_kvcache.errors import UsageError
from pytest_kvcache.load.runner import own_length
from pytest_kvcache.server.endpoint import Endpoint
from pytest_kvcache.settings import MOST_USERS, Settings

EMBEDDED_WINDOW_S = 6.0
WINDOW_S = 30.0


@dataclass(frozen=True)
class Target:
    """What is measured: ready endpoints of one side, the dialect of each, and what is known of the side as a whole."""

    endpoints: Sequence[Endpoint]
    dialects: Sequence[Dialect]
    side: str = ""
    embedded: bool = False
    command: Sequence[str] = ()
    fresh: bool = False
    variant: str = ""
    provenance: Mapping[str, str] = field(default_factory=dict)
    launch_id: str = ""
    gpus: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Planned:
    """A load profile with numbers of one's own; 0 takes the profile's. ``requests`` ends the load after so many."""

    profile: str
    users: int = 0
    duration_s: float = 0.0
    output_tokens: int = 0
    requests: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise UsageError for numbers that cannot be meant."""
        numbers = {"users": self.users, "duration_s": self.duration_s, "output_tokens": self.output_tokens, "requests": self.requests}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise UsageError(
                    f"{name} of a load is a number from 0 on, not {value!r}", where=f"profile {self.profile}", hint="0 takes the profile's own"
                )
        if self.users > MOST_USERS:
            raise UsageError(f"{self.users:,} users are more than one load can hold", where=f"profile {self.profile}", hint=f"at most {MOST_USERS:,}")

    @property
    def name(self) -> str:
        """The profile's name, also where its file was named by a path."""
        return Path(self.profile).stem


@dataclass(frozen=True)
class Window:
    """One measured window of a planned load, the ``number``-th from 0 of ``of``. ``nonce`` makes its prompts differ from all other windows'.

    ``pilot`` is of how many first windows the spread chose ``of`` (0: it was given).
    ``longest`` sizes prompts by a shorter context than the server's own, where both sides of a comparison are to be pressed alike.
    """

    planned: Planned
    number: int
    seed: int
    nonce: str
    sample_hz: float
    of: int = 1
    pilot: int = 0
    longest: int | None = None


def window_of(
    target: Target, planned: Planned, number: int, settings: Settings, *, session: str, of: int, longest: int | None, pilot: int = 0
) -> Window:
    """Return the ``number``-th of ``of`` windows of ``planned`` on a target, with what the settings say filled in. ``session`` is the session's id."""
    owned_window_s = EMBEDDED_WINDOW_S if target.embedded else WINDOW_S
    replicas = len(target.endpoints) if planned.requests else 1  # a probe goes to every replica
    # a counted load is a probe with its own arrivals, and ends by its count; a trace and listed stages know how long they last
    options = planned.options if planned.requests else {**settings.load_options(planned.name), **planned.options}
    usual_s = 0.0 if planned.requests else settings.duration_s or (0.0 if own_length(options) else owned_window_s)
    filled = replace(
        planned,
        users=(planned.users or settings.users) * replicas,
        requests=planned.requests * replicas,
        duration_s=planned.duration_s or usual_s,
        output_tokens=planned.output_tokens or settings.output_tokens,
        options=options,
    )
    return Window(
        filled,
        number,
        seed=settings.seed + number,
        nonce=f"{session}-{planned.name}-{number}",
        # a single request is over soon: its level is looked at more often
        sample_hz=max(settings.sample_hz, 25.0) if planned.requests else settings.sample_hz,
        of=of,
        pilot=0 if planned.requests else pilot,
        longest=None if planned.requests else longest,  # a single request is sized by its own server's limit
    )
