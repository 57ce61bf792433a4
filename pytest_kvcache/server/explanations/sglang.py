"""What SGLang says when it does not start. Sentences of releases 0.3 to 0.5."""

from __future__ import annotations

import re

from pytest_kvcache.server.explanations.phrases import F, Known, N, fixed, known, near, whole


def _mem_fraction(match: re.Match[str], text: str) -> tuple[str, str]:
    tail = near(text)
    stated = re.search(rf"mem[-_]fraction[-_]static[= ]{F}", match.group(0) + " " + match.string[match.end() :][:200]) or re.search(
        rf"mem[-_]fraction[-_]static[= ]{F}", tail
    )
    at = f" {float(stated.group(1)):g}" if stated else ""
    least = re.search(r"minimum viable[^\n]{0,60}?= (0\.[0-9]{2,6})|(?:minimum|at least|min)[^0-9\n]{0,40}(0\.[0-9]{2,6})", match.string)
    means = f"the weights alone exceed the share of the card that --mem-fraction-static{at} allows: nothing is left for the KV cache"
    weights = re.search(rf"Load weight end\.[^\n]{{0,300}}?mem usage={F} ?GB", tail)
    if weights is not None:
        means += f" (the weights took {float(weights.group(1)):g} GiB)"
    if re.search(r"CUDA out of memory|CUDA error: out of memory", tail):
        return means + "; and the same log shows CUDA out of memory", (
            "no fraction may do: use fewer or quantised weights, a shorter --context-length, or a smaller --cuda-graph-max-bs"
        )
    before = re.search(rf"Load weight end\.[^\n]{{0,300}}?avail mem={F} ?GB", tail)
    if weights is not None and before is not None and least is None:
        # What is left over the share that is kept free must be more than nothing.
        left, held = float(before.group(1)), float(weights.group(1))
        least_share = held / (left + held) if left + held else 1.0
        return means, f"raise --mem-fraction-static above {least_share:.3f} = {held:g} / ({left:g} + {held:g}) GiB, and by the pool that is wanted"
    above = f"to at least {least.group(1) or least.group(2)}" if least else "above weights / card memory"
    return means, f"raise --mem-fraction-static {above}; it is the opposite of what helps against out of memory at run time"


def _unbalanced(match: re.Match[str], _: str) -> tuple[str, str]:
    figures = re.search(rf"(?:pre_model_load_memory|min_per_gpu_memory|min_available_device_memory)={F}, local_\w{{1,10}}_memory={F}", match.string)
    means = "the cards of one group do not have the same memory free"
    if figures is not None:
        least, here = float(figures.group(1)), float(figures.group(2))
        means += f": one has {least:.2f} GiB and another {here:.2f} GiB; {here - least:.2f} GiB are held by others on it, or it is a smaller card"
    return means, "end what else runs on that card (a server that was not fully stopped, perhaps), or choose equal cards"


def _context(match: re.Match[str], _: str) -> tuple[str, str]:
    asked, found = whole(match.group(1)), whole(match.group(2))
    return f"{asked:,} tokens were asked for and the model's own limit is {found:,}", f"set --context-length to {found} or lower"


def _graph(match: re.Match[str], _: str) -> tuple[str, str]:
    change = "see the line for what is lacking; --disable-cuda-graph starts without, and slower"
    if re.search(r"ninja|nvcc|compil", match.group(1), re.IGNORECASE):
        change = "install the CUDA toolkit (nvcc) that the kernels are built with, or choose --attention-backend triton; --disable-cuda-graph starts without"
    elif re.search(r"num_max_dispatch_tokens|assert", match.group(1), re.IGNORECASE):
        change = "lower --cuda-graph-max-bs (16, say): the largest batch that is captured is more than the kernels bear"
    return "the graphs of the decode step could not be captured, and the line tells of no lack of memory", change


KNOWN: tuple[Known, ...] = (
    known(r"Not enough memory\. Please try to increase --mem-fraction-static|Loaded weights leave no GPU memory for the KV cache", _mem_fraction),
    known(r"The memory capacity is unbalanced", _unbalanced),
    known(r"Capture \w{2,6} graph failed: (?![^\n]{0,40}out of memory)([^\n]{0,200})", _graph),
    known(rf"User-specified context_length \({N}\) is greater than the derived context_length \({N}\)", _context),
    known(
        r"Not enough GPU memory for hybrid state cache|state cache is too small to serve any requests",
        fixed(
            "each request of a model with state layers holds a state of fixed size, and there is room for none",
            "lower --max-running-requests or set --max-mamba-cache-size, use a state of a smaller type, or raise --mem-fraction-static",
        ),
    ),
)
