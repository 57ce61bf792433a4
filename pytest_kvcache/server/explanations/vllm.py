"""What vLLM says when it does not start. Sentences of releases 0.4 to 0.32, V0 and V1."""

from __future__ import annotations

import math
import re

from pytest_kvcache.server.explanations.phrases import GIB, SIGNED, F, Known, N, known, near, whole

_SAME_RATE = 0.02
# What the driver keeps leaves no more of a card than this.
_MOST_SHARE = 0.98


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
    length, needed, there = whole(match.group(1)), float(match.group(2)), float(match.group(3))
    estimate = whole(match.group(4)) if match.group(4) else 0
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
        rate, proportional = (needed - there) * GIB / (length - estimate), length * there / needed
        if abs(proportional - estimate) > max(64, _SAME_RATE * estimate):
            fixed = there - estimate * rate / GIB
            means += (
                f" (two points of one line: {rate / 1000:,.1f} kB a token and {fixed:.2f} GiB for each request whatever its length;"
                f" a guess in proportion, {proportional:,.0f}, would be wrong)"
            )
        else:
            means += f" ({there * GIB / estimate / 1024:,.1f} KiB a token)"
    return means, f"set --max-model-len to {estimate} or lower, or give the pool {max(needed - there, 0):.2f} GiB more"


def _pool_small_v0(match: re.Match[str], text: str) -> tuple[str, str]:
    length, tokens = whole(match.group(1)), whole(match.group(2))
    means = f"the max length is {length:,} tokens and the pool holds {tokens:,}: {length - tokens:,} short"
    stated = re.search(rf"(?:\bkv_cache_size={F} ?GiB|reserved for KV Cache is {F} ?GiB)", near(text))
    if stated is not None and tokens:
        there = float(stated.group(1) or stated.group(2))
        means += f" ({there * length / tokens:.2f} GiB needed, {there:g} GiB there)"
    return means, f"set --max-model-len to {tokens} or lower, or raise --gpu-memory-utilization"


def _nothing_left(_: re.Match[str], text: str) -> tuple[str, str]:
    means = "weights, the peak of the profile run and other memory already fill the share of the card: nothing is left for the KV cache"
    tail = near(text)
    parts = re.search(rf"model weights take {F} ?GiB; non_torch_memory takes (-?){F} ?GiB; PyTorch activation peak memory takes {F} ?GiB", tail)
    budget = re.search(rf"total_gpu_memory \({F} ?GiB\) x gpu_memory_utilization \({F}\) = {F} ?GiB", tail)
    if parts is not None and budget is not None:
        # What is not torch's may count as negative, where another process gave memory back meanwhile.
        held = [float(parts.group(1)), float(parts.group(2) + parts.group(3)), float(parts.group(4))]
        means += (
            f" (weights {held[0]:g} + activation peak {held[2]:g} + other {held[1]:g} = {sum(held):.2f} GiB"
            f" of {float(budget.group(3)):g} GiB = {float(budget.group(2)):g} x {float(budget.group(1)):g} GiB)"
        )
        least = sum(held) / float(budget.group(1))
        if least > _MOST_SHARE:
            return (
                means,
                "no share of this card is enough: use a smaller or quantised model, spread it over more cards, or lower --max-num-batched-tokens",
            )
        return means, f"set --gpu-memory-utilization above {least:.2f}, use a smaller or quantised model, or lower --max-num-batched-tokens"
    if "VLLM_CPU_KVCACHE_SPACE" in tail and "gpu_memory_utilization" not in tail:
        return means, "set VLLM_CPU_KVCACHE_SPACE (GiB) above zero and below what the machine has free"
    short = re.search(rf"Available KV cache memory: -{F} GiB", tail)
    if short is not None:
        means += f" ({float(short.group(1)):g} GiB are lacking)"
    loaded = re.search(rf"(?:model weights took|Model loading took) {F} ?(?:GiB|GB)", tail, re.IGNORECASE)
    if loaded is not None:
        means += f" (the weights alone took {float(loaded.group(1)):g} GiB)"
    return means, (
        "look at the memory line of the profile run: if weights are the most, raise --gpu-memory-utilization or use a smaller model; if the activation"
        " peak is, lower --max-num-batched-tokens; if neither, another process holds the card"
    )


def _profiling(match: re.Match[str], _: str) -> tuple[str, str]:
    unit = 1.0 if match.group(3) else GIB  # older releases print bytes
    before, after = round(float(match.group(1)) / unit, 2), round(float(match.group(2)) / unit, 2)
    means = (
        f"while vLLM measured, another process gave {after - before:.2f} GiB back ({before:g} to {after:g} GiB free): a size taken now would be wrong"
    )
    return means, "start one server on a card at a time, and start again"


def _cpu_node(match: re.Match[str], _: str) -> tuple[str, str]:
    free, total, wanted = (float(match.group(n)) for n in (1, 2, 3))
    means = f"{free:g} of {total:g} GiB are free on the memory node and {wanted:g} GiB of KV cache were wanted: {wanted - free:.2f} GiB short"
    return means, f"set VLLM_CPU_KVCACHE_SPACE (GiB) or --kv-cache-memory-bytes to less than {free:g} GiB, or end what else holds memory there"


def _cpu_start(match: re.Match[str], _: str) -> tuple[str, str]:
    free, total, share, wanted = (float(match.group(n)) for n in (1, 2, 3, 4))
    means = (
        f"{free:g} of {total:g} GiB of the memory node were free and {share:g} of it ({wanted:g} GiB) was wanted before the model loads:"
        f" {wanted - free:.2f} GiB short (on the CPU --gpu-memory-utilization is a share of the machine's memory)"
    )
    return means, f"set --gpu-memory-utilization to {_down(free / total):g} or lower, or size the pool with VLLM_CPU_KVCACHE_SPACE (GiB)"


def _cpu_rest(match: re.Match[str], _: str) -> tuple[str, str]:
    free, total, left, share = (float(match.group(n)) for n in (1, 2, 3, 4))
    if left <= 0:
        return (
            f"the model and its process already hold more than the {share:g} GiB that were to be used on the memory node: nothing is left for the KV cache",
            "raise --gpu-memory-utilization (on the CPU a share of the machine's memory), or size the pool with VLLM_CPU_KVCACHE_SPACE (GiB)",
        )
    means = f"of the {share:g} GiB to be used {left:g} GiB are left for the KV cache, and {free:g} of {total:g} GiB of the node are free"
    return means, f"end what else holds memory there, or size the pool with VLLM_CPU_KVCACHE_SPACE below {free:g} GiB"


def _outside(match: re.Match[str], _: str) -> tuple[str, str]:
    held, total, share, wanted = (float(match.group(n)) for n in (1, 2, 3, 4))
    means = f"weights of {held:g} GiB lie on the card outside this process, and {share:g} of the card ({wanted:g} of {total:g} GiB) was to hold everything"
    return means, f"set --gpu-memory-utilization above {math.ceil(held / total * 1000) / 1000:g}, with room for the KV cache on top"


def _beside_weights(match: re.Match[str], _: str) -> tuple[str, str]:
    free, total, share, budget = (float(match.group(n)) for n in (1, 2, 3, 4))
    means = (
        f"{free:g} of {total:g} GiB were free, and {budget:g} GiB are this engine's part of {share:g} of the card once the weights that lie outside it are"
        f" taken off: {budget - free:.2f} GiB short"
    )
    return (
        means,
        f"free that memory (nvidia-smi shows the processes), or lower --gpu-memory-utilization by {math.ceil((budget - free) / total * 1000) / 1000:g}",
    )


def _no_token(_: re.Match[str], __: str) -> tuple[str, str]:
    return "the memory that is left does not hold a single token", "raise --gpu-memory-utilization, or use a smaller or quantised model"


def _host_pool(match: re.Match[str], _: str) -> tuple[str, str]:
    return f"the host pool has {match.group(1)} blocks and the max length needs {match.group(2)}", "raise host_pool_gib, or lower --max-model-len"


def _block_size(match: re.Match[str], _: str) -> tuple[str, str]:
    size, backends = whole(match.group(1)), match.group(2)
    bases = [int(number) for number in re.findall(r"MultipleOf\(([0-9]{1,6})\)", backends)[:8]]
    change = f"set --block-size to a multiple of {math.lcm(*bases)}" if bases else "leave --block-size out"
    return f"block size {size} is none that the attention backend can use: {backends[:160]}", change


def _too_long(match: re.Match[str], _: str) -> tuple[str, str]:
    asked, found = whole(match.group(1)), whole(match.group(2))
    return f"{asked:,} tokens were asked for and the model's own limit is {found:,}", f"set --max-model-len to {found} or lower"


def _block_choice(match: re.Match[str], _: str) -> tuple[str, str]:
    choices = re.sub(r"[^0-9, ]", "", match.group(2))[:80]
    return f"block size {match.group(1)} is none of those that this build offers", f"set --block-size to one of {choices}, or leave it out"


def _sampler(match: re.Match[str], text: str) -> tuple[str, str]:
    seats = whole(match.group(1))
    free = re.search(rf"total capac\w{{1,4}} of {F} GiB of which {F} ([MG]iB) is free", near(text))
    left = f"; {free.group(2)} {free.group(3)} of {free.group(1)} GiB were free" if free else ""
    means = f"the pool was sized first, and sampling for {seats:,} sequences at once (--max-num-seqs) then found no room{left}"
    return means, f"set --max-num-seqs below {seats}, or lower --gpu-memory-utilization: what it leaves free serves this"


def _batched_tokens(match: re.Match[str], _: str) -> tuple[str, str]:
    batch, length = whole(match.group(1)), whole(match.group(2))
    means = f"a step takes {batch:,} tokens and one request may have {length:,}: it would never be scheduled without chunked prefill"
    return means, f"set --max-num-batched-tokens to {length} or more, --max-model-len to {batch} or lower, or add --enable-chunked-prefill"


def _batched_seats(match: re.Match[str], _: str) -> tuple[str, str]:
    batch, seats = whole(match.group(1)), whole(match.group(2))
    return (
        f"a step takes {batch:,} tokens and {seats:,} sequences want one each",
        f"set --max-num-batched-tokens to {seats} or more, or lower --max-num-seqs",
    )


def _heads(match: re.Match[str], _: str) -> tuple[str, str]:
    heads, ranks = whole(match.group(1)), whole(match.group(2))
    sizes = [str(size) for size in range(1, min(heads, 64) + 1) if heads % size == 0]
    return f"{heads} attention heads cannot be shared evenly by {ranks} cards", f"set --tensor-parallel-size to one of {', '.join(sizes[:12])}"


def _capability(match: re.Match[str], _: str) -> tuple[str, str]:
    return f"bfloat16 needs compute capability {match.group(1)} and this card has {match.group(2)}", "add --dtype half (float16)"


def _cards(match: re.Match[str], _: str) -> tuple[str, str]:
    return (
        f"{match.group(1)} cards are wanted and {match.group(2)} are there",
        f"set --tensor-parallel-size x --pipeline-parallel-size to {match.group(2)} or fewer, or look at CUDA_VISIBLE_DEVICES",
    )


def _windows(match: re.Match[str], _: str) -> tuple[str, str]:
    first, layers = whole(match.group(1)), whole(match.group(2))
    slide = max(layers - first, 0)
    means = f"layers from {first} on have a window: {slide} of {layers}"
    if not slide:
        return f"{means}, so none slides", """start with --hf-overrides '{"use_sliding_window": false}': no layer has a window to lose"""
    return (
        f"{means}, and vLLM does not serve such a mixture of this family",
        """--hf-overrides '{"use_sliding_window": false}' starts it with full attention everywhere, which costs cache and changes answers beyond the window""",
    )


KNOWN: tuple[Known, ...] = (
    known(r"`?max_window_layers`? = ([0-9]{1,6}) is less than `?num_hidden_layers`? = ([0-9]{1,6})", _windows),
    known(
        rf"Free memory on device[^(]{{0,40}}\({F}/{F} ?GiB\) on startup is less than desired GPU memory utilization \({F}, {F} ?GiB\)",
        _free_short,
    ),
    known(
        rf"max seq len \({N}\), \(?{F} GiB KV cache is needed, which is larger than the available KV cache memory \({F} GiB\)"
        rf"(?:[^\n]{{0,60}}?estimated maximum model length is {N})?",
        _pool_small,
    ),
    known(rf"max seq len \({N}\) is larger than the maximum number of tokens that can be stored in KV cache \({N}\)", _pool_small_v0),
    known(r"No available memory for the cache blocks", _nothing_left),
    known(rf"Error in memory profiling\. Initial free memory {F}(?: GiB)?, current free memory {F}( GiB)?", _profiling),
    known(rf"Available memory on node [0-9]+ \({F}/{F} GiB\)[^\n]{{0,60}}? is less than requested memory for kv \({F} GiB\)", _cpu_node),
    known(rf"Available memory on node [0-9]+ \({F}/{F} GiB\)[^\n]{{0,60}}? is less than desired CPU memory utilization \({F}, {F} GiB\)", _cpu_start),
    known(rf"Available memory on node [0-9]+ \({F}/{F} GiB\)[^\n]{{0,60}}? is less than requested memory for kv \({SIGNED}/{F} GiB\)", _cpu_rest),
    known(rf"Externally held weights on device[^(]{{0,40}}\({F}/{F} GiB\) exceed the desired GPU memory utilization \({F}, {F} GiB\)", _outside),
    known(
        rf"Free memory on device[^(]{{0,40}}\({F}/{F} GiB\) on startup is less than the engine's budget[^(]{{0,80}}\({F}, {F} GiB\)", _beside_weights
    ),
    known(r"Cannot auto-fit max_model_len", _no_token),
    known(rf"HiSparse host pool has {N} blocks but max_model_len needs {N}", _host_pool),
    known(rf"No common block size for {N} \(([^\n]{{1,300}}?)\)\.?\s*$", _block_size),
    known(rf"User-specified max_model_len \(?{N}\)? is greater than the derived max_model_len \([^\n]{{0,80}}?={N}", _too_long),
    known(rf"argument --block-size: invalid choice: '?{N}'? \(choose from ([^)]{{1,200}})", _block_choice),
    known(rf"out of memory occurred when warming up sampler with {N} dummy requests", _sampler),
    known(rf"max_num_batched_tokens \({N}\) is smaller than max_model_len \({N}\)", _batched_tokens),
    known(rf"max_num_batched_tokens \({N}\) must be greater than or equal to max_num_seqs \({N}\)", _batched_seats),
    known(rf"number of attention heads \({N}\) must be divisible by tensor parallel size \({N}\)", _heads),
    known(rf"Bfloat16 is only supported on GPUs with compute capability of at least {F}\.[^\n]{{0,80}}?has compute capability {F}", _capability),
    known(rf"World size \({N}\) is larger than the number of available GPUs \({N}\)", _cards),
)
