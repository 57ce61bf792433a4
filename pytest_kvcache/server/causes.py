"""What the sentence of a failed start means, in numbers, and what to change. ``rootcause`` finds the sentence.

An engine's own advice is not always a diagnosis ("try increasing" where lowering is right), so what is said here is computed
from the figures of the sentence. Sentences: vLLM 0.4 to 0.32, SGLang, TGI, LMDeploy, TensorRT-LLM, llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from pytest_kvcache.server.rootcause import log_lines, root_cause, strip_prefix

_GIB = 1 << 30
_N = r"([0-9][0-9,]{0,17})"
_F = r"([0-9]{1,12}(?:\.[0-9]{1,18})?)"
# A line that only a server which is up prints. What fails after it is no failed start.
_UP = re.compile(
    r"Application startup complete|Uvicorn running on|server is listening|The server is fired up|Avg prompt throughput|Decode batch"
    r"|\bConnected$|HTTP Server started|Avg thr \(in/out\)|Started GRPCInferenceService"
)
_SAME_RATE = 0.02
_MOST_CHARS = 4 << 20


@dataclass(frozen=True)
class Diagnosis:
    """Why a start failed. ``cause`` is the engine's sentence, ``means`` what it says in numbers, ``change`` what to try ("" where not
    known). ``after_start`` says that the server had been up before.
    """

    cause: str
    means: str = ""
    change: str = ""
    after_start: bool = False

    @property
    def hint(self) -> str:
        """``means`` and ``change`` as one text; "" where the sentence is not one that is known."""
        return "; ".join(part for part in (self.means, self.change) if part)


Explain = Callable[[re.Match[str], str], tuple[str, str]]


def diagnose(text: str) -> Diagnosis | None:
    """Return why the server of this start-up log did not start; None where the log holds no failure. Never raises."""
    cause = root_cause(text)
    if not cause:
        return None
    means, change = explain(cause, text)
    lines = log_lines(text[-_MOST_CHARS:])
    failed = [number for number, line in enumerate(lines) if cause[:60] in " ".join(strip_prefix(line).split())]
    up = next((number for number, line in enumerate(lines) if _UP.search(line)), None)
    return Diagnosis(cause, means, change, after_start=up is not None and bool(failed) and failed[-1] > up)


def explain(cause: str, text: str = "") -> tuple[str, str]:
    """Return what a sentence means in numbers and what to change; ("", "") where it is not known. ``text`` is the log around it."""
    for pattern, tell in _KNOWN:
        match = pattern.search(cause)
        if match is not None:
            try:
                return tell(match, text)
            except (ValueError, OverflowError, ZeroDivisionError):
                return "", ""
    return "", ""


def _n(text: str) -> int:
    return int(text.replace(",", ""))


def _down(value: float, digits: int = 3) -> float:
    scale = float(10**digits)
    return math.floor(value * scale + 1e-9) / scale


def _free_short(match: re.Match[str], _: str) -> tuple[str, str]:
    free, total, share, wanted = (float(match.group(n)) for n in (1, 2, 3, 4))
    means = (
        f"{free:g} of {total:g} GiB were free and {share:g} of the card ({wanted:g} GiB) was wanted before the model loads: "
        f"{wanted - free:.2f} GiB short; {total - free:.2f} GiB are held by others"
    )
    return means, f"free that memory (nvidia-smi shows the processes), or set --gpu-memory-utilization to {_down(free / total):g} or lower"


def _pool_small(match: re.Match[str], _: str) -> tuple[str, str]:
    length, needed, there = _n(match.group(1)), float(match.group(2)), float(match.group(3))
    estimate = _n(match.group(4)) if match.group(4) else 0
    means = (
        f"one request of the max length {length:,} needs {needed:g} GiB of KV cache and the pool has {there:g} GiB: {needed - there:.2f} GiB short"
    )
    if not needed > there:
        means = f"one request of the max length {length:,} does not fit the pool (both figures are printed as {needed:g} GiB)"
    if not estimate:
        guess = int(length * there / needed) if needed else 0
        change = "raise the share of the card, use fewer sequences or an fp8 KV cache, or set --max-model-len"
        return means, change + (f" to about {guess:,} (in proportion: right for plain attention only)" if guess else " lower")
    means += f"; the longest request that fits is estimated at {estimate:,} tokens"
    if needed and 0 < estimate < length and needed > there:
        rate, proportional = (needed - there) * _GIB / (length - estimate), length * there / needed
        if abs(proportional - estimate) > max(64, _SAME_RATE * estimate):
            fixed = there - estimate * rate / _GIB
            means += (
                f" (two points of one line: {rate / 1000:,.1f} kB a token and {fixed:.2f} GiB for each request whatever its length;"
                f" a guess in proportion, {proportional:,.0f}, would be wrong)"
            )
        else:
            means += f" ({there * _GIB / estimate / 1024:,.1f} KiB a token)"
    return means, f"set --max-model-len to {estimate} or lower, or give the pool {max(needed - there, 0):.2f} GiB more"


def _pool_small_v0(match: re.Match[str], text: str) -> tuple[str, str]:
    length, tokens = _n(match.group(1)), _n(match.group(2))
    means = f"the max length is {length:,} tokens and the pool holds {tokens:,}: {length - tokens:,} short"
    stated = re.search(rf"(?:\bkv_cache_size={_F} ?GiB|reserved for KV Cache is {_F} ?GiB)", text[-(1 << 20) :])
    if stated is not None and tokens:
        there = float(stated.group(1) or stated.group(2))
        means += f" ({there * length / tokens:.2f} GiB needed, {there:g} GiB there)"
    return means, f"set --max-model-len to {tokens} or lower, or raise --gpu-memory-utilization"


def _nothing_left(_: re.Match[str], text: str) -> tuple[str, str]:
    means = "weights, the peak of the profile run and other memory already fill the share of the card: nothing is left for the KV cache"
    tail = text[-(1 << 20) :]
    parts = re.search(rf"model weights take {_F} ?GiB; non_torch_memory takes {_F} ?GiB; PyTorch activation peak memory takes {_F} ?GiB", tail)
    budget = re.search(rf"total_gpu_memory \({_F} ?GiB\) x gpu_memory_utilization \({_F}\) = {_F} ?GiB", tail)
    if parts is not None and budget is not None:
        held = [float(part) for part in parts.groups()]
        means += (
            f" (weights {held[0]:g} + activation peak {held[2]:g} + other {held[1]:g} = {sum(held):.2f} GiB"
            f" of {float(budget.group(3)):g} GiB = {float(budget.group(2)):g} x {float(budget.group(1)):g} GiB)"
        )
        least = sum(held) / float(budget.group(1))
        return means, f"set --gpu-memory-utilization above {least:.2f}, use a smaller or quantised model, or lower --max-num-batched-tokens"
    loaded = re.search(rf"(?:model weights took|Model loading took) {_F} ?(?:GiB|GB)", tail, re.IGNORECASE)
    if loaded is not None:
        means += f" (the weights alone took {float(loaded.group(1)):g} GiB)"
    return means, (
        "look at the memory line of the profile run: if weights are the most, raise --gpu-memory-utilization or use a smaller model; if the activation"
        " peak is, lower --max-num-batched-tokens; if neither, another process holds the card"
    )


def _profiling(match: re.Match[str], _: str) -> tuple[str, str]:
    before, after = float(match.group(1)), float(match.group(2))
    means = (
        f"while vLLM measured, another process gave {after - before:.2f} GiB back ({before:g} to {after:g} GiB free): a size taken now would be wrong"
    )
    return means, "start one server on a card at a time, and start again"


def _cpu_node(match: re.Match[str], _: str) -> tuple[str, str]:
    free, total, wanted = (float(match.group(n)) for n in (1, 2, 3))
    means = f"{free:g} of {total:g} GiB are free on the memory node and {wanted:g} GiB of KV cache were wanted: {wanted - free:.2f} GiB short"
    return means, f"set VLLM_CPU_KVCACHE_SPACE (GiB) or --kv-cache-memory-bytes to less than {free:g} GiB, or end what else holds memory there"


def _no_token(_: re.Match[str], __: str) -> tuple[str, str]:
    return "the memory that is left does not hold a single token", "raise --gpu-memory-utilization, or use a smaller or quantised model"


def _host_pool(match: re.Match[str], _: str) -> tuple[str, str]:
    return f"the host pool has {match.group(1)} blocks and the max length needs {match.group(2)}", "raise host_pool_gib, or lower --max-model-len"


def _block_size(match: re.Match[str], _: str) -> tuple[str, str]:
    size, backends = _n(match.group(1)), match.group(2)
    bases = [int(number) for number in re.findall(r"MultipleOf\(([0-9]{1,6})\)", backends)[:8]]
    change = f"set --block-size to a multiple of {math.lcm(*bases)}" if bases else "leave --block-size out"
    return f"block size {size} is none that the attention backend can use: {backends[:160]}", change


def _too_long(match: re.Match[str], _: str) -> tuple[str, str]:
    asked, found = _n(match.group(1)), _n(match.group(2))
    return f"{asked:,} tokens were asked for and the model's own limit is {found:,}", f"set --max-model-len to {found} or lower"


def _mem_fraction(match: re.Match[str], text: str) -> tuple[str, str]:
    tail = text[-(1 << 20) :]
    stated = re.search(rf"mem[-_]fraction[-_]static[= ]{_F}", match.group(0) + " " + match.string[match.end() :][:200]) or re.search(
        rf"mem[-_]fraction[-_]static[= ]{_F}", tail
    )
    at = f" {float(stated.group(1)):g}" if stated else ""
    least = re.search(r"(?:minimum|at least|min)[^0-9\n]{0,40}(0\.[0-9]{2,6})", match.string)
    means = f"the weights alone exceed the share of the card that --mem-fraction-static{at} allows: nothing is left for the KV cache"
    weights = re.search(rf"Load weight end\.[^\n]{{0,300}}?mem usage={_F} ?GB", tail)
    if weights is not None:
        means += f" (the weights took {float(weights.group(1)):g} GiB)"
    if re.search(r"CUDA out of memory|CUDA error: out of memory", tail):
        return means + "; and the same log shows CUDA out of memory", (
            "no fraction may do: use fewer or quantised weights, a shorter --context-length, or a smaller --cuda-graph-max-bs"
        )
    above = f"to at least {least.group(1)}" if least else "above weights / card memory"
    return means, f"raise --mem-fraction-static {above}; it is the opposite of what helps against out of memory at run time"


def _out_of_memory(match: re.Match[str], text: str) -> tuple[str, str]:
    rest = match.string[match.start() :]
    asked = re.search(rf"Tried to allocate {_F} ([MG]iB)|allocating {_F} ([MG]iB)", match.string)
    total = re.search(rf"total capacity of {_F} GiB(?: of which {_F} ([MG]iB) is free)?", rest)
    parts = []
    if asked is not None:
        parts.append(f"{asked.group(1) or asked.group(3)} {asked.group(2) or asked.group(4)} were asked for")
    if total is not None:
        free = f", {total.group(2)} {total.group(3)} of it free" if total.group(2) else ""
        parts.append(f"the card has {total.group(1)} GiB{free}")
    others = re.findall(rf"Process ([0-9]{{1,10}}) has {_F} ([MG]iB) memory in use", rest)
    if len(others) > 1:
        parts.append("processes on it: " + ", ".join(f"{pid}: {size} {unit}" for pid, size, unit in others[:6]))
    means = "the card is full: " + ("; ".join(parts) if parts else "the log gives no figures")
    if re.search(r"mem[-_]fraction[-_]static|\bsglang\b", text[-(1 << 20) :]):
        return means, "lower --mem-fraction-static (what it leaves free serves activations and graphs), or --cuda-graph-max-bs"
    if re.search(r"llama_|ggml_", text[-(1 << 20) :]):
        return means, "use a smaller context (-c), fewer layers on the card (-ngl), or a quantised KV cache (-ctk q8_0 -ctv q8_0)"
    if re.search(r"TensorRT-LLM|TRT-LLM", text[-(1 << 20) :]):
        return means, "lower kv_cache_config.free_gpu_memory_fraction, max_batch_size or max_num_tokens"
    return means, "lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens; end other processes on the card"


def _port(match: re.Match[str], _: str) -> tuple[str, str]:
    where = re.search(r"\('?([^',()]{0,60})'?, ([0-9]{1,5})\)|port:? ?([0-9]{1,5})|:([0-9]{2,5})\b", match.string)
    port = next((group for group in where.groups()[1:] if group), "") if where else ""
    return (
        f"port {port} is taken by another process" if port else "the port is taken by another process",
        "end that process, or choose another --port",
    )


def _tgi_total(match: re.Match[str], _: str) -> tuple[str, str]:
    return (
        f"one request of {_n(match.group(1)):,} tokens (--max-total-tokens) does not fit the memory that is left",
        "lower --max-total-tokens, or quantise",
    )


def _tgi_prefill(match: re.Match[str], _: str) -> tuple[str, str]:
    return f"a prefill batch of {_n(match.group(1)):,} tokens does not fit", f"lower --max-batch-prefill-tokens below {match.group(1)}"


def _tgi_batch(_: re.Match[str], __: str) -> tuple[str, str]:
    return (
        "the pool is smaller than one request of the max length",
        "lower --max-total-tokens to the pool's tokens, or raise --max-batch-total-tokens",
    )


def _lmdeploy(match: re.Match[str], _: str) -> tuple[str, str]:
    what = match.group(1)
    change = "use a smaller or quantised model, or free the card; --cache-max-entry-count is a share of what the weights leave free"
    if what == "runtime":
        change = "lower --cache-max-entry-count or --max-prefill-token-num: the pool leaves too little for running"
    if what == "state cache":
        change = "lower --max-batch-size: each request holds a state of fixed size"
    return f"the memory that the weights leave does not hold the {what}", change


def _trt_tokens(_: re.Match[str], __: str) -> tuple[str, str]:
    return (
        "the pool does not hold one sequence of the max length",
        "lower max_seq_len (or the max input and output), or raise the memory fraction of the KV cache",
    )


def _llama_kv(_: re.Match[str], text: str) -> tuple[str, str]:
    asked = re.search(rf"allocating {_F} MiB", text[-(1 << 20) :])
    size = f" of {asked.group(1)} MiB" if asked else ""
    return (
        f"the buffer{size} for the KV cache could not be had",
        "use a smaller context (-c), fewer slots (-np), or a quantised KV cache (-ctk q8_0 -ctv q8_0)",
    )


def _llama_flash(_: re.Match[str], __: str) -> tuple[str, str]:
    return "a quantised V cache works with flash attention only", "add -fa on, or leave -ctv at f16"


def _known(pattern: str, tell: Explain) -> tuple[re.Pattern[str], Explain]:
    return re.compile(pattern, re.IGNORECASE), tell


_KNOWN: tuple[tuple[re.Pattern[str], Explain], ...] = (
    _known(
        rf"Free memory on device[^(]{{0,40}}\({_F}/{_F} ?GiB\) on startup is less than desired GPU memory utilization \({_F}, {_F} ?GiB\)",
        _free_short,
    ),
    _known(
        rf"max seq len \({_N}\), \({_F} GiB KV cache is needed, which is larger than the available KV cache memory \({_F} GiB\)"
        rf"(?:[^\n]{{0,60}}?estimated maximum model length is {_N})?",
        _pool_small,
    ),
    _known(rf"max seq len \({_N}\) is larger than the maximum number of tokens that can be stored in KV cache \({_N}\)", _pool_small_v0),
    _known(r"No available memory for the cache blocks", _nothing_left),
    _known(rf"Error in memory profiling\. Initial free memory {_F} GiB, current free memory {_F} GiB", _profiling),
    _known(rf"Available memory on node [0-9]+ \({_F}/{_F} GiB\)[^\n]{{0,60}}? is less than requested memory for kv \({_F} GiB\)", _cpu_node),
    _known(r"Cannot auto-fit max_model_len", _no_token),
    _known(rf"HiSparse host pool has {_N} blocks but max_model_len needs {_N}", _host_pool),
    _known(rf"No common block size for {_N} \(([^\n]{{1,300}}?)\)\.?\s*$", _block_size),
    _known(rf"User-specified max_model_len \(?{_N}\)? is greater than the derived max_model_len \([^\n]{{0,80}}?={_N}", _too_long),
    _known(r"Not enough memory\. Please try to increase --mem-fraction-static|Loaded weights leave no GPU memory for the KV cache", _mem_fraction),
    _known(rf"Not enough memory to handle `max_total_tokens={_N}`", _tgi_total),
    _known(rf"Not enough memory to handle {_N} prefill tokens", _tgi_prefill),
    _known(r"`max_total_tokens` must be <= `max_batch_total_tokens`", _tgi_batch),
    _known(r"No enough gpu memory for (kv cache|runtime|state cache)", _lmdeploy),
    _known(r"maxTokensInPagedKvCache must be large enough", _trt_tokens),
    _known(r"failed to allocate buffer for kv cache", _llama_kv),
    _known(r"V cache quantization requires flash.?attn", _llama_flash),
    _known(r"(?:CUDA|HIP|XPU) out of memory|cudaMalloc failed: out of memory|out of memory\. Tried to allocate", _out_of_memory),
    _known(r"address (?:is )?already in use|couldn't bind (?:HTTP )?server socket", _port),
)
