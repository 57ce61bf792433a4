"""lm-evaluation-harness: its tasks asked through the endpoint, and its sample logs read as quality rows that pair.

The harness runs as a program of its own (``lm_eval``, of this environment or any on the path), with ``--log_samples``; what it downloads is its
own affair. Of its logs (``samples_TASK_*.jsonl``) each line is one document under one filter, with the metrics named in ``metrics``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pytest_kvcache.errors import CannotJudge, CannotWrite, EndpointRefused, UsageError
from pytest_kvcache.quality.graders import is_garbage
from pytest_kvcache.quality.likelihood import KINDS, is_weighed, prompt_logprobs_lacking, task_kinds, tells_tokenizer
from pytest_kvcache.records import QualityRow
from pytest_kvcache.runfolder import encode_line
from pytest_kvcache.server.endpoint import Endpoint, list_models
from pytest_kvcache.server.openai import API_PATHS
from pytest_kvcache.server.startlog import redact
from pytest_kvcache.settings import Settings
from pytest_kvcache.userfiles import MARK

PART = "lm-eval"
LIMIT_S = 6 * 3600.0
CONCURRENCY = 4

_FOLDER = "lm-eval"
_NAME = re.compile(r"samples_(?P<task>.+?)_(?P<when>\d{4}-\d\d-\d\dT[\d.:-]+)\.jsonl\Z")
_LARGEST_FILE = 1 << 30
_MOST_ROWS = 1_000_000
_TASKS = re.compile(r"[\w.:/@-]+\Z")
_HINT = 'pip install "pytest-kvcache[lm-eval]", or put an lm_eval of another environment on the path'


def harness_command() -> list[str]:
    """Return how the harness is started. Raises UsageError where it is not installed."""
    if importlib.util.find_spec("lm_eval") is not None:
        return [sys.executable, "-m", "lm_eval"]
    if found := shutil.which("lm_eval"):
        return [found]
    raise UsageError("lm-evaluation-harness is not installed", where="--kv-quality-tasks", hint=_HINT)


def tasks_of(settings: Settings) -> list[str]:
    """Return the tasks that are named. Raises UsageError for what is no name."""
    tasks = [task.strip() for task in settings.quality_tasks.split(",") if task.strip()]
    if wrong := next((task for task in tasks if not _TASKS.match(task)), None):
        raise UsageError(f"{wrong[:80]!r} is no name of a task", where="--kv-quality-tasks")
    return tasks


def weighed_tasks(settings: Settings) -> list[str]:
    """Return those of the named tasks that weigh given answers by their likelihood, as far as the harness tells. Raises UsageError."""
    kinds = task_kinds(tuple(harness_command()), tuple(tasks_of(settings)), settings.quality_tasks_dir)
    return sorted(name for name, kind in kinds.items() if kind in KINDS)


def check_tasks(endpoint: Endpoint, settings: Settings) -> None:
    """Raise UsageError where the harness is not installed, or a named task asks for what the server cannot tell: before anything is measured."""
    tokenizer_for(endpoint, settings, weighed_tasks(settings))


def tokenizer_for(endpoint: Endpoint, settings: Settings, weighed: Sequence[str]) -> dict[str, str]:
    """Return how the harness splits text into tokens: not at all where answers are generated, else as ``weighed`` tasks need it.

    Raises UsageError where the server cannot tell the likelihood of a given answer, or nobody says which tokenizer is its own.
    """
    if not weighed:
        return {"tokenizer_backend": "None", "tokenized_requests": "False"}
    named = ", ".join(weighed[:5])
    if why := prompt_logprobs_lacking(endpoint):
        raise UsageError(
            f"{named} weighs given answers by their likelihood, and this server cannot tell it: {why}",
            where="--kv-quality-tasks",
            hint="tasks that generate their answers; vLLM and SGLang tell likelihoods",
        )
    if settings.quality_tokenizer:
        folder = Path(settings.quality_tokenizer)
        tokenizer = str(folder.absolute()) if folder.exists() else settings.quality_tokenizer
        return {"tokenizer_backend": "huggingface", "tokenizer": tokenizer, "tokenized_requests": "True"}
    if tells_tokenizer(endpoint):
        return {"tokenizer_backend": "remote", "tokenized_requests": "True"}
    raise UsageError(
        f"{named} weighs given answers by their likelihood, and for that the harness needs the model's tokenizer",
        where="--kv-quality-tasks",
        hint="--kv-quality-tokenizer FOLDER (or its name on the Hub), or a vLLM started with --enable-tokenizer-info-endpoint",
    )


def command(endpoint: Endpoint, settings: Settings, output: Path, weighed: Sequence[str] = ()) -> list[str]:
    """Return the command that asks ``settings.quality_tasks`` through the endpoint; it holds no key. Raises UsageError.

    Answers are generated and read as text, so that no tokenizer is needed; ``weighed`` names tasks that weigh given answers by their likelihood.
    """
    tasks = tasks_of(settings)
    if "," in settings.quality_tokenizer:
        raise UsageError("the harness cannot take a tokenizer with a comma in its name", where="--kv-quality-tokenizer")
    if "," in endpoint.model or "," in endpoint.root:
        raise UsageError("the harness cannot take a model name or address with a comma in it", where=endpoint.shown)
    model = {
        "model": endpoint.model,
        "base_url": endpoint.url(API_PATHS[endpoint.api]),
        "num_concurrent": str(CONCURRENCY),
        "max_retries": "2",
        **tokenizer_for(endpoint, settings, weighed),
        **_longest(endpoint),
        "timeout": f"{settings.request_timeout_s:g}",
        **({"ca_cert_path": endpoint.ca} if endpoint.ca else {}),
    }
    words = [*harness_command(), "run", "--model", f"local-{'chat-' if endpoint.api == 'chat' else ''}completions"]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items()), "--tasks", ",".join(tasks)]
    words += ["--output_path", str(output), "--log_samples", "--gen_kwargs", "temperature=0"]
    if settings.quality_tasks_dir:
        words += ["--include_path", str(Path(settings.quality_tasks_dir).absolute())]
    if settings.quality_tasks_limit:
        words += ["--limit", str(settings.quality_tasks_limit)]
    if endpoint.api == "chat":
        words.append("--apply_chat_template")
    return words


def ask_tasks(endpoint: Endpoint, settings: Settings, folder: Path) -> list[QualityRow]:
    """Run the tasks through the endpoint and append a row for each document to quality.jsonl; the harness's own logs lie in ``lm-eval/``.

    Without ``settings.keep_text`` its logs, which hold prompts and answers, are removed once they are read. Raises UsageError where the harness
    is not installed, or a task asks for what the server cannot tell; EndpointRefused where it fails, CannotJudge, CannotWrite.
    """
    output = folder / _FOLDER
    weighed = weighed_tasks(settings)
    words = command(endpoint, settings, output, weighed)
    environ = {**os.environ, "OPENAI_API_KEY": _key(endpoint), "TOKENIZERS_PARALLELISM": "false"}
    log = folder / "lm-eval.log"
    try:
        output.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environ, cwd=folder, start_new_session=True)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    except OSError as error:
        raise CannotWrite(f"the tasks cannot be run: {error.strerror or error}", where=str(folder), hint=_HINT) from None
    said = redact(log.read_text(errors="replace")[-200_000:])
    log.write_text(said)
    if code:
        last = [line.strip() for line in said.splitlines() if line.strip()][-1:] or ["it said nothing"]
        raise EndpointRefused(f"lm-evaluation-harness ended with exit code {code}: {last[0][:300]}", where=str(log), hint="its log is there")
    rows = read_samples(output)
    if not weighed and any(is_weighed(next(_lines(file), None)) for file in _newest(output)) and (why := prompt_logprobs_lacking(endpoint)):
        raise CannotJudge(f"answers were weighed by their likelihood, which this server cannot tell: {why}", where=str(log), hint="other tasks")
    try:
        with (folder / "quality.jsonl").open("ab") as file:
            file.writelines(encode_line(row) for row in rows)
        if not settings.keep_text:
            shutil.rmtree(output, ignore_errors=True)
    except OSError as error:
        raise CannotWrite(f"cannot write the quality rows: {error.strerror or error}", where=str(folder), hint="free space") from None
    return rows


def _longest(endpoint: Endpoint) -> dict[str, str]:
    """Return the longest context, so that the harness does not cut prompts at its own default; nothing where the server does not tell."""
    told = next((model.max_model_len for model in list_models(endpoint) if model.id == endpoint.model), None)
    return {"max_length": str(told)} if told else {}


def _key(endpoint: Endpoint) -> str:
    said = endpoint.api_headers().get("Authorization", "")
    return said.removeprefix("Bearer ") or "none"


def read_samples(path: Path, metric: str = "") -> list[QualityRow]:
    """Return the documents of sample logs as quality rows of the part ``lm-eval``: of one file, or of the newest run of each task below a folder.

    A document passed where its metric is 1: ``metric``, else the first of the task's that is 0 or 1 everywhere. Of several filters the first one
    counts. Rows pair by task and document, and only where prompt and target are the same. Raises CannotJudge for a log that is none, is
    damaged, or has no such metric.
    """
    files = [path] if path.is_file() else _newest(path)
    if not files:
        raise CannotJudge("no sample log of lm-evaluation-harness is here", where=str(path), hint="run it with --log_samples --output_path")
    rows: list[QualityRow] = []
    for file in files:
        found = _NAME.search(file.name)
        task = found.group("task") if found else file.stem
        rows += _rows(file, task, list(_lines(file)), metric)
    return rows


def _newest(folder: Path) -> list[Path]:
    newest: dict[tuple[Path, str], tuple[str, Path]] = {}
    for file in sorted(folder.rglob("samples_*.jsonl"))[:10_000]:
        if found := _NAME.search(file.name):
            key = (file.parent, found.group("task"))
            newest[key] = max(newest.get(key, ("", file)), (found.group("when"), file))
    return [file for _, file in newest.values()]


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise CannotJudge("the sample log is larger than 1 GiB", where=str(file), hint="limit the documents")
        with file.open("rb") as held:
            for number, line in enumerate(held, start=1):
                if number > _MOST_ROWS:
                    raise CannotJudge(f"more than {_MOST_ROWS:,} samples", where=str(file), hint="limit the documents")
                if line.strip():
                    try:
                        yield decoder.decode(line.removeprefix(MARK) if number == 1 else line)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        raise CannotJudge(f"line {number} is no sample of lm-evaluation-harness", where=str(file), hint="run it again") from None
    except OSError as error:
        raise CannotJudge(f"the sample log cannot be read: {error.strerror or error}", where=str(file), hint="check the path") from None


def _rows(file: Path, task: str, samples: Sequence[Mapping[str, Any]], metric: str) -> list[QualityRow]:
    if not samples:
        raise CannotJudge("the sample log is empty", where=str(file), hint="run the task again")
    chosen = next((str(sample["filter"]) for sample in samples if "filter" in sample), "")
    samples = [sample for sample in samples if str(sample.get("filter", chosen)) == chosen]
    listed = samples[0].get("metrics")
    names = [metric] if metric else [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    name = next((name for name in names if all(_passed(sample.get(name)) is not None for sample in samples)), None)
    if name is None:
        offered = ", ".join(names)[:200] or "none"
        raise CannotJudge(
            f"task {task}: no metric says pass or fail of every document (there: {offered})", where=str(file), hint="name one that is 0 or 1"
        )
    rows = []
    for sample in samples:
        asked = [str(sample.get(key, "")) for key in ("prompt_hash", "target_hash", "doc_hash")]
        said = sample.get("filtered_resps", sample.get("resps"))
        text = said[0] if isinstance(said, list) and said and isinstance(said[0], str) else ""
        rows.append(
            QualityRow(
                f"{task}-{sample.get('doc_id')}",
                bool(_passed(sample.get(name))),
                part=PART,
                match=f"{PART}:{name}" + (f" ({chosen})" if chosen not in {"", "none"} else ""),
                expected_hash=_hash("\0".join([*asked, name, chosen])),
                answer_hash=_hash(msgspec.json.encode(said).decode()),
                note="one character repeated" if is_garbage(text) else "",
            )
        )
    return rows


def _passed(value: Any) -> bool | None:
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
