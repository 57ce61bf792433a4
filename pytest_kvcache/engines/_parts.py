"""Sorts the rows of an exposition that holds several engines by the labels that tell engines apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from pytest_kvcache.engines._dialect import Dialect
from pytest_kvcache.engines._state import Sample, Samples, clean

MOST_PARTS = 256


def shown(models: Iterable[str], limit: int = 200) -> str:
    """Return the names of models as they may stand in a message: each cut at 80 characters, all together at ``limit``."""
    return clean(", ".join(clean(model, 80) for model in sorted(models)), limit)


class Parts:
    """Which part each row belongs to. A row without some of the labels belongs to every part that it does not contradict."""

    def __init__(self, dialect: Dialect, samples: Samples | None) -> None:
        labels = [*dialect.server_labels, dialect.model_label, dialect.rank_label]
        self.labels = tuple(label for label in labels if label)
        own = {dialect.model_label, dialect.rank_label}
        # A label of the engine that clashes with one of the scrape target is renamed by Prometheus: exported_<label>.
        self._names = tuple(
            (*((f"exported_{label}",) if label in own else ()), label, *dialect.label_aliases.get(label, ())) for label in self.labels
        )
        self._any_case = self.labels.index(dialect.model_label) if dialect.model_label and dialect.model_in_any_case else -1
        self.rank_at = len(self.labels) - 1 if dialect.rank_label else None
        self.model_at = len(dialect.server_labels) if dialect.model_label else None
        found: dict[tuple[str | None, ...], None] = {}
        if samples is not None and self.labels:
            for rows in samples.rows.values():
                for row in rows:
                    found[self.key(row)] = None
        # A key that another one refines is no part of its own. Beyond the bound all rows are one part, which then reads as Missing.
        keys = [key for key in found if None not in key or not any(_refines(other, key) for other in found)] if len(found) <= MOST_PARTS else []
        self.keys = keys or [(None,) * len(self.labels)]
        self._of: dict[tuple[str | None, ...], tuple[int, ...]] = {}

    def key(self, row: Sample) -> tuple[str | None, ...]:
        """Return the labels of a row that tell parts apart; None for one that it has not."""
        labels = row.labels
        key = [next((labels[name] for name in names if name in labels), None) for names in self._names]
        if self._any_case >= 0 and key[self._any_case]:
            key[self._any_case] = str(key[self._any_case]).lower()
        return tuple(key)

    def of(self, row: Sample) -> tuple[int, ...]:
        """Return the numbers of the parts that the row may belong to."""
        key = self.key(row)
        known = self._of.get(key)
        if known is None:
            known = tuple(n for n, part in enumerate(self.keys) if all(a is None or b is None or a == b for a, b in zip(key, part, strict=True)))
            self._of[key] = known
        return known

    def front_end(self, number: int) -> tuple[str | None, ...]:
        """Return the key of a part without its rank: ranks of one front end share it."""
        return tuple(value for at, value in enumerate(self.keys[number]) if at != self.rank_at)

    def of_model(self, model: str) -> list[int]:
        """Return the parts of the model that was asked for, where the exposition names it; none where it does not."""
        if self.model_at is None or not model:
            return []
        asked = model.lower() if self.model_at == self._any_case else model
        return [number for number, key in enumerate(self.keys) if key[self.model_at] == asked]

    @cached_property
    def models(self) -> list[str]:
        """The models that the exposition tells apart, by their names there: foreign text, to be cleaned before it is shown."""
        if self.model_at is None:
            return []
        return sorted({model for key in self.keys if (model := key[self.model_at]) is not None})

    def lacks(self, model: str) -> str:
        """Return why nothing is read of what is told by model only, where several are told and the one that was asked for is not among them."""
        if len(self.models) < 2 or not model or self.of_model(model):
            return ""
        return f"{len(self.models)} models in one exposition ({shown(self.models)}) and none is {clean(model, 80)}, which was asked for"

    def of_models(self, numbers: Sequence[int]) -> list[str]:
        """Return the note on several models: which are added up, or which of them is read."""
        if self.model_at is None:
            return []
        every = self.models
        read = {model for number in numbers if (model := self.keys[number][self.model_at]) is not None}
        if len(every) < 2:
            return []
        if len(read) < len(every):
            return [f"{len(every)} models in one exposition ({shown(every)}): only {shown(read)} is read, which was asked for"]
        return [f"{len(every)} models in one exposition ({shown(every)}): what adds is their sum; name one (--kv-model) to read it alone"]

    @cached_property
    def names(self) -> list[str]:
        """Short names of the parts: the values of as few labels as tell them apart."""
        chosen: list[int] = []
        order = [at for at in (self.rank_at, self.model_at) if at is not None]
        order = [*(at for at in range(len(self.labels)) if at not in order), *order]
        for at in order:
            if len({tuple(key[i] for i in chosen) for key in self.keys}) == len(self.keys) and chosen:
                break
            if len({tuple(key[i] for i in [*chosen, at]) for key in self.keys}) > len({tuple(key[i] for i in chosen) for key in self.keys}):
                chosen.append(at)
        return ["/".join(clean(key[i] or "-", 80) for i in chosen) for key in self.keys]


def _refines(other: tuple[str | None, ...], key: tuple[str | None, ...]) -> bool:
    return other != key and all(a is None or a == b for a, b in zip(key, other, strict=True))
