"""What can be known to be wrong with a session before a server is asked or started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_kvcache.judge.baseline import check_name, load_baseline
from pytest_kvcache.load.runner import profile_path
from pytest_kvcache.opening import is_address
from pytest_kvcache.planned import Planned
from pytest_kvcache.quality.items import Item, read_items
from pytest_kvcache.quality.pressure import read_pressures
from pytest_kvcache.runfolder import Run
from pytest_kvcache.server.endpoint import parse_endpoint
from pytest_kvcache.server.launch import parse_command
from pytest_kvcache.settings import Settings


def foresee(settings: Settings, plan: Sequence[Planned]) -> tuple[list[Item], list[Run]]:
    """Return the user's quality items and the Runs of the baseline, empty where none are named.

    Raises UsageError for a profile, an address, a command, a name or a file that cannot be meant, CannotJudge for the baseline.
    """
    for planned in plan:
        profile_path(planned.profile)
    for url in settings.endpoint:
        parse_endpoint(url, settings)
    for text in (settings.launch, settings.before, settings.after):
        if is_address(text):
            parse_endpoint(text, settings)
        elif text:
            parse_command(text)
            parse_endpoint("http://127.0.0.1:1", settings)  # its headers, keys and bodies
    if settings.save:
        check_name(settings.save)
    read_pressures(settings.quality_pressure)
    items = read_items(Path(settings.quality_items)) if settings.quality_items else []
    return items, load_baseline(settings.baseline, Path(settings.reports)) if settings.baseline else []
