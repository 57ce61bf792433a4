"""Prompts of an exact length in tokens, each different from the first tokens on.

In order of trust: token ids that the server's own /tokenize gave (``ids``); text of words that are one token each by the
same (``tokenize``); text of words found to be one token each by probing ``usage`` (``calibrated``); text by the mean number of
tokens per word (``estimated``, which is not exact). What the server adds (BOS, chat template) is measured and counted in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load.plans import ASSISTANT, SYSTEM, USER, Part

IDS = "ids"
TOKENIZE = "tokenize"
CALIBRATED = "calibrated"
ESTIMATED = "estimated"
SOURCES = (IDS, TOKENIZE, CALIBRATED, ESTIMATED)

# Text starts with a word that never changes: some templates strip the blank before the first word, which changes its tokens.
LEAD = "List:"
MOST_WORDS = 20_000_000

_EVERYDAY = """
apple bread butter cake cheese cherry coffee corn cream egg fish flour fruit garlic grape honey juice lemon lime meat milk onion orange
pepper pie potato rice salt sauce soup sugar tea tomato wheat wine bowl cup dish fork glass jar knife lid pan plate pot spoon stove tray
bear bee bird bull cat cow crab deer dog duck eagle fox frog goat goose hawk horse lamb lion mouse owl pig rabbit rat seal shark sheep
snake spider swan tiger turtle whale wolf worm ant ash bark bay beach branch bush cave cliff cloud coal coast creek dawn desert dew dust
earth field fire fog forest frost grass hill ice island lake leaf mist moon moss mountain mud ocean pond rain ridge river rock root sand
sea seed shade shore sky smoke snow soil star stone storm stream sun thunder tide tree valley water wave wind wood arm back beard bone
brain cheek chest chin ear elbow eye face finger foot hair hand head heart heel hip jaw knee leg lip lung mouth nail neck nose palm rib
shoulder skin thumb toe tongue tooth wrist bag ball basket bell belt blanket boat book boot bottle box brick bridge broom brush bucket
button candle car card carpet chain chair clock coat coin comb desk dice door drum fan fence flag flute gate glove hammer hat helmet hook
horn key kite ladder lamp lock map mask mirror needle net paint paper pen pencil piano pillow pin pipe plane plug pump purse ring roof
rope rug saw scarf screw shelf shield ship shirt shoe shovel sock sofa sword table tent thread ticket tower toy train truck umbrella
wagon wall watch wheel whistle window wire amber black blue bronze brown gold gray green iron ivory pink purple red silver steel violet
white yellow bright broad calm clean clear cold cool dark deep dry early empty fast flat fresh full gentle hard heavy high hot kind
late light long loud low narrow new old plain proud quick quiet rich rough round sharp short slow small smooth soft strong sweet tall
thick thin warm wet wide wild young
"""
WORDS = tuple(dict.fromkeys(_EVERYDAY.split()))


def made_up_words(count: int) -> list[str]:
    """Return words of consonant, vowel, consonant, vowel in a fixed shuffled order, for tokenizers that know no English."""
    consonants, vowels = "bcdfghjklmnprstvz", "aeiou"
    total = (len(consonants) * len(vowels)) ** 2
    words = []
    for number in range(min(count, total)):
        rest = number * 4093 % total
        letters = []
        for alphabet in (vowels, consonants, vowels, consonants):
            rest, at = divmod(rest, len(alphabet))
            letters.append(alphabet[at])
        words.append("".join(reversed(letters)))
    return words


@dataclass(frozen=True)
class Vocabulary:
    """The pieces that prompts are made of, and how many tokens the server adds to them.

    ``words`` are the pieces as text (one token each with a blank before it), ``ids`` their token ids where those are sent.
    ``overhead`` is what the server adds: BOS, the chat template, and the tokens of LEAD in text. With the chat API a system
    message adds ``system``, and a question with its answer before the last question add ``pair``; None where the chat template
    takes no such message or where that was not asked.
    """

    source: str
    words: tuple[str, ...]
    ids: tuple[int, ...] = ()
    overhead: int = 0
    tokens_per_word: float = 1.0
    system: int | None = None
    pair: int | None = None

    @property
    def exact(self) -> bool:
        """Whether planned and real lengths agree to the token."""
        return self.source != ESTIMATED


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: ``json`` is the value in a request's body, ``planned_tokens`` what the server will count, None where nobody counted.

    ``messages`` holds the role of each message and the pieces that it is made of, as numbers; one without a role where the API
    knows none. ``say`` turns the pieces of a message into text. ``output_tokens`` is set where the prompt itself asks for so many.
    """

    json: bytes
    planned_tokens: int | None
    source: str
    messages: tuple[tuple[str, tuple[bytes, ...]], ...]
    say: Callable[[tuple[bytes, ...]], str]
    output_tokens: int | None = None

    @property
    def text(self) -> str:
        """The prompt as text, messages one after the other; for token ids the words that they stand for."""
        return "\n".join(self.say(pieces) for _, pieces in self.messages)


class PromptSource:
    """Makes prompts. The same nonce and parts give the same prompt; any other nonce differs from the first tokens on."""

    def __init__(self, vocabulary: Vocabulary, nonce: str, *, chat: bool = False) -> None:
        if not vocabulary.words:
            raise ValueError("a vocabulary needs words")
        self.vocabulary = vocabulary
        self.nonce = nonce
        self.chat = chat
        pieces: list[bytes]
        if vocabulary.source == IDS:
            pieces = [str(token).encode() for token in vocabulary.ids]
            self._join, self._open, self._close = b",", b"[", b"]"
        else:
            pieces = [msgspec.json.encode(" " + word)[1:-1] for word in vocabulary.words]
            self._join, self._open, self._close = b"", b'"' + LEAD.encode(), b'"'
        self._table = tuple(pieces[index % len(pieces)] for index in range(256))
        self._words = tuple(vocabulary.words[index % len(vocabulary.words)] for index in range(256))

    def make(self, tokens: int, *parts: object, before: Sequence[Part] = (), number: int = 0) -> Prompt:
        """Return a prompt that the server counts as ``tokens``; never fewer than one token more than it adds itself.

        ``before`` are pieces that others share, in order; what is left of ``tokens`` after them is this prompt's own. With
        ``tokens`` 0 there is nothing of its own: the last piece is the last message. ``number`` is that of the request.
        """
        vocabulary = self.vocabulary
        if before:
            return self._composed(tokens, parts, before)
        count = max(1, round((tokens - vocabulary.overhead) / vocabulary.tokens_per_word))
        pieces = (self._indexes(count, parts),)
        planned = vocabulary.overhead + round(count * vocabulary.tokens_per_word)
        if self.chat:
            return Prompt(b'[{"role":"user","content":' + self._value(pieces) + b"}]", planned, vocabulary.source, ((USER, pieces),), self.say)
        return Prompt(self._value(pieces), planned, vocabulary.source, (("", pieces),), self.say)

    @property
    def front(self) -> int:
        """How many tokens the server puts before the first of a prompt's own, as far as is known: with the chat API that is not."""
        return 0 if self.chat else self.vocabulary.overhead

    def whole(self, before: Sequence[Part]) -> int:
        """Return how many tokens the server will count for a prompt of these pieces alone."""
        rate = self.vocabulary.tokens_per_word
        words = sum(max(1, round(part.tokens / rate)) for part in before)
        return self.vocabulary.overhead + (self._added(before) if self.chat else 0) + round(words * rate)

    def _composed(self, tokens: int, parts: tuple[object, ...], before: Sequence[Part]) -> Prompt:
        vocabulary, rate = self.vocabulary, self.vocabulary.tokens_per_word
        pieces = [(part.role, self._indexes(max(1, round(part.tokens / rate)), ("part", part.key))) for part in before]
        added = vocabulary.overhead + (self._added(before) if self.chat else 0)
        words = sum(len(indexes) for _, indexes in pieces)
        if tokens:
            own = max(1, round((tokens - added) / rate) - words)
            pieces.append((USER, self._indexes(own, parts)))
            words += own
        planned = added + round(words * rate)
        if not self.chat:
            whole = tuple(indexes for _, indexes in pieces)
            return Prompt(self._value(whole), planned, vocabulary.source, (("", whole),), self.say)
        messages: list[tuple[str, tuple[bytes, ...]]] = []
        carried: tuple[bytes, ...] = ()
        for role, indexes in pieces:
            if role == SYSTEM and vocabulary.system is None:
                carried = (*carried, indexes)
            elif messages and messages[-1][0] == role:
                messages[-1] = (role, (*messages[-1][1], indexes))
            else:
                messages.append((role, (*carried, indexes)))
                carried = ()
        said = (b'{"role":"' + role.encode() + b'","content":' + self._value(whole) + b"}" for role, whole in messages)
        return Prompt(b"[" + b",".join(said) + b"]", planned, vocabulary.source, tuple(messages), self.say)

    def _added(self, before: Sequence[Part]) -> int:
        """Return what the chat template adds for the messages before the last."""
        roles = [part.role for part in before]
        return (self.vocabulary.system or 0) * roles.count(SYSTEM) + (self.vocabulary.pair or 0) * roles.count(ASSISTANT)

    def _indexes(self, count: int, parts: tuple[object, ...]) -> bytes:
        if count > MOST_WORDS:
            raise UsageError(
                f"a prompt of {count:,} words is longer than any server takes",
                hint="name the longest context with --kv-max-model-len, or a shorter length",
            )
        key = "/".join((self.nonce, *map(str, parts)))
        return hashlib.shake_128(key.encode()).digest(count)

    def _value(self, pieces: tuple[bytes, ...]) -> bytes:
        """Return the JSON of a message of these pieces."""
        indexes = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return self._open + self._join.join(map(self._table.__getitem__, indexes)) + self._close

    def say(self, pieces: tuple[bytes, ...]) -> str:
        """Return the text of a message of these pieces."""
        words, lead = self._words, "" if self.vocabulary.source == IDS else LEAD
        return lead + "".join(f" {words[index]}" for indexes in pieces for index in indexes)
