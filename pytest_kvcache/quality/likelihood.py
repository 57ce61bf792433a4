"""Tasks of lm-evaluation-harness that weigh given answers by their likelihood, and what they need of a server: the log-probabilities of a prompt.

The harness sends context and answer as one prompt with ``echo`` and adds up what the server says of the answer's tokens. A server that says
nothing of a prompt (llama.cpp) makes every answer equally likely, and the score is that of a coin: so it is asked before, and refused.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from pytest_kvcache.errors import EndpointUnreachable
from pytest_kvcache.server.endpoint import Endpoint, complete
from pytest_kvcache.server.openai import client_for
from pytest_kvcache.server.transport import ask

KINDS = frozenset({"loglikelihood", "loglikelihood_rolling", "multiple_choice"})
"""The output types of the harness that are likelihoods."""

_PROBE = "one two three four five six seven eight"
_PROBE_S = 300.0  # vLLM's CPU build compiles at the first request for log-probabilities
_LISTING_S = 300.0
# run by the Python that the harness is installed for: its own index says what a task is, and building the tasks would download their data
_LISTING = """
import json, sys
from lm_eval.tasks import TaskManager
index = TaskManager(include_path=sys.argv[1] or None).task_index
found = {}
def config(name):
    entry = index[name]
    told = getattr(entry, "cfg", None)
    if told is None:
        from lm_eval import utils
        told = utils.load_yaml_config(entry["yaml_path"] if isinstance(entry, dict) else entry.yaml_path, mode="simple")
    return told
def walk(name, depth):
    told = config(name)
    below = told.get("task")
    if isinstance(below, list) and depth < 6:
        for one in below:
            walk(one if isinstance(one, str) else one["task"], depth + 1)
    else:
        found[name] = "" if "class" in told else told.get("output_type", "generate_until")
for name in sys.argv[2:]:
    try:
        walk(name, 0)
    except Exception:
        tagged = [other for other, entry in index.items() if name in getattr(entry, "tags", ())]
        found.update({other: (config(other) or {}).get("output_type", "") for other in tagged} or {name: ""})
print(json.dumps(found))
"""


@functools.lru_cache(maxsize=8)
def task_kinds(words: tuple[str, ...], tasks: tuple[str, ...], include: str) -> dict[str, str]:
    """Return the output type of each task, groups taken apart, "" where that is not known; empty where the harness cannot be asked.

    ``words`` is how the harness is started: ``PYTHON -m lm_eval``, or a script that names its Python in its first line.
    """
    python = words[0] if len(words) > 1 else _python_of(Path(words[0]))
    if not python:
        return {}
    command = [python, "-c", _LISTING, str(Path(include).absolute()) if include else "", *tasks]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LISTING_S, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        told = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return {}
    return {str(name): str(kind) for name, kind in told.items()} if isinstance(told, dict) else {}


def _python_of(script: Path) -> str:
    """Return the Python that a script names in its first line; "" where it names none."""
    try:
        with script.open("rb") as file:
            first = file.readline(500).decode(errors="replace").strip()
    except OSError:
        return ""
    words = first.removeprefix("#!").split()
    return words[0] if first.startswith("#!") and len(words) == 1 and "python" in Path(words[0]).name else ""


def prompt_logprobs_lacking(endpoint: Endpoint) -> str:
    """Return why likelihoods cannot be had of a server; "" where it tells the log-probabilities of a prompt's own tokens."""
    if endpoint.api != "completions":
        return "the chat API tells no log-probabilities of a prompt (--kv-api completions does where the server has it)"
    try:
        done = complete(endpoint, _PROBE, 1, timeout_s=_PROBE_S, echo=True, logprobs=1)
    except EndpointUnreachable as gone:
        return f"asked for the log-probabilities of a prompt, the server did not answer: {gone.what[:200]}"
    if done.status != 200 or done.error:
        return f"asked for the log-probabilities of a prompt (echo), the server says: {(done.error or f'HTTP {done.status}')[:200]}"
    told = _told(done.body)
    if len(told) < 4 or sum(isinstance(one, int | float) for one in told) < len(told) - 1:
        return f"asked for the log-probabilities of a prompt (echo), the server tells those of {len(told)} token{'s' * (len(told) != 1)}: it gives those of its own answer alone"
    return ""


def _told(body: Any) -> list[Any]:
    """Return the log-probabilities of an answer in the form of the completions API; empty where there are none in that form."""
    choices = body.get("choices") if isinstance(body, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    found = choice.get("logprobs")
    if not isinstance(found, dict):
        return []
    told = found.get("token_logprobs")
    content = found.get("content")
    return told if isinstance(told, list) else [None] * len(content) if isinstance(content, list) else []


def tells_tokenizer(endpoint: Endpoint) -> bool:
    """Return whether the server lets the harness use its tokenizer (vLLM with --enable-tokenizer-info-endpoint)."""
    try:
        with client_for(endpoint, None, 10.0) as client:
            answer = ask(endpoint, client, "GET", "/tokenizer_info", timeout_s=10.0)
    except EndpointUnreachable:
        return False
    return answer.status == 200 and isinstance(answer.value, dict) and "eos_token" in answer.value


def is_weighed(sample: Any) -> bool:
    """Return whether a line of a sample log holds likelihoods: pairs of a log-probability and whether it was the likeliest."""
    said = sample.get("resps") if isinstance(sample, dict) else None
    first = said[0] if isinstance(said, list) and said else None
    pair = first[0] if isinstance(first, list) and first else None
    return isinstance(pair, list) and len(pair) == 2 and str(pair[1]) in {"True", "False"}
