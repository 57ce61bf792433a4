"""Reading a configuration file with care: values under several names, class defaults, what the user assumes, and the missing field by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_kvcache.errors import CannotJudge, UsageError

MAX_CONFIG_BYTES = 16 * 2**20
MAX_LAYERS = 4096
_MOST = 2**40
_WANTED = "the model's config.json, its folder, or a .gguf file"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of at most 16 MiB. Raises UsageError for a file that is none."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path.name} is larger than a configuration can be", where=str(path), hint=_WANTED)
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"cannot read {path.name}: {error.strerror or error}", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path.name} is no JSON: {str(error)[:200]}", where=str(path), hint=_WANTED) from error
    if not isinstance(found, dict):
        raise UsageError(f"{path.name} holds no JSON object", where=str(path), hint=_WANTED)
    return found


class Fields:
    """The keys of one model's configuration.

    What the user states (``assume``) wins over the file, the file over the class defaults of its family; a key whose value is null counts as absent.
    Every default and assumption that was used is kept in ``assumptions``, in words.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        assume: Mapping[str, str] | None = None,
        name: str = "",
        family: str = "",
    ) -> None:
        self.raw = raw
        self.name = name
        self.family = family
        self._defaults = defaults or {}
        self._assume = {key: _parsed(text) for key, text in (assume or {}).items()}
        self.assumptions: list[str] = []
        self._used: set[str] = set()

    @property
    def unused(self) -> tuple[str, ...]:
        """What the user stated and no rule asked for."""
        return tuple(key for key in self._assume if key not in self._used)

    def has(self, *keys: str) -> bool:
        """Whether the file or the user states one of the keys, with a value."""
        return any(self._stated(key) is not None for key in keys)

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first value found under the keys: stated, then a class default, then ``default``.

        A key that the file sets to null has no class default: null is what the model's authors said.
        """
        for key in keys:
            found = self._stated(key)
            if found is not None:
                return found
        if any(key in self.raw for key in keys):
            return default
        for key in keys:
            if self._defaults.get(key) is not None:
                self._say(f"{key} = {_short(self._defaults[key])}, the class default of {self.family}")
                return self._defaults[key]
        return default

    def whole(self, *keys: str, default: int | None = None, least: int = 0) -> int | None:
        """Return a whole number under the keys, or ``default``. Raises UsageError for a value that is none."""
        found = self.get(*keys, default=default)
        if found is None:
            return None
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _MOST:
            shown = json.dumps(found)[:60] if isinstance(found, str) else _short(found)
            raise UsageError(
                f"{keys[0]} must be a whole number of {least} or more, and is {shown}", where=self.name, hint=f"--assume {keys[0]}=VALUE states it"
            )
        return found

    def need(self, *keys: str, why: str = "", least: int = 1) -> int:
        """Return a whole number that the answer depends on. Raises CannotJudge naming the missing field."""
        found = self.whole(*keys, least=least)
        if found is None:
            raise self.missing(*keys, why=why)
        return found

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Return a yes or no under the keys."""
        return bool(self.get(*keys, default=default))

    def listed(self, *keys: str) -> list[Any] | None:
        """Return a list under the keys, or None. Raises UsageError for one that is longer than a model has layers."""
        found = self.get(*keys)
        if found is None or isinstance(found, str) or not isinstance(found, Sequence):
            return None
        if len(found) > MAX_LAYERS:
            raise UsageError(f"{keys[0]} has {len(found)} entries", where=self.name)
        return list(found)

    def inside(self, key: str) -> Mapping[str, Any]:
        """Return a nested object, empty where there is none."""
        found = self.get(key)
        return found if isinstance(found, Mapping) else {}

    def missing(self, *keys: str, why: str = "") -> CannotJudge:
        """Return the error that names a missing field."""
        names = " or ".join(dict.fromkeys(keys))
        kind = f"model_type {self.family!r}" if self.family else "a configuration without model_type"
        reason = f" ({why})" if why else ""
        return CannotJudge(
            f"cannot judge {kind}: the configuration has no {names}{reason}", where=self.name, hint=f"--assume {keys[0]}=VALUE states it"
        )

    def _stated(self, key: str) -> Any:
        if key in self._assume:
            self._used.add(key)
            self._say(f"{key} = {_short(self._assume[key])}, stated by the user")
            return self._assume[key]
        return self.raw.get(key)

    def _say(self, sentence: str) -> None:
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 60 else text[:57] + "..."
