"""The reason of a failed start is the sentence with the numbers, whatever wrappers follow it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.server.rootcause import log_lines, root_cause, strip_escapes, strip_prefix

LOGS = Path(__file__).parent.parent / "data" / "startup"

# The sentences of engines, each with the version or engine that says it.
SENTENCES = [
    # vLLM 0.32, 0.8, V0
    "To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV "
    "cache memory (9.97 GiB). Based on the available memory, the estimated maximum model length is 81664. Try increasing `gpu_memory_utilization`",
    "To serve at least one request with the models's max seq len (221000), (10.12 GiB KV cache is needed, which is larger than the available KV "
    "cache memory (5.59 GiB). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
    "The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (7344). Try increasing "
    "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine",
    "Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory utilization (0.9, 19.84 GiB). Decrease GPU memory "
    "utilization or reduce GPU memory used by other processes.",
    "Error in memory profiling. Initial free memory 70.1 GiB, current free memory 71.2 GiB. This happens when other processes sharing the same "
    "container release GPU memory while vLLM is profiling during initialization.",
    "Available memory on node 0 (3.1/8.34 GiB) on kv cache allocation is less than requested memory for kv (4.0 GiB). Decrease "
    "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes.",
    "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token. Try increasing `gpu_memory_utilization`.",
    "HiSparse host pool has 12 blocks but max_model_len needs 40; increase host_pool_gib.",
    "HiSparse has no allocatable host blocks.",
    "No common block size for 16 (CPU_ATTN: [MultipleOf(32)]).",
    # SGLang
    "Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.12",
    "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.88.",
    # TGI
    "Not enough memory to handle `max_total_tokens=8192`",
    "Not enough memory to handle 4096 prefill tokens. You need to decrease `--max-batch-prefill-tokens`",
    "`max_total_tokens` must be <= `max_batch_total_tokens`",
    # LMDeploy
    "No enough gpu memory for kv cache.",
    "No enough gpu memory for runtime.",
    "No enough gpu memory for state cache. Please reduce max_batch_size.",
]
WRAPPERS = (
    "(EngineCore pid=3207) ERROR 11-29 15:08:35 [core.py:1510] EngineCore failed to start.\n"
    "(Worker pid=3228) ERROR 11-29 15:08:35 [multiproc_executor.py:1063] RuntimeError: Worker failed with error 'x', please check the stack trace above\n"
    'Process EngineCore:\nTraceback (most recent call last):\n  File "/a/b.py", line 1, in run\n    self.run()\n'
    "(APIServer pid=3165) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    "[rank0]: Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.\n"
    "Error: ShardCannotStart\nKeyboardInterrupt\nBrokenPipeError: [Errno 32] Broken pipe\n"
)
PREFIXES = [
    "",
    "ValueError: ",
    "(EngineCore pid=3207) ERROR 11-29 15:08:35 [core.py:1510] ValueError: ",
    "\x1b[1;36m(EngineCore_DP0 pid=7)\x1b[0;0m ERROR 11-29 15:08:35 [core.py:1510] ValueError: ",
    "ERROR 01-10 10:02:11 engine.py:366] ",
    "[2026-09-09 11:57:18 TP0] RuntimeError: ",
    "2026-01-12T09:01:30.114082Z ERROR text_generation_launcher: ",
    "(RayWorkerWrapper pid=12, ip=10.0.0.1) ERROR 11-29 15:08:35 [worker.py:1] torch.X.FooError: ",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_every_known_sentence_is_found_under_its_wrappers(sentence: str) -> None:
    for prefix in PREFIXES:
        found = root_cause(f"INFO 01-01 00:00:00 [a.py:1] fine\n{prefix}{sentence}\n{WRAPPERS}")
        assert found.endswith(sentence), prefix
        assert len(found) <= len(sentence) + 30


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("vllm-0.32.0-cpu-fail-block-size", "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])."),
        (
            "vllm-0.32.0-cpu-fail-kv-too-small",
            "ValueError: To serve at least one request with the model's max seq len (4096), (0.0 GiB KV cache is needed",
        ),
        (
            "vllm-0.32.0-fail-kv-too-small",
            "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed",
        ),
        ("vllm-0.32.0-fail-no-memory", "ValueError: No available memory for the cache blocks."),
        ("llamacpp-fail-not-gguf", "gguf_init_from_reader: invalid magic characters: 'garb', expected 'GGUF'"),
    ],
)
def test_recorded_failures_give_their_cause(log: str, cause: str) -> None:
    assert root_cause((LOGS / f"{log}.log").read_text()).startswith(cause)


@pytest.mark.parametrize("log", ["vllm-0.32.0-startup", "vllm-0.6.6-v0-startup", "llamacpp-unified-q8_0", "llamacpp-split-f16"])
def test_the_log_of_a_good_start_has_no_cause(log: str) -> None:
    assert root_cause((LOGS / f"{log}.log").read_text()) == ""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Traceback (most recent call last):\n  File \"x\", line 1\nModuleNotFoundError: No module named 'vllm'\n",
            "ModuleNotFoundError: No module named 'vllm'",
        ),
        ("/usr/bin/python3: No module named vllm\n", "/usr/bin/python3: No module named vllm"),
        ("bash: line 1: vllmm: command not found\n", "bash: line 1: vllmm: command not found"),
        ("sh: 1: vllmm: not found\n", "sh: 1: vllmm: not found"),
        ("env: 'vllmm': No such file or directory\n", "env: 'vllmm': No such file or directory"),
        ("./run.sh: line 3: /opt/x: No such file or directory\n", "./run.sh: line 3: /opt/x: No such file or directory"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.5 GiB\n" + WRAPPERS,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.5 GiB",
        ),
        ("OSError: [Errno 98] Address already in use\n", "OSError: [Errno 98] Address already in use"),
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use\n",
            "[Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        ),
        ("Error: Address already in use (os error 98)\n", "Address already in use (os error 98)"),
        (
            "srv  start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 80\n",
            "srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 80",
        ),
        (
            "gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)\n"
            "llama_model_load: error loading model: llama_model_loader: failed to load model from /m.gguf\nsrv load_model: failed to load model, '/m.gguf'\n",
            "gguf_init_from_file: failed to open GGUF file '/m.gguf' (No such file or directory)",
        ),
        (
            "llama_model_load: error loading model: unknown model architecture: 'foo'\nsrv load_model: failed to load model\n",
            "llama_model_load: error loading model: unknown model architecture: 'foo'",
        ),
        ("usage: serve [-h]\nserve: error: unrecognized arguments: --foo\n", "serve: error: unrecognized arguments: --foo"),
        ("error: invalid argument: --foo\n", "invalid argument: --foo"),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, The checkpoint is too new [type=value_error, input=3]\n"
            "    For further information visit the docs\n",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig: Value error, The checkpoint is too new "
            "For further information visit the docs",
        ),
        (
            "OSError: m is not a local folder and is not a valid model identifier\nEOFError\n",
            "OSError: m is not a local folder and is not a valid model identifier",
        ),
        ("KeyError: 'x'\n\nDuring handling of the above exception, another exception occurred:\n\nValueError: bad x\n", "ValueError: bad x"),
        ("llamacpp: there is no such model file | where: /m | try: another\n", "llamacpp: there is no such model file | where: /m | try: another"),
        ("thread 'main' panicked at src/main.rs:1: no config\n", "thread 'main' panicked at src/main.rs:1: no config"),
        ("Segmentation fault (core dumped)\n", "Segmentation fault (core dumped)"),
        ("all is well\nfailed to open the shop\nbye\n", "failed to open the shop"),
        ("all is well\n", ""),
        ("", ""),
        # Not a cause: a warning that quotes an error, and statistics with the word in them
        ("WARNING 11-29 17:40:10 [system_utils.py:255] This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.\n", ""),
        ("Server (succeeded/failed/routed/waiting): 50 / 1 / 11 / 0, KV cache: 87.5%\n", ""),
        ("Free memory on device (22.52/23.51 GiB) on startup. Desired GPU memory utilization is (0.86, 20.32 GiB).\n", ""),
    ],
)
def test_each_kind_of_failure_gives_its_own_words(text: str, cause: str) -> None:
    assert root_cause(text) == cause


def test_a_cause_holds_no_key_no_escape_and_no_more_than_500_characters() -> None:
    text = "\x1b[31mValueError: cannot log in with api_key='geheim' at https://u:geheim@h/ \x07" + "x" * 3000
    found = root_cause(text)
    assert "geheim" not in found
    assert found.isprintable()
    assert len(found) == 500


def test_the_cause_is_the_latest_one_of_several() -> None:
    assert root_cause("ValueError: first\nValueError: second\n") == "ValueError: second"


def test_prefixes_are_taken_off_and_text_that_only_looks_like_one_stays() -> None:
    assert strip_prefix("(Worker_TP0 pid=5) ERROR 11-29 15:08:35 [x.py:1]   hello") == "hello"
    assert strip_prefix("(a note) hello") == "(a note) hello"
    assert strip_escapes("\x1b]0;title\x07a\x1b[2Kb\tc\x00\x9b") == "ab\tc"
    assert log_lines("a\r\n\n b\rc") == ["a", " b", "c"]


@given(st.text(max_size=300))
def test_any_text_has_a_cause_or_none_without_raising(text: str) -> None:
    found = root_cause(text)
    assert len(found) <= 500
    assert "\n" not in found


@given(
    st.lists(
        st.sampled_from([*PREFIXES, "ValueError: ", "Error", "(", "[", "]", "pid=", "2026-01-01 ", "error: ", "\x1b[", "\n", "a" * 99]), max_size=40
    ).map("".join)
)
def test_odd_mixtures_of_prefixes_do_not_raise(text: str) -> None:
    assert root_cause(text).isprintable() or root_cause(text) == ""
