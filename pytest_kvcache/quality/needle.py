"""The standard recall items: a pair stands somewhere in a long prompt, its first half is said again, and the second is asked for.

Two forms. ``recall``: a list of invented words that are one token each for the model (the embedded model is made for them), so
that lengths are exact. ``needle``: plain English, for every other model. Which one is used depends only on how the server counts
tokens and never on what it answers, so a broken cache cannot change the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from pytest_kvcache.quality.items import Item
from pytest_kvcache.server.embedded.recall import WORDS
from pytest_kvcache.server.endpoint import Endpoint, complete, list_models, tokenize

RECALL, NEEDLE = "recall", "needle"
BANDS = 5
"""The prompt is cut into this many bands; each item's pair stands at a random place of its band."""
COUNTS = {64: 105, 256: 100, 512: 70, 1024: 20}
NEAR_MAX = 5
"""Few, since each costs as much as a hundred short ones; five that all break are significant (exact McNemar, p = 0.03)."""
LONGEST = 32_768
"""The longest prompt of the standard set in tokens: five prompts of a million tokens would take hours."""

_TOTAL = 300
_MARGIN = 16
_SHORTEST = 24

_THINGS = (
    "river", "garden", "window", "bridge", "market", "school", "kitchen", "forest", "harbor", "village", "station", "library", "mountain",
    "theater", "hospital", "island", "tower", "valley", "castle", "museum", "airport", "orchard", "bakery", "factory", "stadium",
)  # fmt: skip
_COLORS = ("red", "blue", "green", "white", "black", "brown", "yellow", "orange", "golden", "silver", "gray", "purple")
_WHO = ("The teacher", "A farmer", "My neighbor", "The driver", "An old man", "The girl", "A friend", "The cook", "Her brother", "The doctor")
_DOES = ("walked to", "looked at", "talked about", "waited near", "came back from", "painted", "cleaned", "remembered", "drove past", "sat behind")
_WHEN = (
    "in the morning",
    "after lunch",
    "on Sunday",
    "every day",
    "last winter",
    "before dinner",
    "in the rain",
    "at night",
    "for an hour",
    "with a smile",
)


def standard_set(endpoint: Endpoint, max_model_len: int | None = None) -> list[Item]:
    """Return the standard set for the model that the endpoint serves; see ``items.standard_items``."""
    if max_model_len is None:
        max_model_len = next((model.max_model_len for model in list_models(endpoint) if model.id == endpoint.model), None)
    count = token_counter(endpoint)
    if choose_form(count) == RECALL:
        return recall_items(max_model_len)
    return needle_items(max_model_len, tokens_per_word=words_cost(count), chat=endpoint.api == "chat")


def token_counter(endpoint: Endpoint) -> Callable[[str], int | None]:
    """Return what counts the tokens of a text as a prompt: the server's /tokenize, else the prompt tokens of a one-token answer.

    Either may hold a constant for special tokens or a template, so only differences of two counts mean anything.
    """

    def count(text: str) -> int | None:
        ids = tokenize(endpoint, text)
        return len(ids) if ids is not None else complete(endpoint, text, 1, timeout_s=120.0).prompt_tokens

    return count


def choose_form(count: Callable[[str], int | None]) -> str:
    """Return ``recall`` where each of the invented words is one token for the model, else ``needle``."""
    few, many = count(_text(WORDS[:8])), count(_text(WORDS[:40]))
    return RECALL if few is not None and many is not None and many - few == 32 else NEEDLE


def words_cost(count: Callable[[str], int | None]) -> float:
    """Return the tokens per word of the needle form's English for this model; 1.5 where the server does not count."""
    few, many = (_filler(Random("cost"), words) for words in (20, 220))  # noqa: S311  seeded text, no secret
    left, right = count(" ".join(few)), count(" ".join(many))
    words = sum(len(text.split()) for text in many) - sum(len(text.split()) for text in few)
    return (right - left) / words if left is not None and right is not None and right > left else 1.5


def plan(max_model_len: int | None) -> list[tuple[int, int]]:
    """Return (length in tokens, number of items) that fit the model, 300 items in all, bands filled evenly."""
    room = LONGEST if max_model_len is None else min(max_model_len - _MARGIN, LONGEST)
    lengths = {length: number for length, number in COUNTS.items() if length <= room}
    if max_model_len is not None and room >= _SHORTEST and room not in lengths:
        lengths[room] = NEAR_MAX
    if not lengths:
        return []
    scale = _TOTAL / sum(lengths.values())
    numbers = {length: max(BANDS, round(number * scale / BANDS) * BANDS) for length, number in lengths.items()}
    shortest = min(numbers)
    numbers[shortest] = max(BANDS, numbers[shortest] + _TOTAL - sum(numbers.values()))
    return sorted(numbers.items())


def recall_items(max_model_len: int | None) -> list[Item]:
    """Return the recall form: ``length`` words, of which two neighbours are the pair and the last says the first of them again."""
    items = []
    for length, band, number in _places(max_model_len):
        rng = Random(f"{RECALL} {length} {band} {number}")  # noqa: S311  seeded text, no secret
        key, value = _pick(rng, WORDS), _pick(rng, WORDS)
        while value == key:
            value = _pick(rng, WORDS)
        others = [word for word in WORDS if word not in (key, value)]
        words = [_pick(rng, others) for _ in range(length - 3)]
        at = _depth(rng, band) * len(words)
        words[round(at) : round(at)] = [key, value]
        items.append(Item(_name(RECALL, length, band, number), _text([*words, key]), value, "exact", length, at / len(words), 1))
    return items


def needle_items(max_model_len: int | None, *, tokens_per_word: float = 1.5, chat: bool = False) -> list[Item]:
    """Return the needle form: English sentences, one of which gives a five-digit number that is asked for at the end.

    A completion is graded by its first word, so that whatever follows the number does not matter; a chat answer by containing it.
    """
    items = []
    for length, band, number in _places(max_model_len):
        rng = Random(f"{NEEDLE} {length} {band} {number}")  # noqa: S311  seeded text, no secret
        what = f"the {_pick(rng, _COLORS)} {_pick(rng, _THINGS)}"
        value = str(10_000 + int(rng.random() * 90_000))
        question = f"\n\nWhat is the number of {what}? Answer with the number only." if chat else f" The number of {what} is"
        needle = f"The number of {what} is {value}."
        # numbers are several tokens for many models: ten are left free beside what the words of the frame cost
        frame = (len(needle.split()) + len(question.split())) * tokens_per_word + 10
        sentences = _filler(rng, max(0.0, (length - frame) / tokens_per_word))
        depth = _depth(rng, band)
        sentences.insert(round(depth * len(sentences)), needle)
        match, max_tokens = ("contains", 64) if chat else ("word", 8)
        items.append(Item(_name(NEEDLE, length, band, number), " ".join(sentences) + question, value, match, length, depth, max_tokens))
    return items


def _places(max_model_len: int | None) -> list[tuple[int, int, int]]:
    return [(length, i % BANDS, i // BANDS) for length, count in plan(max_model_len) for i in range(count)]


def _depth(rng: Random, band: int) -> float:
    return round((band + rng.random()) / BANDS, 3)


def _name(form: str, length: int, band: int, number: int) -> str:
    """Return the id: form, length, middle of the band in percent, number."""
    return f"{form}-{length}-{round((band + 0.5) / BANDS * 100)}-{number}"


def _text(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)


def _pick(rng: Random, choices: Sequence[str]) -> str:
    # random() alone is promised to stay the same over versions of Python, and items must pair across machines
    return choices[int(rng.random() * len(choices))]


def _filler(rng: Random, words: float) -> list[str]:
    """Return sentences of about this many words and not more; none holds a digit or the word number."""
    sentences: list[str] = []
    used = 0
    while True:
        sentence = f"{_pick(rng, _WHO)} {_pick(rng, _DOES)} the {_pick(rng, _COLORS)} {_pick(rng, _THINGS)} {_pick(rng, _WHEN)}."
        used += len(sentence.split())
        if used > words:
            return sentences
        sentences.append(sentence)
