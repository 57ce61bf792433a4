"""llama.cpp's own server, out of the wheel ``xllamacpp``, on the recall model: ``python -m pytest_kvcache.server.embedded.llamacpp --port P``.

It serves until TERM or Ctrl-C and writes llama.cpp's log to its output. Exit code: 0 stopped when asked, 1 the server could not
start (port taken, model unreadable), 2 an option cannot be meant.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_kvcache.errors import KvError, LaunchFailed, UsageError
from pytest_kvcache.server.embedded import recall, recall_weights

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
CONTEXT_PER_SLOT = 4096
MAX_SLOTS = 256  # llama.cpp's own limit of sequences
MAX_CONTEXT = 1 << 22
LOG_INFO = 4  # the level that has the lines of the KV cache and of each request, and none a token
# Each open connection holds one of the HTTP threads, idle or streaming. llama.cpp's default (8 on a small machine) would let
# a load of more users starve every read of /metrics.
HTTP_THREADS = 256


@dataclass(frozen=True)
class LlamaOptions:
    """The options of one server. ``ctx`` is the whole pool in tokens, over all slots."""

    port: int
    host: str = "127.0.0.1"
    ctx: int = 4 * CONTEXT_PER_SLOT
    slots: int = 4
    kv_type: str = "f16"
    unified: bool = False
    model: Path | None = None
    alias: str = recall.MODEL_NAME
    threads: int = 0
    prefix_cache: bool = True
    cache_ram: int = 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"llamacpp: {message}", hint="llamacpp --help lists the options")


def _number(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        try:
            value = int(text.replace(",", "").replace("_", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value:,} is outside {low:,} to {high:,}")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options; it raises UsageError where argparse would exit."""
    made = _Parser(prog="llamacpp", allow_abbrev=False, description="llama.cpp's server on the embedded recall model")
    add = made.add_argument
    add("--port", type=_number(1, 65535), help="port to listen on; chosen for you when launched by pytest-kvcache")
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--ctx", type=_number(256, MAX_CONTEXT), help="tokens of the whole KV pool, over all slots, as llama.cpp's -c (default: 4096 a slot)")
    add("--slots", type=_number(1, MAX_SLOTS), default=4, help="requests served at once (default: 4)")
    add("--kv-type", choices=KV_TYPES, default="f16", help="type of the cache's keys and values (default: f16)")
    add("--unified", action=argparse.BooleanOptionalAction, default=False, help="one pool for all slots instead of an equal part for each")
    add("--model", type=Path, help="another GGUF file than the recall model")
    add("--alias", default="", help="name that the model is served under (default: recall, or the file's name)")
    add("--threads", type=_number(1, 1024), default=0, help="CPU threads that compute (default: half of the CPUs, at most 4)")
    add("--prefix-cache", action=argparse.BooleanOptionalAction, default=True, help="reuse what a slot still holds of an earlier prompt")
    add("--cache-ram", type=_number(0, 1 << 20), default=0, help="MiB outside the pool for prompts of idle slots (default: 0, none)")
    return made


def parse_options(words: Sequence[str]) -> LlamaOptions:
    """Return the options that ``words`` say. Raises UsageError, and SystemExit after printing the help for ``--help``."""
    found = parser().parse_args(list(words))
    if found.port is None:
        raise UsageError("llamacpp: no --port", hint="--port 8080")
    if found.model is not None and not found.model.is_file():
        raise UsageError("llamacpp: there is no such model file", where=str(found.model), hint="--model takes a GGUF file")
    ctx = found.ctx or CONTEXT_PER_SLOT * found.slots
    if not found.unified and ctx // found.slots < 256:
        raise UsageError(
            f"llamacpp: --ctx {ctx:,} leaves fewer than 256 tokens for each of {found.slots} slots", hint="--ctx is the whole pool; raise it"
        )
    if found.model is None and not found.unified and ctx // found.slots > recall_weights.CONTEXT:
        raise UsageError(
            f"llamacpp: --ctx {ctx:,} is more than {recall_weights.CONTEXT:,} tokens for each of {found.slots} slots, which the recall model holds"
        )
    return LlamaOptions(
        port=found.port,
        host=found.host,
        ctx=ctx,
        slots=found.slots,
        kv_type=found.kv_type,
        unified=found.unified,
        model=found.model,
        alias=found.alias or (found.model.stem if found.model else recall.MODEL_NAME),
        threads=found.threads or max(1, min(4, len(os.sched_getaffinity(0)) // 2)),
        prefix_cache=found.prefix_cache,
        cache_ram=found.cache_ram,
    )


def check_port(host: str, port: int) -> None:
    """Raise LaunchFailed where nobody can listen at the address: it is taken, not ours, or no address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise LaunchFailed(
            f"llamacpp: cannot listen on {host}:{port}: {error.strerror or error}", hint="end the other server, or take another port"
        ) from None


def serve(options: LlamaOptions) -> NoReturn:
    """Serve until TERM or INT, then end the process. Raises UsageError (wheel missing), CannotWrite (no model cache) and LaunchFailed."""
    recall.need_libraries("xllamacpp")
    model = options.model or recall.model_paths().gguf
    check_port(options.host, options.port)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {options.alias}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_ctx = options.ctx
    params.n_parallel = options.slots
    params.kv_unified = options.unified
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options.kv_type.upper()}")
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED  # a quantised V cache needs it
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_threads_http = HTTP_THREADS
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.cache_prompt = options.prefix_cache
    params.cache_ram_mib = options.cache_ram
    params.fit_params = False  # never another context size than the one asked for
    params.ui = False
    params.offline = True
    params.cors_origins = ""
    params.verbosity = LOG_INFO

    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        raise LaunchFailed(f"llamacpp: the server did not start with {model.name}: {error}", hint="the lines above are llama.cpp's reasons") from None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _say(f"llamacpp: serving {options.alias} at {server.listening_address}")
    stop.wait()
    _say("llamacpp: stopping")
    # Not through the server's own destructor: it waits for running requests, with Python's lock held, so nothing could cut it short.
    # There is nothing to save, and the operating system closes the rest.
    os._exit(0)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main(words: Sequence[str] | None = None) -> int:
    """Run the server with the words of the command line; return the exit code."""
    try:
        serve(parse_options(sys.argv[1:] if words is None else words))
    except KvError as error:
        _say(" | ".join(line.strip() for line in str(error).splitlines()))
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
