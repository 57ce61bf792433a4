"""What the machine below an engine says when it does not start: cards, drivers, memory, ports, disks, networks, model files."""

from __future__ import annotations

import re

from pytest_kvcache.server.explanations.phrases import F, Known, fixed, known, near


def _out_of_memory(match: re.Match[str], text: str) -> tuple[str, str]:
    rest = match.string[match.start() :]
    asked = re.search(rf"Tried to allocate {F} ([MG]iB)|allocating {F} ([MG]iB)", match.string)
    # PyTorch before 2.1 has the figures in parentheses; 2.1 wrote "capacty".
    total = re.search(rf"total capac\w{{1,4}} of {F} GiB(?: of which {F} ([MG]iB) is free)?", rest) or re.search(
        rf"; {F} GiB total capacity;[^\n]{{0,80}}?; {F} ([MG]iB) free", rest
    )
    parts = []
    if asked is not None:
        parts.append(f"{asked.group(1) or asked.group(3)} {asked.group(2) or asked.group(4)} were asked for")
    if total is not None:
        free = f", {total.group(2)} {total.group(3)} of it free" if total.group(2) else ""
        parts.append(f"the card has {total.group(1)} GiB{free}")
    others = re.findall(rf"Process ([0-9]{{1,10}}) has {F} ([MG]iB) memory in use", rest)
    if len(others) > 1:
        parts.append("processes on it: " + ", ".join(f"{pid}: {size} {unit}" for pid, size, unit in others[:6]))
    means = "the card is full: " + ("; ".join(parts) if parts else "the log gives no figures")
    if re.search(r"mem[-_]fraction[-_]static|\bsglang\b", near(text)):
        return means, "lower --mem-fraction-static (what it leaves free serves activations and graphs), or --cuda-graph-max-bs"
    if re.search(r"llama_|ggml_", near(text)):
        return means, "use a smaller context (-c), fewer layers on the card (-ngl), or a quantised KV cache (-ctk q8_0 -ctv q8_0)"
    if re.search(r"\[TM\]|\blmdeploy\b", near(text)):
        return means, "lower --cache-max-entry-count (a share of what the weights leave free), --max-batch-size or --max-prefill-token-num"
    if re.search(r"text_generation_(?:launcher|server|router)", near(text)):
        return means, "lower --max-batch-prefill-tokens, --max-total-tokens or --cuda-memory-fraction, quantise, or use more shards"
    if re.search(r"TensorRT-LLM|TRT-LLM", near(text)):
        return means, "lower kv_cache_config.free_gpu_memory_fraction, max_batch_size or max_num_tokens"
    return means, "lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens; end other processes on the card"


def _port(match: re.Match[str], _: str) -> tuple[str, str]:
    where = re.search(r"\('?([^',()]{0,60})'?, ([0-9]{1,5})\)|port:? ?([0-9]{1,5})|:([0-9]{2,5})\b", match.string)
    port = next((group for group in where.groups()[1:] if group), "") if where else ""
    means = f"port {port} is taken by another process" if port else "the port is taken by another process"
    if "local network address" in match.string:
        return means, "the ranks meet at this port: end what holds it, or choose another (VLLM_PORT or MASTER_PORT, SGLang: --dist-init-addr)"
    return means, "end that process, or choose another --port"


def _nccl(_: re.Match[str], text: str) -> tuple[str, str]:
    tail = near(text)
    shared = re.search(r"/dev/shm/nccl-\w{1,20}(?: \(size ([0-9]{1,12})\))?", tail)  # noqa: S108, a name in a log
    if shared is not None:
        size = f" of {int(shared.group(1)) / (1 << 20):.1f} MiB" if shared.group(1) else ""
        return f"the ranks share memory in /dev/shm, and a segment{size} did not fit it", "start the container with --ipc=host or --shm-size=16g"
    if "Duplicate GPU detected" in tail:
        return "two ranks were put on one card", "look at CUDA_VISIBLE_DEVICES and the number of processes: each rank needs a card of its own"
    change = "set NCCL_DEBUG=INFO and start again: it says which call failed; then check that all cards are free, the driver, and NCCL_SOCKET_IFNAME"
    return "the cards or machines of one group could not talk to each other (NCCL)", change


def _killed(_: re.Match[str], text: str) -> tuple[str, str]:
    means = "the system ended the process with signal 9: as a rule the memory of the machine, or of its container, was full"
    if re.search(r"\bCPU KV cache|cpu_worker|VLLM_CPU_KVCACHE_SPACE", near(text)):
        return means, "set VLLM_CPU_KVCACHE_SPACE (GiB) lower, or give the container more memory; dmesg names what was ended"
    return means, "look at dmesg or the container's events; give it more memory, or load less at once (smaller model, fewer parallel workers)"


KNOWN: tuple[Known, ...] = (
    known(
        r"(?:CUDA|HIP|XPU) out of memory|cudaMalloc failed: out of memory|out of memory\. Tried to allocate"
        r"|CUDA (?:runtime )?error[^\n]{0,200}out of memory",
        _out_of_memory,
    ),
    known(r"address (?:is )?already in use|EADDRINUSE|couldn't bind (?:HTTP )?server socket", _port),
    known(r"\bNCCL error\b|\bnccl(?:System|UnhandledCuda|Internal|Remote|InvalidUsage)Error\b", _nccl),
    known(
        r"no space left on device",
        fixed("a file system is full", "free space where models are cached (HF_HOME) and in /dev/shm; in a container --shm-size or --ipc=host"),
    ),
    known(
        r"no kernel image is available for execution|not supported for the current GPU",
        fixed("this build has no code for this card", "use a build for its compute capability, or another quantisation"),
    ),
    known(
        r"driver version is insufficient|NVIDIA driver on your system is too old",
        fixed("the driver is older than this build of CUDA needs", "update the NVIDIA driver, or use a build for an older CUDA"),
    ),
    known(
        r"No CUDA GPUs are available|no CUDA-capable device|Failed to infer device type",
        fixed("no card is visible to the process", "look at nvidia-smi, CUDA_VISIBLE_DEVICES, and the container's --gpus all"),
    ),
    known(
        r"gated repo|Access to model [^\n]{1,100} is restricted|401 Client Error|RepositoryNotFoundError|not a valid model identifier",
        fixed(
            "the model cannot be had from the hub under this name", "check the name, log in (HF_TOKEN), accept its licence, or name a local folder"
        ),
    ),
    known(
        r"exit ?code:? -9\b|: -9[,}]|\bsignal 9\b|\bSIGKILL\b|^Killed$|exited with code 137|OOMKilled",
        _killed,
    ),
)
