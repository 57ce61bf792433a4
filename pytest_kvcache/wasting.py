"""``pytest-kvcache waste FILE|RUN``: what padding, buckets and pages would waste on these requests. Reads files only, and asks no server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_kvcache.analysis.waste import Lengths, WasteRow

MOST_SIZES = 64
MOST_BEST = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "source",
        metavar="FILE|RUN",
        help="requests or lengths: requests.jsonl, a trace (Mooncake, timed_trace, BurstGPT, Azure), conversations, CSV or JSON Lines with token counts, a histogram "
        "(CSV, JSON, TOML); or a Run, a session, or a saved baseline",
    )
    add("--reserve", default="", metavar="TOKENS,..", help="fixed lengths that each request would be given, as a server's max length")
    add("--buckets", default="", metavar="TOKENS,..", help="limits of buckets [default: 256,512,1024,2048,4096 and on, as far as the lengths reach]")
    add("--best", type=int, default=5, metavar="K", help="find the best 2 to K buckets for these lengths; 0 leaves that out [default: 5]")
    add("--block-size", default="", metavar="TOKENS,..", help="sizes of the blocks of a paged engine [default: 8,16,32,64,128,256]")
    add("--batch", type=int, default=0, metavar="N", help="pad batches of N requests, in the order of the file, to the longest of each")
    add("--json", action="store_true", help="print JSON")


def run_waste(arguments: argparse.Namespace) -> int:
    """Print the table and return 0. Raises KvError: UsageError (2) for what cannot be meant, CannotJudge (3) where nothing can be read."""
    from pytest_kvcache.analysis.waste import BLOCK_SIZES, waste
    from pytest_kvcache.errors import UsageError

    if not 0 <= arguments.best <= MOST_BEST:
        raise UsageError(f"--best {arguments.best}: from 0 to {MOST_BEST} buckets are meant")
    if arguments.batch < 0:
        raise UsageError(f"--batch {arguments.batch}: a number of requests from 2 on is meant", hint="0 leaves it out")
    reserve, buckets, sizes = (_sizes(getattr(arguments, name), f"--{name.replace('_', '-')}") for name in ("reserve", "buckets", "block_size"))
    known, limit = _read(arguments)
    if limit and not reserve:
        reserve = (limit,)
    if arguments.batch > 1 and not len(known.in_order):
        raise UsageError("--batch needs requests in the order in which they came, and this says how often each length occurs", where=known.source)
    best = tuple(range(2, arguments.best + 1))
    rows = waste(known, reserve=reserve, buckets=buckets or None, best=best, block_sizes=sizes or BLOCK_SIZES, batch=arguments.batch)
    print(json.dumps(as_json(known, rows), indent=1, ensure_ascii=True) if arguments.json else "\n".join(as_lines(known, rows)))
    return 0


def _sizes(text: str, option: str) -> tuple[int, ...]:
    """Return the numbers of ``256,512``. Raises UsageError."""
    from pytest_kvcache.analysis.waste import LONGEST
    from pytest_kvcache.errors import UsageError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) > MOST_SIZES:
        raise UsageError(f"{option}: {len(words)} sizes", hint=f"at most {MOST_SIZES}")
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) < 11 and 0 < int(word) <= LONGEST):
            raise UsageError(f"{option}: {word[:40]!r} is no number of tokens", hint=f"whole numbers with commas between, as {option} 256,512,1024")
    return tuple(int(word) for word in words)


def _read(arguments: argparse.Namespace) -> tuple[Lengths, int]:
    """Return the distribution that the source tells, and the longest length that a Run's server took (0 where it is not told)."""
    from pytest_kvcache.analysis.length_files import read_lengths
    from pytest_kvcache.judge.baseline import load_baseline
    from pytest_kvcache.options import settings_from

    name = arguments.source
    path = Path(name).expanduser()
    if path.is_file() and path.name != "run.json":
        return read_lengths(path), 0
    return _of_runs(load_baseline(name, Path(settings_from(arguments).reports), "file, Run, session or saved baseline"), name)


def _of_runs(runs: Sequence[Any], name: str) -> tuple[Lengths, int]:
    """Return the lengths that the requests of stored Runs reached, together. Raises CannotJudge where no request held anything."""
    from pytest_kvcache.analysis.payload import REFUSED
    from pytest_kvcache.analysis.rows import read_rows
    from pytest_kvcache.analysis.waste import lengths_of_rows, together
    from pytest_kvcache.errors import CannotJudge
    from pytest_kvcache.quantities import Reading

    parts = [found for run in runs if (found := lengths_of_rows(read_rows(run.load_lines())[0], REFUSED)).requests]
    if not parts:
        raise CannotJudge("no request of it held a token", where=name, hint="name the Run of a load, not one of quality items alone")
    told = [run.record.config["max_model_len"].to_value() for run in runs if "max_model_len" in run.record.config]
    limit = max((int(value.number()) for value in told if isinstance(value, Reading)), default=0)
    return together(parts, name), limit


def as_lines(known: Lengths, rows: Sequence[WasteRow], width: int = 100) -> list[str]:
    """Return the table as lines of text, none of them wider than ``width``."""
    import textwrap

    from tabulate import tabulate

    from pytest_kvcache.engines import clean
    from pytest_kvcache.quantities import Missing

    many = f"{known.requests:,} request{'s' if known.requests != 1 else ''}"
    lines = [*textwrap.wrap(f"{clean(known.source, 200)}: {many}, {known.mean:,.0f} tokens on average, the longest {known.longest:,}", width), ""]
    heads = ["each request is", "given", "payload", "reserved, tokens", "of them empty"]
    cells = []
    for row in rows:
        if isinstance(row.share, Missing):
            figures = ["—", "—", "—"]
        else:
            figures = [f"{row.share.number() * 100:.1f} %", f"{row.reserved:,}", f"{row.reserved - row.payload:,}"]
        detail = f"{row.detail}: {row.share.reason}" if isinstance(row.share, Missing) else row.detail
        cells.append(["pages" if row.scheme == "paged" else row.scheme, clean(detail, 200), *figures])
    # tabulate puts two spaces between columns and makes each two wider than its head
    others = sum(max(len(heads[at]) + 2, *(len(row[at]) for row in cells)) + 2 for at in (0, 2, 3, 4)) if cells else 0
    table = tabulate(
        cells,
        headers=heads,
        disable_numparse=True,
        colalign=["left", "left", "right", "right", "right"],
        maxcolwidths=[None, max(width - others, 24), None, None, None],
    )
    lines += [*str(table).splitlines(), "", "Lengths are those at the end of each request, prompt and output; shared prefixes are not counted."]
    return lines + [line for note in known.notes for line in textwrap.wrap(clean(note[0].upper() + note[1:] + ".", 300), width)]


def as_json(known: Lengths, rows: Sequence[WasteRow]) -> dict[str, Any]:
    """Return the same for programs; a way of reserving into which some request does not fit has no share, and says why."""
    from pytest_kvcache.quantities import Missing

    return {
        "source": known.source,
        "requests": known.requests,
        "payload_tokens": known.payload,
        "mean_tokens": known.mean,
        "longest_tokens": known.longest,
        "notes": list(known.notes),
        "ways": [
            {
                "scheme": row.scheme,
                "detail": row.detail,
                "reserved_tokens": row.reserved,
                **({"missing": row.share.reason} if isinstance(row.share, Missing) else {"payload_share": row.share.number()}),
                **({"buckets": list(row.buckets)} if row.buckets else {}),
                **({"block_size": row.block_size} if row.block_size else {}),
            }
            for row in rows
        ],
    }
