"""What marks and keywords of a test mean: the load of ``kv_profile``, the limits on it, and the lines of ``--kv-thresholds``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvcache.errors import UsageError
from pytest_kvcache.settings import Settings

if TYPE_CHECKING:
    from pytest_kvcache.judge.thresholds import Threshold
    from pytest_kvcache.planned import Planned

SETTINGS = pytest.StashKey[Settings]()
PROFILE_KEYWORDS = frozenset({"users", "duration_s", "output_tokens", "requests", "options"})
OPTION_KEYWORDS = frozenset({"rate", "arrivals", "stages", "max_in_flight", "content", "trace"})
"""Options of the load that ``kv_load`` takes as keywords."""


def limits_of(mark: pytest.Mark) -> dict[str, Any]:
    """Return the limits among the keywords of a ``kv_profile`` mark. Raises UsageError where one cannot be meant."""
    limits = {name: value for name, value in mark.kwargs.items() if name not in PROFILE_KEYWORDS}
    if limits:
        from pytest_kvcache.conditions import from_limits

        from_limits(limits)
    return limits


def thresholds_of(config: pytest.Config) -> tuple[Threshold, ...]:
    """Return the lines of ``--kv-thresholds``; none where no file was named. Raises UsageError."""
    settings = config.stash[SETTINGS]
    if not settings.thresholds:
        return ()
    from pytest_kvcache.judge.thresholds import read_thresholds

    read = read_thresholds(Path(settings.thresholds))
    if read.on_inconclusive and "on_inconclusive" not in settings.sources:
        config.stash[SETTINGS] = settings.replace(on_inconclusive=read.on_inconclusive)
    return read.lines


def marked(mark: pytest.Mark) -> Planned:
    """Return the load that a ``kv_profile`` mark names. Raises UsageError."""
    return planned_load(mark.args[0], {name: value for name, value in mark.kwargs.items() if name in PROFILE_KEYWORDS})


def planned_load(profile: str, numbers: Mapping[str, Any]) -> Planned:
    """Return the load that the keywords of ``kv_load`` describe. Raises UsageError for one that there is not."""
    from pytest_kvcache.measure import Planned

    arrivals = {name: value for name, value in numbers.items() if name in OPTION_KEYWORDS}
    rest = {name: value for name, value in numbers.items() if name not in OPTION_KEYWORDS}
    if arrivals:
        rest["options"] = {**arrivals, **rest.get("options", {})}
    try:
        return Planned(profile, **rest)
    except TypeError:
        known = "users, duration_s, output_tokens, requests, rate, arrivals, stages, max_in_flight, content, trace, options"
        raise UsageError(f"unknown keyword among {', '.join(numbers)}", where=f"kv_load({profile!r}, ...)", hint=f"known: {known}") from None
