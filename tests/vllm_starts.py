"""Real starts of vLLM's CPU build: what is started, and how. ``python tests/vllm_starts.py`` with vLLM's own Python reads starts as JSON from standard input.

All starts happen in one process, one after another, with real workers, real (dummy-filled) models and real KV caches: vLLM's own
EngineCore decides the blocks. One JSON line is printed for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "capacity"
RECORDED = DATA / "starts" / "answers.jsonl"
MIB = 1 << 20
SHOWN = {"max_model_len", "kv_cache_memory_bytes", "block_size"}
# Names of vLLM's arguments and of ours.
OURS = {
    "block_size": "block_size", "max_model_len": "max_model_len", "max_num_batched_tokens": "max_num_batched_tokens", "kv_cache_dtype": "kv_dtype",
    "dtype": "dtype", "enable_prefix_caching": "prefix_caching", "num_gpu_blocks_override": "num_gpu_blocks_override",
    "kv_cache_memory_bytes": "kv_memory", "max_num_seqs": "max_num_seqs", "disable_hybrid_kv_cache_manager": "hybrid",
    "mamba_ssm_cache_dtype": "state_dtype",
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """One start: a configuration of tests/data with some of its values changed, and vLLM's arguments. ``ci`` marks those of every CI run."""

    name: str
    kind: str
    base: str
    changes: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    ci: bool = False

    def config(self) -> dict[str, Any]:
        """Return the model's configuration."""
        found = next(path for folder in ("oracle", "starts") if (path := DATA / folder / f"{self.base}.json").exists())
        body: dict[str, Any] = json.loads(found.read_text())
        return body | self.changes

    def ours(self) -> dict[str, Any]:
        """Return the arguments of ``capacity.plan`` for the same start."""
        given = {OURS[name]: value for name, value in self.arguments.items()}
        if "hybrid" in given:
            given["hybrid"] = not given["hybrid"]
        return {"platform": "cpu", "numa_nodes": 1, **given}


def _start(name: str, kind: str, base: str, changes: dict[str, Any] | None = None, *, ci: bool = False, **arguments: Any) -> Start:
    given: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": 64 * MIB, **arguments}
    return Start(name, kind, base, changes or {}, given, ci)


STARTS: tuple[Start, ...] = (
    _start("llama-gqa", "full attention, GQA", "llama_gqa", ci=True),
    _start("llama-gqa-odd-length", "full attention, GQA", "llama_gqa", max_model_len=1000, block_size=32),
    _start("llama-gqa-b64-fp8", "full attention, GQA", "llama_gqa", kv_cache_dtype="fp8", block_size=64),
    _start("llama-gqa-fp32", "full attention, GQA", "llama_gqa", dtype="float32", block_size=32, ci=True),
    _start("llama-gqa-override", "full attention, GQA", "llama_gqa", num_gpu_blocks_override=77, block_size=32, max_model_len=2000),
    _start("llama-gqa-exact-fit", "full attention, GQA", "llama_gqa", num_gpu_blocks_override=64, block_size=32, max_model_len=2048, ci=True),
    _start("llama-mha-5-layers", "full attention, MHA", "llama_mha", {"num_hidden_layers": 5}, block_size=32),
    _start("llama-mqa", "full attention, MQA", "llama_mqa", block_size=96),
    _start("qwen3-head-dim", "head_dim of its own", "qwen3_headdim", {"num_hidden_layers": 4}, block_size=64, ci=True),
    _start("gpt2", "n_head names", "gpt2", {"n_layer": 2}, max_model_len=512, block_size=32),
    _start("falcon-multi-query", "falcon flags", "falcon_mq", block_size=32, ci=True),
    _start("falcon-new", "falcon flags", "falcon_newarch", {"num_hidden_layers": 3}),
    _start("qwen2-window-off", "window present, switched off", "qwen2_noswa", block_size=32),
    _start("qwen2-all-slide", "every layer slides", "qwen2_swa_all", block_size=32, max_num_batched_tokens=512),
    _start("qwen2-part-slides", "refused by vLLM", "qwen2_swa"),
    _start("mistral-slides", "every layer slides", "mistral_swa", {"sliding_window": 300}, block_size=32, ci=True),
    _start("mistral-short", "every layer slides", "mistral_swa", max_model_len=512, block_size=32),
    _start("mistral-fp8", "every layer slides", "mistral_swa", kv_cache_dtype="fp8", max_num_batched_tokens=256),
    _start("phi3-slides", "every layer slides", "phi3_swa", block_size=64),
    _start("gemma2", "alternating windows", "gemma2", {"sliding_window": 777}, block_size=32, ci=True),
    _start("gemma2-odd", "alternating windows, padded group", "gemma2_odd5", block_size=32),
    _start("gemma3", "five windows to one full", "gemma3_6", {"sliding_window": 256}, block_size=64, max_num_batched_tokens=333, ci=True),
    _start("gemma3-13", "five windows to one full, padded group", "gemma3_13", block_size=32),
    _start("gemma3-no-hybrid", "hybrid manager off", "gemma3_6", disable_hybrid_kv_cache_manager=True, block_size=32),
    _start("gemma3-fp8", "five windows to one full", "gemma3_6", kv_cache_dtype="fp8"),
    _start("gemma4", "two geometries", "gemma4", ci=True),
    _start("gpt-oss", "windows by index", "gpt_oss", block_size=32, max_num_batched_tokens=1024, ci=True),
    _start("gpt-oss-6", "windows by index", "gpt_oss", {"num_hidden_layers": 6, "layer_types": None}, block_size=64),
    _start("llama4-chunks", "chunked attention", "llama4", {"attention_chunk_size": 640}, block_size=32, ci=True),
    _start("mixtral", "experts, full attention", "mixtral", block_size=32),
    _start("deepseek-v2", "MLA", "deepseek_v2", {"num_hidden_layers": 4}, ci=True),
    _start("deepseek-v2-fp8", "MLA", "deepseek_v2", kv_cache_dtype="fp8"),
    _start("deepseek-v3.2", "refused by vLLM", "deepseek_v32"),
    _start("qwen3-next", "gated delta net and full attention", "qwen3_next", ci=True),
    _start("qwen3-next-b32", "gated delta net and full attention", "qwen3_next", block_size=32),
    _start("qwen3-next-no-caching", "gated delta net and full attention", "qwen3_next", enable_prefix_caching=False),
    _start("nemotron-h", "Mamba-2 and full attention", "nemotron_h", ci=True),
    _start("nemotron-h-no-caching", "Mamba-2 and full attention", "nemotron_h", enable_prefix_caching=False, block_size=64),
    _start("mamba2", "state only", "mamba2", max_model_len=2048),
    _start("opt", "no KV heads stated", "opt", max_model_len=1500, block_size=32),
    _start("gpt-bigcode", "multi_query flag", "bigcode", max_model_len=1500, block_size=64),
    _start("starcoder2", "every layer slides", "starcoder2", max_model_len=1500, block_size=32),
    _start("phi", "head_dim from hidden size", "phi", max_model_len=1500, dtype="float16"),
    _start("olmo3", "three windows to one full", "olmo3", max_model_len=8192, block_size=32, max_num_batched_tokens=700),
    _start("cohere2", "three windows to one full", "cohere2", max_model_len=1500, block_size=32, kv_cache_dtype="fp8"),
    _start("falcon-h1", "attention and Mamba-2 in every layer", "falcon_h1", max_model_len=1500, block_size=32),
    _start("jamba", "Mamba-1 and full attention", "jamba", max_model_len=1500, block_size=32),
    _start("granite-hybrid", "Mamba-2 and full attention", "granite_hybrid", max_model_len=1500, block_size=32),
    _start("deepseek-v3", "MLA, experts", "deepseek_v3", max_model_len=1500),
    _start("qwen3-moe", "experts, one KV head", "qwen3_moe", max_model_len=1500, block_size=32),
    _start("gemma3n", "layers that share a cache", "gemma3n", max_model_len=1500, block_size=32),
    _start("bloom", "MHA by other names", "bloom", max_model_len=1500, block_size=32),
    _start("glm4", "full attention, GQA", "glm4", max_model_len=1500, block_size=64),
)


def main() -> None:
    """Start what standard input lists, and print what each came to. Runs with vLLM's own Python."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # type: ignore[import-not-found]
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
    from vllm.model_executor.models import registry  # type: ignore[import-not-found]
    from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found]
    from vllm.v1.executor import Executor  # type: ignore[import-not-found]

    # A model class is looked at in a process of its own, ten seconds each; here nothing else lives in the process.
    registry._run_in_subprocess = lambda look: look()
    for start in json.load(sys.stdin):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(start["config"]))
            answer: dict[str, Any] = {"name": start["name"]}
            core = None
            try:
                config = EngineArgs(
                    model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, **start["arguments"]
                ).create_engine_config()
                core = EngineCore(config, Executor.get_class(config), log_stats=False)
                cache = config.cache_config
                answer |= {
                    "num_gpu_blocks": cache.num_gpu_blocks,
                    "kv_cache_size_tokens": cache.kv_cache_size_tokens,
                    "kv_cache_max_concurrency": cache.kv_cache_max_concurrency,
                    "block_size": cache.block_size,
                    "effective_attention_block_size": getattr(cache, "effective_attention_block_size", None),
                }
            except Exception as error:
                answer["refused"] = f"{type(error).__name__}: {error}"[:500]
            finally:
                if core is not None:
                    core.shutdown()
                cleanup_dist_env_and_memory()
        sys.stdout.write("\n" + json.dumps(answer | {"took_s": round(time.monotonic() - began, 1)}) + "\n")
        sys.stdout.flush()


def asked(starts: Sequence[Start]) -> str:
    """Return what ``main`` reads."""
    return json.dumps([{**asdict(start), "config": start.config()} for start in starts])


def run(python: Path, starts: Sequence[Start]) -> dict[str, dict[str, Any]]:
    """Start all of them with vLLM's own Python and return the answer of each by its name. Raises CalledProcessError."""
    done = subprocess.run(
        [str(python), str(Path(__file__))], input=asked(starts), capture_output=True, text=True, check=True, timeout=60 + 20 * len(starts)
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {answer["name"]: answer for answer in answers}


def recorded() -> dict[str, dict[str, Any]]:
    """Return the answers of real starts as tests/data holds them, by name."""
    answers = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    return {answer["name"]: answer for answer in answers}


def table(answers: dict[str, dict[str, Any]]) -> str:
    """Return the table of docs/capacity.md: the engine's figures, which are ours as well."""
    lines = ["| start | kind | length | blocks | block size | concurrency | tokens |", "|---|---|---|---|---|---|---|"]
    for start in STARTS:
        answer = answers[start.name]
        arguments = start.arguments
        extra = ", ".join(f"{OURS[name].replace('_', '-')} {value}" for name, value in arguments.items() if name not in SHOWN)
        name = f"{start.name}{f' ({extra})' if extra else ''}"
        if "refused" in answer:
            lines.append(f"| {name} | {start.kind} | {arguments['max_model_len']} | refused | - | - | - |")
            continue
        size = answer["effective_attention_block_size"] or answer["block_size"]
        figures = f"{answer['num_gpu_blocks']} | {size} | {answer['kv_cache_max_concurrency']:.2f} | {answer['kv_cache_size_tokens']}"
        lines.append(f"| {name} | {start.kind} | {arguments['max_model_len']} | {figures} |")
    return "\n".join(lines) + "\n"


MARK = "<!-- the table of tests/vllm_starts.py -->\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        page = Path(sys.argv[2])
        head, _, rest = page.read_text().partition(MARK)
        page.write_text(head + MARK + table(recorded()) + MARK + rest.partition(MARK)[2])
    else:
        main()
