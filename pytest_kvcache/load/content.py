"""What prompts say, where not words drawn from the seed: text of a file, cut to the token, or prompts of one's own, sent as they are."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load.asking import Ask
from pytest_kvcache.load.counting import tokenize
from pytest_kvcache.load.files import read_text
from pytest_kvcache.load.plans import Part
from pytest_kvcache.load.prompts import IDS, LEAD, Prompt, PromptSource, Vocabulary

MOST_TOKENS = 400_000
COUNTED_PROMPTS = 2000
OWN_TOKENS = 8
_BLANKS = (" ", "\u0120", "\u2581", "\n", "\u010a")


class Given(NamedTuple):
    """A prompt of one's own: the JSON of its value for the API in use, its text, its tokens where they were counted, and what it asks for."""

    json: bytes
    text: str
    tokens: int | None
    output_tokens: int | None


@dataclass(frozen=True)
class Cut:
    """A stretch of a file's text: its pieces as they stand in a request, joined, and how many tokens they are."""

    pieces: tuple[bytes, ...]
    texts: tuple[str, ...]
    tokens: int


class Text:
    """The text of a file as pieces whose tokens are known: token ids of one token each, or words with what each costs."""

    def __init__(self, pieces: Sequence[bytes], texts: Sequence[str], costs: Sequence[int]) -> None:
        self._pieces = tuple(pieces)
        self._texts = tuple(texts)
        self._passed = (0, *itertools.accumulate(costs))
        self.tokens = self._passed[-1]

    def cut(self, tokens: int, start: int) -> Cut:
        """Return the text from piece ``start`` on (round and round) that has at most ``tokens`` tokens, and one piece more would have more."""
        passed, total = self._passed, len(self._pieces)
        begin = start % total
        rounds, rest = divmod(tokens + passed[begin], self.tokens)
        # passed[n] is what the first n pieces cost: the last n that still fits is found by bisection
        end = bisect_right(passed, rest) - 1
        if rounds == 0:
            pieces, texts, spent = self._pieces[begin:end], self._texts[begin:end], passed[end] - passed[begin]
        else:
            pieces = self._pieces[begin:] + self._pieces * (rounds - 1) + self._pieces[:end]
            texts = self._texts[begin:] + self._texts * (rounds - 1) + self._texts[:end]
            spent = self.tokens * rounds - passed[begin] + passed[end]
        return Cut(pieces, texts, spent)

    def __len__(self) -> int:
        return len(self._pieces)


def is_jsonl(path: Path) -> bool:
    """Return whether a file holds prompts of one's own, one a line, and not a text."""
    return path.suffix.lower() in {".jsonl", ".ndjson"}


def read_content(path: Path, ask: Ask, model: str, *, by_ids: bool, max_model_len: int | None) -> tuple[Text | None, list[str]]:
    """Return the text of a file by the server's own tokens, and what is to be told; None where the server counts no tokens of a text.

    Raises UsageError for a file that is not there or holds no words.
    """
    words = read_text(path).split()
    if not words:
        raise UsageError("the file holds no words", where=str(path))
    if tokenize(ask, model, "one") is None:
        return None, ["the server counts no tokens of a text: prompts are words drawn from the seed, and not --kv-content"]
    step = max(8, min(400, (max_model_len or 3200) // 8))
    wanted = min(MOST_TOKENS, max(50_000, 4 * (max_model_len or 0)))
    pieces: list[bytes] = []
    texts: list[str] = []
    costs: list[int] = []
    left_out = read = total = 0
    for begin in range(0, len(words), step):
        part = words[begin : begin + step]
        read = begin + len(part)
        found = tokenize(ask, model, "".join(" " + word for word in part), pieces=not by_ids)
        if found is None:
            left_out += len(part)
        elif by_ids:
            pieces += [str(one).encode() for one in found[0]]
            texts += [f" token {one}" for one in found[0]]
            costs += [1] * len(found[0])
            total += len(found[0])
        else:
            # as many tokens as words are one each, also where the server does not tell their texts
            spent = [1] * len(part) if len(found[0]) == len(part) else _costs(found[1], len(part))
            left_out += 0 if spent else len(part)
            for word, cost in zip(part, spent, strict=False):
                pieces.append(msgspec.json.encode(" " + word)[1:-1])
                texts.append(" " + word)
                costs.append(cost)
                total += cost
        if total > wanted:
            break
    if not costs:
        raise UsageError("the server's tokens do not tell where the words of the file begin", where=str(path), hint="leave --kv-content out")
    notes = [f"prompts are cut from {path.name}: {sum(costs):,} tokens"]
    if read < len(words):
        notes.append(f"only its first {read:,} of {len(words):,} words are used")
    if left_out:
        notes.append(f"{left_out:,} words are left out: the server's tokens do not tell where they begin")
    return Text(pieces, texts, costs), notes


def _costs(pieces: Sequence[str], words: int) -> list[int]:
    """Return how many tokens each of ``words`` words has, told apart by the blank before each; empty where that does not come out."""
    costs: list[int] = []
    for piece in pieces:
        if piece.startswith(_BLANKS) or not costs:
            costs.append(1)
        else:
            costs[-1] += 1
    return costs if len(costs) == words else []


def read_prompts(path: Path, ask: Ask, model: str, *, chat: bool) -> tuple[list[Given], list[str]]:
    """Return prompts of one's own, and what is to be told. A line is ``{"prompt": text}`` or ``{"messages": [...]}``.

    ``output_tokens`` or ``max_tokens`` of a line wins over the profile's. Raises UsageError with the number of the line.
    """
    given: list[Given] = []
    countable = tokenize(ask, model, "one") is not None
    uncounted = 0
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            row = None
        value = _value(row, chat) if isinstance(row, dict) else None
        if value is None:
            wanted = '{"prompt": "..."} or {"messages": [...]}' if chat else '{"prompt": "..."}; messages need --kv-api chat'
            raise UsageError(f"line {number} is no prompt", where=str(path), hint=f"write {wanted}")
        assert isinstance(row, dict)
        asked = next((row[name] for name in ("output_tokens", "max_tokens") if isinstance(row.get(name), int) and row[name] > 0), None)
        tokens = _tokens(ask, model, value, chat) if countable and len(given) < COUNTED_PROMPTS else None
        uncounted += tokens is None
        text = value if isinstance(value, str) else "\n".join(str(one.get("content", "")) for one in value)
        given.append(Given(msgspec.json.encode(value), text, tokens, asked))
    if not given:
        raise UsageError("the file holds no prompt", where=str(path))
    notes = [f"{len(given):,} prompts of {path.name} are sent as they are, in turn; when they come again, a prefix cache knows them"]
    if uncounted:
        notes.append(f"{uncounted:,} of them are not counted: their planned length is not known")
    return given, notes


def _value(row: Mapping[str, Any], chat: bool) -> Any:
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}] if chat else prompt
    if chat and isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        return messages
    return None


def _tokens(ask: Ask, model: str, value: Any, chat: bool) -> int | None:
    """Return how many tokens the server will count: vLLM tokenizes messages itself, llama.cpp in two steps."""
    if not chat:
        found = tokenize(ask, model, value, special=True)
        return len(found[0]) if found is not None else None
    body = {"model": model, "messages": value, "add_generation_prompt": True}
    answer = ask("POST", "/tokenize", msgspec.json.encode(body))
    told = answer.json if answer.status == 200 else None
    tokens = told.get("tokens") if isinstance(told, dict) else None
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    answer = ask("POST", "/apply-template", msgspec.json.encode({"messages": value}))
    told = answer.json if answer.status == 200 else None
    prompt = told.get("prompt") if isinstance(told, dict) else None
    found = tokenize(ask, model, prompt, special=True) if isinstance(prompt, str) else None
    return len(found[0]) if found is not None else None


class TextSource(PromptSource):
    """Prompts cut from a text: each begins with eight words of its own, so that no two begin alike, and is filled up with words to the token."""

    def __init__(self, vocabulary: Vocabulary, nonce: str, text: Text, *, chat: bool = False) -> None:
        super().__init__(vocabulary, nonce, chat=chat)
        self._text = text

    def _cut(self, indexes: bytes) -> tuple[bytes, Cut, bytes]:
        """Return the words before, the stretch of text, and the words after it, for the words that a plain prompt would have here."""
        if len(indexes) < 3 * OWN_TOKENS:
            return indexes, Cut((), (), 0), b""
        cut = self._text.cut(len(indexes) - OWN_TOKENS, int.from_bytes(indexes[OWN_TOKENS : 2 * OWN_TOKENS], "little"))
        rest = len(indexes) - OWN_TOKENS - cut.tokens
        return indexes[:OWN_TOKENS], cut, indexes[len(indexes) - rest :] if rest else b""

    def _value(self, pieces: tuple[bytes, ...]) -> bytes:
        of, said = self._table.__getitem__, []
        for indexes in pieces:
            head, cut, pad = self._cut(indexes)
            said += [*map(of, head), *cut.pieces, *map(of, pad)]
        return self._open + self._join.join(said) + self._close

    def say(self, pieces: tuple[bytes, ...]) -> str:
        """Return the text of a message of these pieces."""
        said = "" if self.vocabulary.source == IDS else LEAD
        for indexes in pieces:
            head, cut, pad = self._cut(indexes)
            said += "".join((*(f" {self._words[one]}" for one in head), *cut.texts, *(f" {self._words[one]}" for one in pad)))
        return said


class GivenSource(PromptSource):
    """Prompts of one's own in turn, by the number of the request: whatever length the profile plans, they are sent as they are."""

    def __init__(self, vocabulary: Vocabulary, nonce: str, given: Sequence[Given], *, chat: bool = False) -> None:
        super().__init__(vocabulary, nonce, chat=chat)
        self._given = given

    def make(self, tokens: int, *parts: object, before: Sequence[Part] = (), number: int = 0) -> Prompt:
        """Return the prompt of a number; ``tokens``, ``parts`` and ``before`` are not looked at."""
        one = self._given[number % len(self._given)]
        return Prompt(one.json, one.tokens, "given", (("", ()),), lambda _: one.text, one.output_tokens)


def make_source(
    path: Path, ask: Ask, model: str, vocabulary: Vocabulary, nonce: str, *, chat: bool, max_model_len: int | None
) -> tuple[PromptSource, list[str]]:
    """Return what makes prompts out of a file, and what is to be told of it. Raises UsageError."""
    if is_jsonl(path):
        given, notes = read_prompts(path, ask, model, chat=chat)
        return GivenSource(vocabulary, nonce, given, chat=chat), notes
    if not vocabulary.exact:
        return PromptSource(vocabulary, nonce, chat=chat), [
            "lengths cannot be exact here: prompts are words drawn from the seed, and not --kv-content"
        ]
    text, notes = read_content(path, ask, model, by_ids=vocabulary.source == IDS, max_model_len=max_model_len)
    return (PromptSource(vocabulary, nonce, chat=chat) if text is None else TextSource(vocabulary, nonce, text, chat=chat)), notes
