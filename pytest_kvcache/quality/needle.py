"""The standard recall items: a few words stand together somewhere in a long prompt, the first is said again, and the others are asked for.

Two forms. ``recall``: a list of invented words that are one token each for the model (the embedded model is made for them), so
that lengths are exact. ``needle``: plain English, for every other model. Which one is used depends only on how the server counts
tokens and never on what it answers, so a broken cache cannot change the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from pytest_kvcache.quality import grid
from pytest_kvcache.quality.items import Item
from pytest_kvcache.server.embedded.recall import WORDS
from pytest_kvcache.server.endpoint import Endpoint, complete, list_models, tokenize

RECALL, NEEDLE = "recall", "needle"
CHAIN = 3
"""Words that a recall item asks for: with more than one the server decodes, and does not only read its prompt."""

_SHORTEST = {RECALL: 12, NEEDLE: 64}
_PADDING = " very"
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


def standard_set(endpoint: Endpoint, max_model_len: int | None = None, block_sizes: Sequence[int] = ()) -> list[Item]:
    """Return the standard set for the model that the endpoint serves; see ``items.standard_items``."""
    if max_model_len is None:
        max_model_len = next((model.max_model_len for model in list_models(endpoint) if model.id == endpoint.model), None)
    count = token_counter(endpoint)
    extra = frame_tokens(endpoint)
    if choose_form(count) == RECALL:
        return recall_items(max_model_len, block_sizes, extra=extra)
    exact = count if tokenize(endpoint, "a") is not None else None
    return needle_items(
        max_model_len, block_sizes, tokens_per_word=words_cost(count), chat=endpoint.api == "chat", extra=_needle_extra(endpoint, count), count=exact
    )


def frame_tokens(endpoint: Endpoint) -> int:
    """Return how many tokens the server counts beyond the eight invented words of a prompt: special tokens and a chat template.

    0 where the server does not say. Only a recall model counts the words themselves as one token each.
    """
    told = complete(endpoint, _text(WORDS[:8]), 1, timeout_s=120.0).prompt_tokens
    return max(0, told - 8) if told is not None else 0


def _needle_extra(endpoint: Endpoint, count: Callable[[str], int | None]) -> int:
    """Return how many tokens a prompt has beyond what the server counts of its bare text."""
    text = "The river is wide."
    told, bare = complete(endpoint, text, 1, timeout_s=120.0).prompt_tokens, count(text)
    return max(0, told - bare) if told is not None and bare is not None else 0


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


def recall_items(max_model_len: int | None, block_sizes: Sequence[int] = (), *, extra: int = 1) -> list[Item]:
    """Return the recall form: words of which four neighbours are the chain, and the last says the first of them again.

    The prompt with the ``extra`` tokens that the server adds to it is as long as the plan says, to the token.
    """
    items = []
    for length, band, number in _places(RECALL, max_model_len, block_sizes):
        rng = Random(f"{RECALL} {length} {band} {number}")  # noqa: S311  seeded text, no secret
        chain: list[str] = []
        while len(chain) < CHAIN + 1:
            word = _pick(rng, WORDS)
            chain += [word] if word not in chain else []
        others = [word for word in WORDS if word not in chain]
        words = [_pick(rng, others) for _ in range(max(1, length - extra - len(chain) - 1))]
        depth = _depth(rng, band)
        at = round(depth * len(words))
        words[at:at] = chain
        prompt = _text([*words, chain[0]])
        items.append(Item(_name(RECALL, length, band, number), prompt, " ".join(chain[1:]), "exact", length, depth, CHAIN))
    return items


def needle_items(
    max_model_len: int | None,
    block_sizes: Sequence[int] = (),
    *,
    tokens_per_word: float = 1.5,
    chat: bool = False,
    extra: int = 0,
    count: Callable[[str], int | None] | None = None,
) -> list[Item]:
    """Return the needle form: English sentences, one of which gives a five-digit number that is asked for at the end.

    A completion is graded by its first word, so that whatever follows the number does not matter; a chat answer by containing it.
    With ``count`` (the server's own tokens of a text) a prompt with the ``extra`` tokens around it has the planned length to the token.
    """
    items = []
    for length, band, number in _places(NEEDLE, max_model_len, block_sizes):
        rng = Random(f"{NEEDLE} {length} {band} {number}")  # noqa: S311  seeded text, no secret
        what = f"the {_pick(rng, _COLORS)} {_pick(rng, _THINGS)}"
        value = str(10_000 + int(rng.random() * 90_000))
        question = f"\n\nWhat is the number of {what}? Answer with the number only." if chat else f" The number of {what} is"
        needle = f"The number of {what} is {value}."
        # numbers are several tokens for many models: ten are left free beside what the words of the frame cost
        frame = (len(needle.split()) + len(question.split())) * tokens_per_word + 10
        sentences = _filler(rng, max(0.0, (length - frame) / tokens_per_word))
        depth = _depth(rng, band)
        at = round(depth * len(sentences))

        def text(kept: Sequence[str], at: int = at, needle: str = needle, question: str = question) -> str:
            return " ".join([*kept[:at], needle, *kept[at:]]) + question

        prompt = text(sentences) if count is None else _fitted(text, sentences, length - extra, count)
        match, max_tokens = ("contains", 64) if chat else ("word", 8)
        items.append(Item(_name(NEEDLE, length, band, number), prompt, value, match, length, depth, max_tokens))
    return items


def _fitted(text: Callable[[Sequence[str]], str], sentences: list[str], length: int, count: Callable[[str], int | None]) -> str:
    """Return the text padded or cut to ``length`` tokens by the server's count; as near as it comes where its tokens do not add up."""
    kept = list(sentences)
    best, padding = text(kept), 0
    nearest: int | None = None
    for _ in range(8):
        made = text([*kept, f"It was{_PADDING * padding} late."] if padding else kept)
        there = count(made)
        if there is None:
            return best
        off = length - there
        if off >= 0 and (nearest is None or off < nearest):
            best, nearest = made, off
        if off == 0:
            return made
        if off < 0 and padding + off >= 1:
            padding += off
        elif off < 0:
            padding = 0
            gone = max(1, round(-off / max(1.0, there / max(1, len(kept) + 2))))
            kept = kept[: max(0, len(kept) - gone)]
        else:
            # the sentence around the padding costs some tokens of its own the first time
            padding += off if padding else max(1, off - 5)
    return best


def _places(form: str, max_model_len: int | None, block_sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (length, band, number): which does not depend on how many items a length has, so that other plans share the items."""
    plan = grid.plan(max_model_len, block_sizes, _SHORTEST[form])
    return [(length, (3 * i + length) % grid.BANDS, i // grid.BANDS) for length, count in plan for i in range(count)]


def _depth(rng: Random, band: int) -> float:
    return round((band + rng.random()) / grid.BANDS, 3)


def _name(form: str, length: int, band: int, number: int) -> str:
    """Return the id: form, length, middle of the band in percent, number."""
    return f"{form}-{length}-{round((band + 0.5) / grid.BANDS * 100)}-{number}"


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
