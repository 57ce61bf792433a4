"""Stored Runs taken into a session, and what must be measured to stand beside them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from pytest_kvcache.errors import CannotWrite
from pytest_kvcache.measure import Planned, Target, run_folder
from pytest_kvcache.observe.scrape import take_snapshot
from pytest_kvcache.opening import is_address
from pytest_kvcache.quality.items import Item, standard_items
from pytest_kvcache.quality.pressure import AUTO, NONE
from pytest_kvcache.quantities import Reading, Value
from pytest_kvcache.runfolder import Run, write_run
from pytest_kvcache.settings import Settings


def copy_runs(runs: Sequence[Run], session: Path, side: str) -> list[Run]:
    """Copy Runs into a session's folder as one side of it, so that the folder stands alone. Raises CannotWrite."""
    adopted = []
    for run in runs:
        folder = run_folder(session, f"{side}-{run.record.profile}")
        try:
            shutil.copytree(run.folder, folder, dirs_exist_ok=True)
        except (OSError, shutil.Error) as error:
            raise CannotWrite(f"cannot copy a stored Run: {str(error)[:200]}", where=str(folder), hint="free space, or --kv-reports") from None
        adopted.append(write_run(folder, msgspec.structs.replace(run.record, side=side)))
    return adopted


def planned_of(runs: Sequence[Run], named: Collection[str]) -> list[Planned]:
    """Return the loads of stored Runs whose profiles are not ``named``, with the numbers that they had."""
    found: dict[str, Planned] = {}
    for run in runs:
        numbers = dict(run.record.options)
        numbers.pop("nonce", None)
        if run.record.profile not in {*named, "quality"}:
            fields = {name: numbers.pop(name, 0) for name in ("users", "duration_s", "output_tokens", "requests")}
            found.setdefault(run.record.profile, Planned(run.record.profile, **fields, options=numbers))
    return list(found.values())


def items_beside(target: Target, before: Sequence[Run], settings: Settings) -> list[Item]:
    """Return the standard items for a ready target: on the boundaries of its own blocks, and of those of the side before, so that they pair."""
    first = target.endpoints[0]
    told: list[Value] = [take_snapshot(first, target.dialects[0], first.log, timeout_s=settings.scrape_timeout_s).value("block_size")]
    told += [run.record.config["block_size"].to_value() for run in before if run.record.profile == "quality" and "block_size" in run.record.config]
    sizes = {int(value.number()) for value in told if isinstance(value, Reading)}
    return standard_items(first, block_sizes=sorted(sizes))


def pressed_as(before: Sequence[Run], settings: Settings) -> Settings:
    """Return the settings with the pressures that the items of a side are asked under, where ``auto`` leaves them open.

    All of them where two launches are compared: caches break when they are full, shared or cut off, and a release is decided there. Those of a
    baseline that was asked under some. None of an attached server otherwise: it is a guest, and nobody asked for it to be filled.
    """
    if settings.quality_pressure != AUTO:
        return settings
    launched = bool(settings.before) and not is_address(settings.before) and not is_address(settings.after)
    felt = [record.part for run in before for record in run.record.pressure]
    return dataclasses.replace(settings, quality_pressure="all" if launched else ",".join(dict.fromkeys(felt)) or NONE)
