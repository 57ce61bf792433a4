"""Puts the rows of a load in order of their end, as one process would have written them, without holding them in memory."""

from __future__ import annotations

import contextlib
from array import array
from pathlib import Path

import msgspec

_REQUEST = b'{"kind":"request"'


class _Ended(msgspec.Struct):
    end_s: float


def put_in_order(path: Path) -> bool:
    """Sort the request rows of a file by ``end_s``; start line, notes and end lines keep their places before and after them.

    Return whether the file is in order now. A file that cannot be read or written stays as it was: its rows are all there. Held in
    memory are a number and a place of each row.
    """
    if path.is_char_device():
        return False
    ends, places = array("d"), array("q")
    head: list[bytes] = []
    tail: list[bytes] = []
    decode = msgspec.json.Decoder(_Ended).decode
    temporary = path.with_name(path.name + ".part")
    try:
        with path.open("rb") as file:
            place = 0
            for line in file:
                if line.startswith(_REQUEST):
                    ends.append(decode(line).end_s)
                    places.append(place)
                else:
                    (tail if line.startswith(b'{"kind":"end"') else head).append(line)
                place += len(line)
            if all(ends[at] <= ends[at + 1] for at in range(len(ends) - 1)):
                return True
            order = sorted(range(len(ends)), key=ends.__getitem__)
            with temporary.open("wb") as sorted_file:
                sorted_file.writelines(head)
                for at in order:
                    file.seek(places[at])
                    sorted_file.write(file.readline())
                sorted_file.writelines(tail)
            temporary.replace(path)
    except (OSError, msgspec.DecodeError):
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
