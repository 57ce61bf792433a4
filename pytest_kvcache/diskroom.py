"""Room on the disk that a session writes to: a little of it is held back, so that what was measured can still be told when the rest is used up."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from pytest_kvcache.errors import CannotWrite

HELD_BACK_BYTES = 2 << 20
LEAST_BYTES = 256 << 10
"""With less than this nothing more is measured: not even the record of a Run would fit."""
_NAME = ".held-back"


def hold_back(session: Path) -> None:
    """Take a little room in a session's folder. Raises CannotWrite where there is not that much."""
    try:
        with (session / _NAME).open("xb") as file:
            file.write(bytes(HELD_BACK_BYTES))  # a hole would take no room
            file.flush()
            os.fsync(file.fileno())  # some file systems tell only here
    except FileExistsError:
        return
    except OSError as error:
        give_back(session)
        raise CannotWrite(
            f"there is no room for a session: {error.strerror or error}",
            where=str(session),
            hint="free space, or name another folder with --kv-reports",
        ) from None


def give_back(session: Path) -> bool:
    """Give the room back and return whether any was held."""
    with contextlib.suppress(OSError):
        (session / _NAME).unlink()
        return True
    return False


def used_up(session: Path) -> bool:
    """Return whether no room is left for a further Run; what was held back and is given back already counts as used."""
    try:
        return shutil.disk_usage(session).free < LEAST_BYTES + (0 if (session / _NAME).exists() else HELD_BACK_BYTES)
    except OSError:
        return False
