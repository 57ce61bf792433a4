"""The user class that replays a trace; a profile of one's own may subclass it. Importing it imports locust."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from pytest_kvcache.errors import UsageError
from pytest_kvcache.load import files
from pytest_kvcache.load.contract import ProfileOption
from pytest_kvcache.load.opening import text_counter
from pytest_kvcache.load.plans import ASSISTANT
from pytest_kvcache.load.session import LoadSession
from pytest_kvcache.load.traces import FORMATS, Recorded, Trace, common_blocks, read_trace
from pytest_kvcache.load.users import Draw, KvUser, Part, Plan

OPTIONS = (
    ProfileOption("trace", "", "file of recorded requests", file=True),
    ProfileOption("trace_format", "auto", f"its format: auto, {', '.join(FORMATS)}"),
    ProfileOption("trace_speed", 1.0, "how many times as fast it is replayed"),
    ProfileOption("trace_from_s", 0.0, "where the window that is replayed begins, in seconds of the trace"),
    ProfileOption("trace_for_s", 0.0, "how long the window is, in seconds of the trace; 0 takes all that is left"),
    ProfileOption("trace_cap", 0, "longest prompt and answer together in tokens; 0 takes the server's; longer ones are cut, and that is reported"),
    ProfileOption("trace_unit", "auto", "unit of the times in JSONL: s, ms, or auto (ms for Mooncake)"),
    ProfileOption("trace_block", 0, "tokens that one hash id stands for; 0 finds out"),
)


class Replay(KvUser):
    """Sends the requests of a trace at their times, or with ``--kv-rate`` and without times in their order; prefixes are rebuilt."""

    abstract = True
    shares = True
    _trace: Trace | None = None
    _cap = 0
    _common: Mapping[int | str, int] = {}

    @classmethod
    def schedule(cls, session: LoadSession) -> Callable[[], Iterator[float]] | None:
        """Read the trace, report what is cut or left out, and return its times; None where it has none."""
        options = session.knobs.profile_options
        if not options["trace"]:
            raise UsageError("which trace?", hint="--kv-trace FILE")
        trace = read_trace(
            files.locate(session.handed, options["trace"]),
            form=options["trace_format"],
            speed=options["trace_speed"],
            from_s=options["trace_from_s"],
            for_s=options["trace_for_s"],
            unit=options["trace_unit"],
            block=options["trace_block"],
            count=text_counter(session),
        )
        cls._common = common_blocks(trace)
        cls._trace, cls._cap = trace, options["trace_cap"] or session.max_model_len or 0
        limit = session.max_model_len
        cls._cap = min(cls._cap, limit) if limit else cls._cap
        differs = [*trace.notes]
        cut = sum(cls._cut(one)[:2] != (one.prompt, one.output) for one in trace.requests)
        if cut:
            differs.append(f"{cut:,} of {len(trace.requests):,} requests of the trace are cut to {cls._cap:,} tokens for prompt and answer together")
        assert session.prepared is not None
        session.shares = trace.shares
        session.prepared.notes.append(f"trace: {len(trace.requests):,} requests ({', '.join(_taken(trace))})")
        session.prepared.differs.extend(differs)
        if not trace.timed:
            return None
        return lambda: (one.at_s or 0.0 for one in trace.requests)

    @classmethod
    def _cut(cls, one: Recorded) -> tuple[int, int]:
        """Return prompt and output tokens as they fit into the cap."""
        if not cls._cap or one.prompt + one.output <= cls._cap:
            return one.prompt, one.output
        output = min(one.output, max(1, cls._cap // 2))
        return max(1, min(one.prompt, cls._cap - output)), output

    def conversation(self, draw: Draw, limit: int | None) -> Iterator[Plan]:
        """Yield the request of a number, or the turns of its conversation, each with all that was said before."""
        trace = self._trace
        assert trace is not None
        one = trace.requests[draw.number % len(trace.requests)]
        if one.turns:
            yield from self._talk_of(one, draw)
            return
        prompt, output = self._cut(one)
        text = max(1, prompt - self.whole(()))
        if one.hash_ids:
            blocks = self._blocks(one, trace.block, text)
            rest = text - sum(part.tokens for part in blocks)
            root = one.hash_ids[0]
            shared = (f"block {root}", sum(part.tokens for part in blocks[: self._common[root]]))
            yield Plan(prompt if rest > 0 else 0, output, before=blocks, shared=shared)
        elif one.prefix is not None and min(one.prefix[1], text - 1) > 0:
            part = Part(min(one.prefix[1], text - 1), f"prefix {one.prefix[0]}")
            yield Plan(prompt, output, before=(part,), shared=(part.key, part.tokens))
        else:
            yield Plan(prompt, output)

    def _blocks(self, one: Recorded, block: int, text: int) -> tuple[Part, ...]:
        blocks = []
        for name in one.hash_ids:
            tokens = min(block, text)
            if tokens <= 0:
                break
            blocks.append(Part(tokens, f"block {name}"))
            text -= tokens
        return tuple(blocks)

    def _talk_of(self, one: Recorded, draw: Draw) -> Iterator[Plan]:
        said: tuple[Part, ...] = ()
        for turn, (question, answer) in enumerate(one.turns):
            said = (*said, Part(question, f"{self.lane} {draw.number} question {turn}"))
            if self._cap and self.whole(said) + answer > self._cap:
                if turn:
                    return
                prompt, answer = self._cut(Recorded(None, self.whole(said), answer))  # noqa: PLW2901
                yield Plan(prompt, answer)
                return
            yield Plan(0, answer, before=said, shared=(f"{self.lane} {draw.number}", sum(part.tokens for part in said)))
            said = (*said, Part(answer, f"{self.lane} {draw.number} answer {turn}", ASSISTANT))


def _taken(trace: Trace) -> Iterator[str]:
    """Yield as what the numbers of a trace were taken: a wrong unit of its times replays it a thousand times too slow or too fast."""
    yield trace.format
    if trace.timed and trace.unit:
        yield f"times in {trace.unit}"
    if trace.block:
        yield f"{trace.block} tokens a hash id"
    if trace.timed:
        yield f"over {trace.span_s:,.1f} s"
