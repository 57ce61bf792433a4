"""What is learnt from the live server before the load: its model and limit, a vocabulary, and which fields it takes.

Nothing here knows the HTTP client: ``ask`` sends one request and returns its answer. The requests spent are counted, because
the server counts them too.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec

from pytest_kvcache.errors import EndpointRefused, EndpointUnreachable, KvError, UsageError
from pytest_kvcache.load import contract
from pytest_kvcache.load.asking import Ask, choose_model
from pytest_kvcache.load.counting import tokenize
from pytest_kvcache.load.plans import ASSISTANT, SYSTEM, USER, Part
from pytest_kvcache.load.prompts import CALIBRATED, ESTIMATED, IDS, LEAD, TOKENIZE, WORDS, Prompt, PromptSource, Vocabulary, made_up_words
from pytest_kvcache.load.rejections import classify
from pytest_kvcache.load.sse import Stream
from pytest_kvcache.load.target import Target

ENOUGH_PIECES = 256
FEWEST_PIECES = 8
_WORD_PIECE = re.compile(r"[\u0120\u2581 ]([a-z]{2,12})\Z")
_ANSWERED = frozenset({contract.OK, contract.STOPPED_EARLY, contract.CLAMPED})
_BUSY = frozenset({contract.QUEUE_FULL, contract.RATE_LIMITED, contract.SERVER_ERROR, contract.TIMEOUT})


@dataclass
class Prepared:
    """What the load needs to know of a server. ``spent`` counts what the probes cost it: requests, prompt_tokens, output_tokens.

    ``differs`` says in what recorded traffic is sent otherwise than it was (cut, left out, without images).
    """

    target: Target
    max_model_len: int | None
    vocabulary: Vocabulary
    ignore_eos: bool = True
    usage: bool = True
    expects_usage: bool = True
    spent: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Probe:
    outcome: str
    status: int
    error: str
    prompt_tokens: int | None


def prepare(
    ask: Ask,
    target: Target,
    *,
    max_model_len: int | None = None,
    source: str = "auto",
    nonce: str = "",
    messages: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Prepared:
    """Return what the load needs to know of ``target``, checked by a streamed request of two tokens.

    ``source`` forces one way of making prompts (SOURCES of prompts.py) instead of the best that works; ``messages`` asks what
    system messages and earlier turns of a chat add. Raises UsageError for a model that is not served, EndpointRefused where the
    server says no, EndpointUnreachable where nobody answers.
    """
    model, served_len = choose_model(ask, target)
    target = msgspec.structs.replace(target, model=model)
    learner = _Learner(ask, target, max_model_len or served_len, nonce, sleep)
    vocabulary = learner.learn(source)
    if messages and target.api == "chat":
        vocabulary = learner.with_messages(vocabulary)
    return Prepared(target, learner.max_model_len, vocabulary, learner.ignore_eos, learner.usage, learner.expects_usage, learner.spent, learner.notes)


class _Learner:
    def __init__(self, ask: Ask, target: Target, max_model_len: int | None, nonce: str, sleep: Callable[[float], None]) -> None:
        self.ask = ask
        self.target = target
        self.max_model_len = max_model_len
        self.nonce = nonce
        self.sleep = sleep
        self.ignore_eos = True
        self.usage = True
        self.expects_usage = True
        self.settled = False
        self.unanswered = False
        self.spent: dict[str, float] = {"requests": 0, "prompt_tokens": 0, "output_tokens": 0}
        self.notes: list[str] = []

    def learn(self, source: str) -> Vocabulary:
        words, ids = self._pieces()
        if source in ("auto", IDS) and self.target.api == "completions" and len(ids) >= FEWEST_PIECES:
            found = self._measured(Vocabulary(IDS, words, ids))
            if found is not None:
                return found
        single = tuple(word for word in words if not word.startswith("token "))
        if source in ("auto", TOKENIZE) and len(single) >= FEWEST_PIECES:
            found = self._measured(Vocabulary(TOKENIZE, single))
            if found is not None:
                return found
        if source in ("auto", CALIBRATED, TOKENIZE):
            found = self._calibrated()
            if found is not None:
                return found
        if source not in ("auto", ESTIMATED):
            raise UsageError(f"this server gives no way to make prompts by {source}", where=self.target.root, hint="leave --kv-lengths at auto")
        return self._estimated()

    # pieces by /tokenize

    def _pieces(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return words that are one token each with their ids, by /tokenize; with other ids of the vocabulary where they are few."""
        singles: dict[int, str] = {}
        others: dict[int, str] = {}
        batch = max(8, min(100, (self.max_model_len or 800) // 8))
        candidates = list(dict.fromkeys((*WORDS, *made_up_words(1200))))
        for start in range(0, len(candidates), batch):
            text = "".join(" " + word for word in candidates[start : start + batch])
            found = tokenize(self.ask, self.target.model, text, pieces=True)
            if found is None:
                break
            for number, piece in zip_longest(*found):
                word = _WORD_PIECE.match(piece or "")
                if word:
                    singles.setdefault(number, word[1])
                else:
                    others.setdefault(number, f"token {number}")
            if len(singles) >= ENOUGH_PIECES:
                break
        chosen = singles if len(singles) >= 64 else singles | others
        pairs = list(chosen.items())[:ENOUGH_PIECES]
        return tuple(word for _, word in pairs), tuple(number for number, _ in pairs)

    def _measured(self, vocabulary: Vocabulary) -> Vocabulary | None:
        """Return the vocabulary with what the server adds to it; None where two probes do not agree to the token."""
        overheads: list[int] = []
        for count in (19, 47):
            if self.max_model_len is not None and count + 8 > self.max_model_len and overheads:
                break
            probe = self._probe(self._source(vocabulary).make(count, "probe", count))
            if vocabulary.source == IDS and (self.unanswered or (probe.outcome in _ANSWERED and probe.prompt_tokens is None)):
                if not self.unanswered:
                    self.notes.append("the server counts no tokens: lengths are not verified")
                return vocabulary
            if probe.outcome == contract.BAD_REQUEST or (probe.prompt_tokens is None and vocabulary.source != TOKENIZE):
                return None
            if probe.prompt_tokens is None:
                added = self._added_by_tokenize()
                return None if added is None else Vocabulary(vocabulary.source, vocabulary.words, vocabulary.ids, added)
            overheads.append(probe.prompt_tokens - count)
        if len(set(overheads)) != 1 or overheads[0] < 0:
            return None
        return Vocabulary(vocabulary.source, vocabulary.words, vocabulary.ids, overheads[0])

    def _added_by_tokenize(self) -> int | None:
        """Return how many tokens the server's tokenizer adds to text, where no usage tells: BOS and LEAD."""
        if self.target.api != "completions":
            return None
        found = tokenize(self.ask, self.target.model, LEAD, special=True)
        return len(found[0]) if found is not None else None

    # words by usage

    def _cost(self, words: tuple[str, ...], count: int) -> int | None:
        probe = self._probe(self._source(Vocabulary(CALIBRATED, words)).make(count, "cost", len(words)))
        return probe.prompt_tokens

    def _exact_cost(self, words: tuple[str, ...]) -> int | None:
        """Return what the server counts for LEAD and each of the words once."""
        text: Any = LEAD + "".join(" " + word for word in words)
        if self.target.api == "chat":
            text = [{"role": USER, "content": text}]
        return self._probe(Prompt(msgspec.json.encode(text), 0, CALIBRATED, (), lambda _: "")).prompt_tokens

    def _calibrated(self) -> Vocabulary | None:
        """Return words that are found to be one token each: groups of words whose cost is their number, halved where it is not."""
        first, second = self._exact_cost(WORDS[:1]), self._exact_cost(WORDS[:2])
        if first is None or second is None or second - first != 1:
            return None
        overhead = first - 1
        good: list[str] = []
        groups = [WORDS[at : at + 16] for at in range(0, 64, 16)]
        for _ in range(24):
            if not groups or len(good) >= 48:
                break
            group = groups.pop()
            cost = self._exact_cost(group)
            if cost is None:
                return None
            if cost - overhead == len(group):
                good += group
            elif len(group) > 2:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        if len(good) < FEWEST_PIECES:
            return None
        return self._measured(Vocabulary(CALIBRATED, tuple(good)))

    def _estimated(self) -> Vocabulary:
        words = WORDS[:ENOUGH_PIECES]
        short, long = self._cost(words, 16), self._cost(words, 64)
        if short is None or long is None or long <= short:
            self.notes.append("the server counts no tokens: lengths are in words")
            return Vocabulary(ESTIMATED, words)
        rate = (long - short) / 48
        self.notes.append(f"lengths are estimated: {rate:.3f} tokens a word, by usage")
        return Vocabulary(ESTIMATED, words, (), max(0, round(short - 16 * rate)), rate)

    # messages of a chat

    def with_messages(self, vocabulary: Vocabulary) -> Vocabulary:
        """Return the vocabulary with what a system message and an earlier turn add, where two sizes of each agree."""
        bare = dataclasses.replace(vocabulary, system=0, pair=0)
        turn = (Part(5, "probe-question"), Part(7, "probe-answer", ASSISTANT))
        found: dict[str, int] = {}
        for name, small, large in (
            ("system", (Part(6, "probe-short", SYSTEM),), (Part(19, "probe-long", SYSTEM),)),
            ("pair", turn, turn * 3),
        ):
            adds = [self._adds(bare, before) for before in (small, large)]
            scale = len(large) // len(small)
            if adds[0] is not None and adds[1] == adds[0] * scale:
                found[name] = adds[0]
            elif name == "system":
                self.notes.append("the chat template takes no system message as it is: shared prompts go to the front of the first question")
            else:
                self.notes.append("what an earlier turn of a chat adds is not known: lengths of conversations are not exact")
        return dataclasses.replace(vocabulary, system=found.get("system"), pair=found.get("pair"))

    def _adds(self, vocabulary: Vocabulary, before: tuple[Part, ...]) -> int | None:
        prompt = self._source(vocabulary).make(vocabulary.overhead + 90, "probe", len(before), before[0].key, before=before)
        probe = self._once(prompt, self.ignore_eos, self.usage)
        return probe.prompt_tokens - (prompt.planned_tokens or 0) if probe.prompt_tokens is not None else None

    def _source(self, vocabulary: Vocabulary) -> PromptSource:
        return PromptSource(vocabulary, self.nonce, chat=self.target.api == "chat")

    # one request as the load will send it

    def _probe(self, prompt: Prompt) -> _Probe:
        """Send one request; the first that is answered settles which fields the server takes.

        A server that is busy or broken does not stop the load, which is there to count that; one that refuses us does: raises
        EndpointRefused.
        """
        if self.unanswered:
            return _Probe(contract.SERVER_ERROR, 0, "not asked", None)
        tries = [(self.ignore_eos, self.usage)] if self.settled else [(True, True), (False, True), (False, False)]
        probe = self._once(prompt, *tries[0])
        for ignore_eos, usage in tries[1:]:
            if probe.outcome != contract.BAD_REQUEST or probe.status not in {400, 422}:
                break
            again = self._once(prompt, ignore_eos, usage)
            if again.outcome != contract.BAD_REQUEST:
                probe = again
                self.ignore_eos, self.usage = ignore_eos, usage
                self.notes.append(f"the server refuses {'ignore_eos' if usage else 'ignore_eos and stream_options'}; they are left out")
                break
        if probe.outcome in _ANSWERED:
            self.settled = True
        elif probe.outcome in {contract.REFUSED_AUTH, contract.BAD_REQUEST, contract.OVER_LENGTH} or 300 <= probe.status < 400:
            if probe.status in {400, 422} and prompt.source == IDS:
                return probe
            hint = "look at the server's log; send one request by hand"
            if probe.outcome == contract.REFUSED_AUTH:
                hint = "set the key in an environment variable and name it with --kv-api-key-env"
            elif probe.status in {404, 405} or probe.status < 400:
                hint = "check the address (the part before /v1) and --kv-api completions|chat"
            what = f"a request of a few tokens is refused (HTTP {probe.status}, {probe.outcome}): {probe.error}"
            raise EndpointRefused(what, where=self.target.root + self.target.path.removeprefix(self.target.prefix), hint=hint)
        else:
            self.unanswered = True
            self.notes.append(f"lengths are not verified, for a request of a few tokens is not answered ({probe.outcome}): {probe.error}")
        return probe

    def _once(self, prompt: Prompt, ignore_eos: bool, usage: bool) -> _Probe:
        tokens = 2
        body = self.target.body_head(tokens, ignore_eos=ignore_eos, usage=usage) + prompt.json + self.target.body_tail
        for attempt in range(3):
            self.spent["requests"] += 1
            stream = Stream()
            try:
                answer = self.ask("POST", self.target.path.removeprefix(self.target.prefix), body)
            except EndpointUnreachable as broken:
                return _Probe(contract.RESET, 0, broken.what, None)
            if answer.status != 200:
                outcome, error, wait_s = classify(answer.status, answer.body, answer.headers)
            elif "event-stream" in answer.headers.get("content-type", "") or answer.body.lstrip()[:5] == b"data:":
                self._feed(stream, answer.body)
                outcome, error, wait_s = stream.outcome(tokens, False)
                if outcome in _ANSWERED:
                    self.expects_usage = stream.completion_tokens is not None
            elif stream.take_whole(answer.body):
                outcome, error, wait_s = stream.outcome(tokens, False)
            else:
                outcome, error, wait_s = classify(200, answer.body, answer.headers)
            self.spent["prompt_tokens"] += stream.prompt_tokens or 0
            self.spent["output_tokens"] += stream.completion_tokens or 0
            if outcome not in _BUSY or attempt == 2:
                break
            self.sleep(min(wait_s or 0.5, 3.0))
        return _Probe(outcome, answer.status, error, stream.prompt_tokens)

    def _feed(self, stream: Stream, body: bytes) -> None:
        try:
            stream.feed(body, 0.0)
        except ValueError as error:
            raise EndpointRefused(str(error), where=self.target.root) from None
        stream.finish(0.0)


def failure_text(error: KvError) -> str:
    """Return an error as one line for a note: what, where and what to try, parted by newlines."""
    return "\n".join((error.what, error.where, error.hint))
