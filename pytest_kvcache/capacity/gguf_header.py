"""The header of a GGUF file, read with bounds: its keys and how many elements its tensors have. Nothing is loaded and nothing is trusted.

Format: GGUF versions 2 and 3, little-endian (ggml's docs/gguf.md): magic, version, tensor count, key count, the keys, then a row per tensor.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_kvcache.errors import UsageError

MAX_KEYS = 100_000
MAX_TENSORS = 1_000_000
MAX_ARRAY = 20_000_000
MAX_KEPT = 8192
MAX_TEXT = 2**20
MAX_KEY = 2**16
MAX_DIMENSIONS = 8
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
_WHOLE = "a download that broke off is fetched again; the model's config.json serves as well"


@dataclass(frozen=True, slots=True)
class Header:
    """``keys``: scalars, texts and arrays of up to 8,192 numbers, by name (longer arrays and arrays of texts are left out). ``elements``: of all tensors."""

    keys: dict[str, Any]
    elements: int
    tensors: int


def read_header(path: Path) -> Header:
    """Return the header of a GGUF file. Raises UsageError for a file that is none, or is cut or contradicts itself."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise UsageError(f"{path.name} is too short to be a GGUF file", where=str(path), hint=_WHOLE)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(view, path).header()
    except OSError as error:
        raise UsageError(f"cannot read {path.name}: {error.strerror or error}", where=str(path)) from error


class _Reader:
    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self._view = view
        self._at = 0
        self._path = path

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise self._bad("it does not begin with GGUF")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._bad(f"version {version} is not read (2 and 3 are; other byte orders are not)")
        tensors, count = self._number("<Q"), self._number("<Q")
        if tensors > MAX_TENSORS or count > MAX_KEYS:
            raise self._bad(f"{tensors} tensors and {count} keys are more than any model has")
        keys: dict[str, Any] = {}
        for _ in range(count):
            name = self._text(MAX_KEY)
            value = self._value(self._number("<I"))
            if value is not None:
                keys[name] = value
        return Header(keys, self._elements(tensors), tensors)

    def _elements(self, tensors: int) -> int:
        total = 0
        for _ in range(tensors):
            self._skip(self._length(MAX_KEY))
            dimensions = self._number("<I")
            if dimensions > MAX_DIMENSIONS:
                raise self._bad(f"a tensor of {dimensions} dimensions")
            elements = 1
            for _ in range(dimensions):
                elements *= self._number("<Q")
            total += elements
            self._skip(12)
            if total > 2**60:
                raise self._bad("its tensors have more elements than any model")
        return total

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text(MAX_TEXT)
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._bad(f"a value of the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self) -> list[Any] | None:
        kind, length = self._number("<I"), self._number("<Q")
        if length > MAX_ARRAY:
            raise self._bad(f"an array of {length} entries")
        if kind == _TEXT:
            self._skip_texts(length)
            return None
        if kind not in _SCALARS:
            raise self._bad(f"an array of the unknown type {kind}")
        form = _SCALARS[kind]
        if length > MAX_KEPT:
            self._skip(length * struct.calcsize(form))
            return None
        return list(struct.unpack(f"<{length}{form[1]}", self._take(length * struct.calcsize(form))))

    def _skip_texts(self, count: int) -> None:
        """Run over a vocabulary: a quarter of a million texts, each a length and its bytes."""
        unpack: Callable[[Any, int], tuple[int]] = struct.Struct("<Q").unpack_from
        view, at, end = self._view, self._at, len(self._view)
        for _ in range(count):
            if at + 8 > end:
                raise self._bad("it ends within its header")
            at += 8 + unpack(view, at)[0]
        if at > end:
            raise self._bad("it ends within its header")
        self._at = at

    def _text(self, most: int) -> str:
        return self._take(self._length(most)).decode("utf-8", "replace")

    def _length(self, most: int) -> int:
        length = int(self._number("<Q"))
        if length > most:
            raise self._bad(f"a text of {length} bytes")
        return length

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, size: int) -> bytes:
        found = self._view[self._at : self._at + size]
        if len(found) < size:
            raise self._bad("it ends within its header")
        self._at += size
        return found

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._view):
            raise self._bad("it ends within its header")

    def _bad(self, why: str) -> UsageError:
        return UsageError(f"{self._path.name} is no GGUF file that can be read: {why}", where=str(self._path), hint=_WHOLE)
