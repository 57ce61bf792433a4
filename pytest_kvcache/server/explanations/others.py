"""What TensorRT-LLM, TGI and LMDeploy say when they do not start."""

from __future__ import annotations

import re

from pytest_kvcache.server.explanations.phrases import F, Known, N, known, near, whole


def _trt_tokens(match: re.Match[str], _: str) -> tuple[str, str]:
    figures = re.search(
        rf"maxTokensInPagedKvCache \({N}\)[^\n]{{0,160}}?beam_width \({N}\) \* tokensPerBlock \({N}\) \* maxBlocksPerSeq \({N}\)", match.string
    )
    means = "the pool does not hold one sequence of the max length"
    if figures is not None:
        there, beams, size, blocks = (whole(number) for number in figures.groups())
        means += f": it has {there:,} tokens and one needs {beams * size * blocks:,} ({beams} x {size} x {blocks})"
    return means, "lower max_seq_len (or the max input and output), or raise the memory fraction of the KV cache"


def _trt_executor(_: re.Match[str], text: str) -> tuple[str, str]:
    tail = near(text)
    part = re.search(r"The following component could not be created: ([^\n]{1,80})", tail)
    total = re.search(rf"Total GPU memory \(GiB\): {F}", tail)
    free = re.search(rf"Free GPU memory before component creation attempt \(GiB\): {F}", tail)
    means = "the card has no room for what TensorRT-LLM was creating"
    if part is not None:
        means = f"the card has no room for: {part.group(1).strip()}"
    if total is not None and free is not None:
        means += f"; {float(free.group(1)):g} of {float(total.group(1)):g} GiB were free before it"
    advice = re.search(rf"^\s*{re.escape(part.group(1).strip())}: (reduce [^\n]{{1,200}})", tail, re.MULTILINE) if part is not None else None
    return means, advice.group(1) if advice else "lower kv_cache_config.free_gpu_memory_fraction, max_batch_size or max_num_tokens"


def _tgi_total(match: re.Match[str], _: str) -> tuple[str, str]:
    return (
        f"one request of {whole(match.group(1)):,} tokens (--max-total-tokens) does not fit the memory that is left",
        "lower --max-total-tokens, or quantise",
    )


def _tgi_prefill(match: re.Match[str], _: str) -> tuple[str, str]:
    return f"a prefill batch of {whole(match.group(1)):,} tokens does not fit", f"lower --max-batch-prefill-tokens below {match.group(1)}"


def _tgi_batch(_: re.Match[str], __: str) -> tuple[str, str]:
    return (
        "the pool is smaller than one request of the max length",
        "lower --max-total-tokens to the pool's tokens, or raise --max-batch-total-tokens",
    )


def _tgi_order(match: re.Match[str], _: str) -> tuple[str, str]:
    return f"--max-batch-prefill-tokens {match.group(1)} is less than --max-input-tokens {match.group(2)}", f"set it to {match.group(2)} or more"


def _tgi_cards(match: re.Match[str], _: str) -> tuple[str, str]:
    return f"more shards are wanted than the {match.group(1)} cards that are there", f"set --num-shard to {match.group(1)} or fewer"


def _lmdeploy(match: re.Match[str], _: str) -> tuple[str, str]:
    what = match.group(1)
    change = "use a smaller or quantised model, or free the card; --cache-max-entry-count is a share of what the weights leave free"
    if what == "runtime":
        change = "lower --cache-max-entry-count or --max-prefill-token-num: the pool leaves too little for running"
    if what == "state cache":
        change = "lower --max-batch-size: each request holds a state of fixed size"
    return f"the memory that the weights leave does not hold the {what}", change


KNOWN: tuple[Known, ...] = (
    known(r"maxTokensInPagedKvCache[^\n]{0,40}must be large enough", _trt_tokens),
    known(r"Executor creation failed due to insufficient GPU memory", _trt_executor),
    known(rf"Not enough memory to handle `max_total_tokens={N}`", _tgi_total),
    known(rf"Not enough memory to handle {N} prefill tokens", _tgi_prefill),
    known(r"`max_total_tokens` must be <= `max_batch_total_tokens`", _tgi_batch),
    known(rf"`max_batch_prefill_tokens` must be >= `max_input_\w{{5,6}}`\. Given: {N} and {N}", _tgi_order),
    known(rf"only found {N} CUDA devices", _tgi_cards),
    known(r"No enough gpu memory for (kv cache|runtime|state cache)", _lmdeploy),
)
