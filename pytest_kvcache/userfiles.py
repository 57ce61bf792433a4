"""A text file that a user hands in: bounded, UTF-8 with a byte-order mark or without. A whole file in UTF-16 with its mark is read as well."""

from __future__ import annotations

import codecs
from pathlib import Path

from pytest_kvcache.errors import UsageError

MARK = codecs.BOM_UTF8
"""What some editors of Windows put before the first character of a UTF-8 file."""
_LARGEST_BUNDLE = 16 << 20
_WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_user_text(path: Path, what: str, *, most_bytes: int, hint: str = "") -> str:
    """Return the text of a file; ``what`` names it in errors ("the rules").

    Raises UsageError where it cannot be read, is longer than ``most_bytes``, or is no text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        raise UsageError(f"{what} cannot be read: {reason}", where=str(path)[:300], hint=hint) from None
    if len(data) > most_bytes:
        raise UsageError(f"{what} cannot be read: the file is longer than {most_bytes >> 20} MiB", where=str(path)[:300], hint=hint)
    return decoded(data, what, str(path)[:300])


def decoded(data: bytes, what: str, where: str) -> str:
    """Return the text of a user's file without its byte-order mark. Raises UsageError, with the place of the first byte that is none."""
    coding = "utf-16" if data.startswith(_WIDE) else "utf-8-sig"
    try:
        return data.decode(coding)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{what} cannot be read: no {coding[:6].upper().strip('-')} text (byte {error.start})", where=where, hint="save the file as UTF-8"
        ) from None


def bundle(path: str) -> dict[str, str]:
    """Return how a TLS context is told of a CA bundle: by its path, or by its text where a mark would hide its first certificate. Raises OSError."""
    with Path(path).open("rb") as file:
        if file.read(len(MARK)) != MARK:
            return {"cafile": path}
        return {"cadata": file.read(_LARGEST_BUNDLE).decode("ascii", "ignore")}


def not_text(head: bytes) -> str:
    """Return why the first bytes of a file are no UTF-8 text, and what to do; empty where they may be."""
    if head.startswith(b"\x1f\x8b"):
        return "it is packed with gzip: unpack it first"
    if head.startswith((b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        return "it is packed: unpack it first"
    if head.startswith(b"PAR1"):
        return "it is a Parquet file: write its columns as CSV or JSON Lines"
    if head.startswith(_WIDE):
        return "it is UTF-16: save it as UTF-8"
    return "it is binary and no text" if b"\x00" in head else ""
