"""What vLLM's own load client costs against the same server. Run by a Python that has vLLM; client_cpu.py does it (--vllm PYTHON).

usage: PYTHON benchmarks/vllm_bench.py URL TOKENIZER USERS PROMPTS TOKENS

It prints one line of JSON: output tokens, CPU seconds of its benchmark coroutine (imports and the making of prompts are left out, as in
ours), and its median time to first token in milliseconds. Requests start when a user is free, at most USERS at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from vllm.benchmarks import serve  # type: ignore[import-not-found]


def main() -> None:
    """Press the server and print the line."""
    url, tokenizer, users, prompts, tokens = sys.argv[1:6]
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    words = ["--backend", "openai", "--base-url", url, "--model", "mock", "--tokenizer", tokenizer, "--dataset-name", "random"]
    words += ["--random-input-len", "64", "--random-output-len", tokens, "--num-prompts", prompts, "--max-concurrency", users]
    words += ["--disable-tqdm", "--ignore-eos", "--ready-check-timeout-sec", "0", "--num-warmups", "0"]
    spent = {"cpu_s": 0.0}
    pressing = serve.benchmark

    async def counted(*given: Any, **named: Any) -> Any:
        began = time.process_time()
        result = await pressing(*given, **named)
        spent["cpu_s"] = time.process_time() - began
        return result

    serve.benchmark = counted
    result = asyncio.run(serve.main_async(parser.parse_args(words)))
    print(json.dumps({"tokens": result["total_output_tokens"], "ttft_ms": result["median_ttft_ms"], "completed": result["completed"], **spent}))


if __name__ == "__main__":
    main()
