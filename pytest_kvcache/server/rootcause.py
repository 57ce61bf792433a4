"""Why a server did not start: the one sentence of its log that says it, with its numbers.

A log of a failed start ends in wrappers ("Engine core initialization failed. See root cause above"), and the cause stands
somewhere above them. Known sentences are looked for first, the latest one wins; then the last line of the last Python traceback
that is not a wrapper; then what an engine of ours said; then the last line that calls itself an error.
"""

from __future__ import annotations

import re

from pytest_kvcache.server.redaction import redact

_MAX_CHARS = 500
_MAX_LINE = 2000
_MAX_LINES = 5000
_MAX_TEXT = 4 << 20
_PREFIXED = 160  # within it a line says of itself that it only warns

_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]")

_CONTROLS = dict.fromkeys(code for code in (*range(32), 127) if chr(code) not in "\n\r\t")

# What loggers and process managers write in front of a line, outermost first; each may come once more inside another.
_PREFIX = re.compile(
    r"\s*(?:"
    r"\([^()]{0,80}pid=[0-9]+[^()]{0,80}\)"  # (EngineCore pid=3207), Ray's (Worker pid=1, ip=...)
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) [0-9]{2}-[0-9]{2} [0-9:.]{8,15} (?:\[[^\]]{1,80}\]|[\w./-]{1,60}:[0-9]+\])"  # vLLM
    r"|\[[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:.,]{8,15}[^\]]{0,60}\]"  # SGLang: [2026-09-09 11:57:18 TP0]
    r"|\[TensorRT-LLM\]\s?\[[A-Z]+\]|\[[0-9/]{8,10}-[0-9:]{8}\] \[TRT-LLM\] \[[A-Z]\]"
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.,]{8,18}Z?(?:\s+-)?(?:\s+(?:[\w.]{1,60} - )?(?:DEBUG|INFO|WARN|WARNING|ERROR)\b)?(?:\s+[\w:]{3,60}:)?"  # TGI, plain logging
    r"|[0-9]{1,3}\.[0-9]{2}\.[0-9]{3}\.[0-9]{3} [DIWE] "  # llama.cpp with --log-prefix
    r"|(?:ERROR|CRITICAL|FATAL|Error|error|fatal):\s{1,8}(?=\S)"
    r")\s?"
)

# Sentences that engines are known to say, each found anywhere in a line.
_SENTENCES = (
    # vLLM, V1 and V0: the pool does not hold one request, or there is none
    r"To serve at least one request with the models?'s max seq len",
    r"The model's max seq len \([0-9,]+\) is larger than the maximum number of tokens that can be stored in KV cache",
    r"No available memory for the cache blocks",
    r"Free memory on device\b[^\n]{0,120}? on startup is less than desired GPU memory utilization",
    r"Error in memory profiling\.",
    r"Available memory on node [0-9]+ [^\n]{0,120}? is less than (?:requested memory for kv|desired CPU memory utilization)",
    r"Free memory on device\b[^\n]{0,120}? on startup is less than the engine's budget",
    r"Externally held weights on device",
    r"Cannot auto-fit max_model_len",
    r"HiSparse (?:host pool has [0-9]+ blocks but|has no allocatable host blocks)",
    r"No common block size for ",
    r"Block size (?:must|should|[0-9]+ is not|of [0-9]+ is not)",
    r"User-specified max_model_len \(?[0-9,]+\)? is greater than the derived max_model_len",
    r"(?:CUDA|HIP|XPU) out of memory occurred when warming up sampler",
    r"max_num_batched_tokens \([0-9,]+\) (?:is smaller than max_model_len|must be greater than or equal to max_num_seqs)",
    r"Total number of attention heads \([0-9]+\) must be divisible by tensor parallel size",
    r"Bfloat16 is only supported on GPUs with compute capability",
    r"World size \([0-9]+\) is larger than the number of available GPUs",
    # SGLang
    r"Not enough memory\. Please try to increase --mem-fraction-static",
    r"Loaded weights leave no GPU memory for the KV cache",
    r"The memory capacity is unbalanced",
    r"User-specified context_length \([0-9,]+\) is greater than the derived context_length",
    r"Not enough GPU memory for hybrid state cache",
    r"[^\n]{0,60}state cache is too small to serve any requests",
    r"Capture \w{2,6} graph failed: (?![^\n]{0,40}out of memory)",
    # TensorRT-LLM
    r"Executor creation failed due to insufficient GPU memory",
    r"maxTokensInPagedKvCache[^\n]{0,40}must be large enough",
    # TGI
    r"Not enough memory to handle (?:`max_total_tokens=[0-9]+`|[0-9]+ prefill tokens)",
    r"`max_total_tokens` must be <= `max_batch_total_tokens`",
    r"`max_batch_prefill_tokens` must be >= `max_input_\w{5,6}`",
    r"`max_input_\w{5,6}` must be < `max_total_tokens`",
    r"sharded is true but only found [0-9]+ CUDA devices",
    # LMDeploy
    r"No enough gpu memory for (?:kv cache|runtime|state cache)",
)
# Words that make a whole line the cause.
_LINES = (
    # llama.cpp
    r"\bgguf_init_from_\w{1,20}: ",
    r"error loading model(?: \w{1,20}){0,2}: (?!llama_model_loader: failed to load model from)",
    r"failed to allocate buffer for kv cache",
    r"failed to allocate compute \w{1,4} ?buffers",
    r"V cache quantization requires flash.?attn",
    r"couldn't bind (?:HTTP )?server socket",
    r"cudaMalloc failed: out of memory",
    r"^(?:error: )?invalid argument: ",
    r"error while handling argument ",
    # any engine
    r"(?:CUDA|HIP|XPU) out of memory\.",
    r"CUDA (?:runtime )?error[^\n]{0,200}out of memory",
    r"\bNCCL error\b|\bnccl(?:System|UnhandledCuda|Internal|Remote|InvalidUsage)Error\b",
    r"no kernel image is available for execution",
    r"driver version is insufficient|NVIDIA driver on your system is too old",
    r"No CUDA GPUs are available|no CUDA-capable device is detected|Failed to infer device type",
    r"You are trying to access a gated repo|Access to model [^\n]{1,100} is restricted",
    r"failed to listen on any local network address",
    r"address (?:is )?already in use",
    r"no space left on device",
    r": command not found\b",
    r": line [0-9]{1,9}: [^\n]{1,120}: No such file or directory",
    r"^(?:/bin/)?(?:ba|da|z)?sh: (?:[0-9]{1,9}: )?[^\n]{1,120}: (?:not found|No such file or directory)",
    r"^env: [^\n]{1,120}: No such file or directory",
    r": No module named ",
    r"^[^:\s]{1,60}: error: ",
    r"\berror: (?:unrecognized arguments?|the following arguments are required|ambiguous option|unexpected argument)",
)
_KNOWN = re.compile(f"(?P<sentence>{'|'.join(_SENTENCES)})|(?P<line>{'|'.join(_LINES)})", re.IGNORECASE)

# Sentences whose numbers stand far from their beginning: pasted into a page of text they are broken over several lines.
_LONG = re.compile(
    r"To serve at least one request with|The model's max seq len \(|Free memory on device\b|Externally held weights|Available memory on node [0-9]|Error in memory profiling\."
    r"|User-specified (?:max_model_len|context_length)|No available memory for"
)
_MOST_JOINED = 6

_EXCEPTION = re.compile(r"(?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Fault|NotFound|Expired|Missing\w*)(?::\s*\S.*|\Z)")
_WRAPPERS = re.compile(
    r"scheduler died during initialization|Rank [0-9]+ scheduler is dead|EngineCore failed to start|EngineCore encountered an issue|EngineDeadError|Engine core initialization failed|Failed core proc"
    r"|Engine process failed to start|WorkerProc initialization failed|(?:see|check) (?:the )?(?:stack trace|root cause)|SystemExit|KeyboardInterrupt|CancelledError"
    r"|BrokenPipeError|ConnectionResetError|EOFError|ShardCannotStart|ChildFailedError|ActorDiedError|Exception in thread|Worker \w+ died"
)
# A process that was ended from outside says nothing itself; who waited for it tells.
_KILLED = re.compile(r"exit ?code:? -9\b|: -9[,}]|\bsignal 9\b|\bSIGKILL\b|^Killed$|exited with code 137|OOMKilled", re.IGNORECASE)
# What our own engines say when they cannot start: "llamacpp: there is no such model file | where: ... | try: ..."
_OURS = re.compile(r"[a-z-]{2,30}: [^\n]{1,400} \| (?:where|try):")
_SHOUT = re.compile(
    r"^(?:fatal )?error\b|\berror: |\bfatal\b|\bfailed (?:to|with)\b|\b(?:cannot|can't|could not|couldn't|unable to)\b|panicked at"
    r"|segmentation fault|illegal instruction|terminate called|exiting due to|^killed\b|^aborted\b|assertion .{0,60}failed",
    re.IGNORECASE,
)
_QUIET = re.compile(r"\b(?:INFO|DEBUG|WARNING|WARN)\b|\bWarning: ")


def strip_escapes(text: str) -> str:
    """Return text without colour codes and other escape sequences, and without control characters other than line ends and tabs."""
    text = _ESCAPE.sub("", text)
    if text.isascii():  # most logs are, and a log may be long
        return text.translate(_CONTROLS)
    return "".join(char for char in text if char.isprintable() or char in "\n\r\t")


def strip_prefix(line: str) -> str:
    """Return a log line without what loggers and process managers wrote in front of it."""
    for _ in range(4):
        match = _PREFIX.match(line)
        if match is None:
            break
        line = line[match.end() :]
    return line.strip()


def log_lines(text: str, width: int = _MAX_LINE) -> list[str]:
    """Return the lines of a log, escape sequences taken out, each cut at ``width``; carriage returns end a line too (progress bars)."""
    return [line[:width] for line in re.split(r"[\r\n]+", strip_escapes(text)) if line.strip()]


def last_lines(text: str, count: int = 12, width: int = 240) -> list[str]:
    """Return the last lines of a log, harmless and without keys, each at most ``width`` characters."""
    lines = log_lines(redact(text))[-count:]
    return [line if len(line) <= width else line[: width - 1] + "…" for line in (line.replace("\t", "  ").rstrip() for line in lines)]


def root_cause(text: str) -> str:
    """Return the sentence of a start-up log that says why the server did not start, "" where none does. Never raises.

    One line, at most 500 characters, keys and control characters taken out.
    """
    raw = log_lines(text[-_MAX_TEXT:])[-_MAX_LINES:]
    lines = [strip_prefix(line) for line in raw]
    lines = [_whole(raw, lines, number) if _LONG.search(line) else line for number, line in enumerate(lines)]
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number]
        found = _KNOWN.search(line)
        # What an engine only warns of did not stop it: some of these sentences are warnings where the user allows the thing.
        if found is not None and not _WRAPPERS.search(line) and not _QUIET.search(raw[number][:_PREFIXED]):
            whole = found.group("line") is not None or _EXCEPTION.match(line)
            return _tidy(line if whole else line[found.start() :])
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        if _EXCEPTION.match(line) and not _WRAPPERS.search(line):
            return _tidy(_with_details(lines, index))
    for line in reversed(lines):
        if _OURS.match(line):
            return _tidy(line)
    for line in reversed(lines):
        if _KILLED.search(line):
            return _tidy(line)
    for index in range(len(lines) - 1, -1, -1):
        if _SHOUT.search(lines[index][:_MAX_CHARS]) and not _WRAPPERS.search(lines[index]) and not _QUIET.search(raw[index]):
            return _tidy(lines[index])
    return ""


def _whole(raw: list[str], lines: list[str], number: int) -> str:
    """Return a long sentence with the lines over which it was broken: bare ones that follow it, up to a full stop at a line's end."""
    line = lines[number]
    for following in range(number + 1, min(number + 1 + _MOST_JOINED, len(lines))):
        more = lines[following]
        bare = more == raw[following].strip() and re.match(r"[\w`(-]", more) and not re.match(r"Traceback|File \"", more)
        if line.endswith((".", "```")) or not bare or _EXCEPTION.match(more) or _LONG.search(more):
            break
        line = f"{line} {more}"
    return line[:_MAX_LINE]


def _with_details(lines: list[str], index: int) -> str:
    """Return an exception's line, with the first of its details where it only counts them (pydantic's validation errors)."""
    line = lines[index]
    if not re.search(r"[0-9]+ validation errors? for", line):
        return line
    details = [re.sub(r"\s*\[type=.*", "", detail) for detail in lines[index + 1 : index + 4]]
    return f"{line}: {' '.join(details[:2])}" if details else line


def _tidy(sentence: str) -> str:
    sentence = redact(" ".join(sentence.split()))
    if sentence.endswith('")') and '("' not in sentence:
        sentence = sentence[:-2]  # the end of what it stood in: ArgumentValidation("...")
    return sentence if len(sentence) <= _MAX_CHARS else sentence[: _MAX_CHARS - 1] + "…"
