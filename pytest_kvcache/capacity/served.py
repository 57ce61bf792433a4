"""The model behind a running server, as far as the server tells: its name and longest length always, its layers hardly ever.

vLLM, SGLang, TGI and llama.cpp name the model (and often a path on their own machine, which is never opened here) and keep heads and widths to
themselves. Ollama's ``/api/show`` gives the keys of the GGUF file, and those are enough. Everything a server says is foreign text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_kvcache.capacity.gguf_models import from_keys
from pytest_kvcache.capacity.layers import Architecture
from pytest_kvcache.errors import CannotJudge
from pytest_kvcache.server.address import Endpoint, parse_endpoint
from pytest_kvcache.server.endpoint import ServedModel, list_models
from pytest_kvcache.server.transport import Answer, ask, plain
from pytest_kvcache.settings import Settings

LIMIT_BYTES = 8 << 20
LONG_BYTES = 64 << 20
MAX_KEYS = 10_000
LISTS = ("attention.head_count_kv", "attention.head_count", "attention.sliding_window_pattern", "feed_forward_length")
TIMEOUT_S = 10.0


def read_served(url: str, assume: Mapping[str, str], settings: Settings | None = None) -> Architecture:
    """Return the layers of the model that a server serves.

    Raises CannotJudge, with what the server did tell, where it does not tell the layers; UsageError for an address that cannot be meant;
    EndpointUnreachable and EndpointRefused as the server behaves.
    """
    endpoint = parse_endpoint(url, settings or Settings())
    with endpoint.client(TIMEOUT_S) as client:
        models = [model for model in list_models(endpoint, client=client, timeout_s=TIMEOUT_S) if not model.is_adapter]
        chosen = [model for model in models if model.id == endpoint.model] if endpoint.model else models
        if len(chosen) != 1:
            names = ", ".join(plain(model.id, 60) for model in models[:10]) or "none"
            raise CannotJudge(
                f"which model of {endpoint.shown} is meant? It lists {names}", where=endpoint.shown, hint="--model NAME (of pytest: --kv-model)"
            )
        model = chosen[0]
        told = _ollama_keys(ask(endpoint, client, "POST", "/api/show", body={"model": model.id}, timeout_s=TIMEOUT_S, limit_bytes=LIMIT_BYTES))
        if told is None:
            raise _untold(endpoint, model)
        if _left_out(told):  # lists stand as null in the short answer
            body = {"model": model.id, "verbose": True}
            told = _ollama_keys(ask(endpoint, client, "POST", "/api/show", body=body, timeout_s=TIMEOUT_S, limit_bytes=LONG_BYTES)) or told
        if missing := _left_out(told):
            raise CannotJudge(
                f"cannot judge the model of {endpoint.shown}: the server leaves out {missing}",
                where=endpoint.shown,
                hint="pass the model's .gguf file",
            )
        keys = {key: value for key, value in told.items() if value is not None}
    made = from_keys(keys, endpoint.shown, assume)
    return replace(made, name=plain(model.id, 200), context=model.max_model_len or made.context)


def _ollama_keys(answer: Answer) -> dict[str, Any] | None:
    """Return the GGUF keys of Ollama's answer, None where this server is no Ollama."""
    found = answer.value if answer.status == 200 and not answer.cut else None
    keys = found.get("model_info") if isinstance(found, dict) else None
    if not isinstance(keys, dict) or not isinstance(keys.get("general.architecture"), str) or len(keys) > MAX_KEYS:
        return None
    return {str(key): value for key, value in keys.items() if value is None or isinstance(value, (bool, int, float, str, list))}


def _left_out(keys: Mapping[str, Any]) -> str:
    """Return the key that decides what layers keep and has no value in the answer, "" where there is none."""
    names = (f"{keys['general.architecture']}.{name}" for name in LISTS)
    return next((name for name in names if name in keys and keys[name] is None), "")


def _untold(endpoint: Endpoint, model: ServedModel) -> CannotJudge:
    told = [f"the model's name {plain(model.id, 120)!r}"]
    if model.max_model_len:
        told.append(f"a longest length of {model.max_model_len} tokens")
    meta = model.raw.get("meta")
    if isinstance(meta, dict) and isinstance(meta.get("n_params"), int):
        told.append(f"{meta['n_params']} parameters")
    root = model.raw.get("root")
    local = isinstance(root, str) and root.startswith(("/", "~", ".", "\\"))
    where = "; it names a path on its own machine, which is not opened" if local else ""
    return CannotJudge(
        f"cannot judge the model of {endpoint.shown}: the server tells {' and '.join(told)}, and not its layers{where}",
        where=endpoint.shown,
        hint="pass the model's config.json, its folder or its .gguf file",
    )
