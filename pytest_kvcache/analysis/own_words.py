"""What a finding's action calls an option: by the engine's own name, so that it can be typed.

Names of the options: vLLM ``vllm serve --help``, llama.cpp ``llama-server --help``, SGLang ``ServerArgs``, TensorRT-LLM ``trtllm-serve --help``,
LMDeploy ``lmdeploy serve api_server --help``.
"""

from __future__ import annotations

_VLLM = {"seats": "max-num-seqs", "step": "max-num-batched-tokens"}
_SGLANG = {"seats": "--max-running-requests", "step": "--chunked-prefill-size"}
_OWN = {
    "vllm": _VLLM,
    "ray_vllm": _VLLM,
    "llamacpp": {"seats": "the number of slots (--parallel)", "step": "batch (--batch-size)"},
    "sglang": _SGLANG,
    "ray_sglang": _SGLANG,
    "trtllm_serve": {"seats": "--max_batch_size", "step": "--max_num_tokens"},
    "triton_trtllm": {"seats": "max_batch_size", "step": "max_num_tokens"},
    "lmdeploy": {"seats": "--max-batch-size", "step": "--max-prefill-token-num"},
}
_ANY = {"seats": "the number of seats", "step": "token budget of a step"}
_GENERAL = {
    "seats": "the number of seats (vLLM max-num-seqs, llama.cpp --parallel, SGLang --max-running-requests)",
    "step": "token budget of a step (vLLM max-num-batched-tokens, llama.cpp --batch-size, SGLang --chunked-prefill-size)",
}


def in_own_words(text: str, engine: str | None = None) -> str:
    """Return a rule's text with ``{seats}`` and ``{step}`` as ``engine`` calls them; without one as several engines do; for an unknown one in words."""
    words = _GENERAL if engine is None else _OWN.get(engine, _ANY)
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    return text
