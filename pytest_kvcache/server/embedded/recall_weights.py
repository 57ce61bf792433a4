"""The recall model: a two-layer Llama whose weights are constructed, not trained, so that it recalls.

Every generated token is the token that followed the earlier occurrence of the current token (one of them, where it occurred
more than once), so each answer depends on exact cache entries at any distance, and a broken KV cache shows at once. How it is made:

- every token has a code of 64 numbers; any two codes are nearly orthogonal (``token_codes``);
- layer 0 has one head whose query and key are constant vectors with the phase of one step between them. Its score is highest
  for the token just before, so it writes that token's code beside the current one;
- layer 1 matches the current token's code with those "token before" codes and copies the code of the token it finds. It uses
  only the slow RoPE frequencies, which position hardly turns;
- the MLPs are zero; the head reads the copied code.

``SLOW_AMP`` raises the constant part of layer 0's score and leaves the gap between the right token and the next best alone: the
rounding noise of a quantised K cache grows with the whole score, so it decides which precision breaks the model.

numpy is imported inside functions: importing this module costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_kvcache.server.embedded.recall_tokenizer import mute_ids, vocabulary

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float32]]

CODE = 64
HEAD_DIM = 128
HIDDEN = 256
INTERMEDIATE = 64
LAYERS = 2
HEADS = 2
KV_HEADS = 1
CONTEXT = 32768
ROPE_THETA = 1e12
RMS_EPS = 1e-6
MATCH_GAIN = 50.0
STEP_GAP = 20.0
SLOW_AMP = 2.0
FAST_FREQUENCIES = 8

_CONSTANT = CODE  # the residual stream: [0:64) code, [64] constant 1, [65:129) code of the token before, [129:193) the copied code
_BEFORE = slice(CODE + 1, 2 * CODE + 1)
_COPIED = slice(2 * CODE + 1, 3 * CODE + 1)


def token_codes(count: int) -> Array:
    """Return ``count`` unit vectors of 64 numbers, each +-1/8; two different ones have a cosine of 0, 1/8 or -1/8.

    They are words of the Kerdock code of length 64, the largest set of orthonormal bases of which any two are mutually unbiased:
    the quadratic forms Tr((ax)^3 + (ax)^5) + e Tr(ax) over GF(32) x GF(2), one for each a, plus all linear forms.
    The entries are exact in float16 and bfloat16. Holds 2,048 vectors; ValueError beyond.
    """
    import numpy as np

    if count > 32 * CODE:
        raise ValueError(f"{count} codes asked for; there are {32 * CODE}")

    def times(a: int, b: int) -> int:
        product = 0
        for bit in range(5):
            product ^= (a << bit) if b >> bit & 1 else 0
        for bit in range(8, 4, -1):
            product ^= (0b100101 << (bit - 5)) if product >> bit & 1 else 0  # x^5 + x^2 + 1
        return product

    def power(a: int, n: int) -> int:
        result = 1
        for _ in range(n):
            result = times(result, a)
        return result

    trace = [sum_bits & 1 for sum_bits in (power(a, 1) ^ power(a, 2) ^ power(a, 4) ^ power(a, 8) ^ power(a, 16) for a in range(32))]
    rows = []
    for i in range(count):
        a, linear = divmod(i, CODE)
        b, c = linear >> 1, linear & 1
        row = []
        for point in range(CODE):
            x, e = point >> 1, point & 1
            ax = times(a, x)
            row.append(trace[power(ax, 3)] ^ trace[power(ax, 5)] ^ (e & trace[ax]) ^ trace[times(b, x)] ^ (c & e))
        rows.append(row)
    return (1.0 - 2.0 * np.array(rows, dtype=np.float32)) / np.float32(np.sqrt(CODE))


def weights(slow_amp: float = SLOW_AMP) -> dict[str, Array]:
    """Return every weight of the model by its Hugging Face name, float32, rows are outputs."""
    import numpy as np

    names = vocabulary()
    size = len(names)
    code = token_codes(size)
    found: dict[str, Array] = {}

    def zeros(name: str, *shape: int) -> Array:
        return found.setdefault(name, np.zeros(shape, dtype=np.float32))

    embed = zeros("model.embed_tokens.weight", size, HIDDEN)
    embed[:, :CODE] = code
    embed[:, _CONSTANT] = 1.0
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        zeros(at + "input_layernorm.weight", HIDDEN)[:] = 1.0
        zeros(at + "post_attention_layernorm.weight", HIDDEN)[:] = 1.0
        zeros(at + "self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN)
        zeros(at + "self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        zeros(at + "self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        zeros(at + "self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        zeros(at + "mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
        zeros(at + "mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
        zeros(at + "mlp.down_proj.weight", HIDDEN, INTERMEDIATE)
    zeros("model.norm.weight", HIDDEN)[:] = 1.0

    rms = [np.sqrt(2 / HIDDEN), np.sqrt(3 / HIDDEN)]  # of the stream before each layer: two, then three unit vectors
    eye = np.eye(CODE, dtype=np.float32)

    # layer 0: score(i, j) = sum_f a_f^2 cos((i - j - 1) w_f), highest at j = i - 1
    turn = ROPE_THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    amp = np.where(np.arange(HEAD_DIM // 2) < FAST_FREQUENCIES, 1.0, slow_amp)
    a = np.sqrt(STEP_GAP * np.sqrt(HEAD_DIM) / np.sum(amp**2 * (1 - np.cos(turn)))) * amp
    at = "model.layers.0.self_attn."
    found[at + "q_proj.weight"][:HEAD_DIM, _CONSTANT] = np.concatenate([a * np.cos(turn), -a * np.sin(turn)]) * rms[0]
    found[at + "k_proj.weight"][:, _CONSTANT] = np.concatenate([a, np.zeros(HEAD_DIM // 2)]) * rms[0]
    found[at + "v_proj.weight"][:CODE, :CODE] = eye * rms[0]
    found[at + "o_proj.weight"][_BEFORE, :CODE] = eye

    # layer 1: this token's code against the "token before" codes, on the slow half of the frequencies
    scale = np.sqrt(MATCH_GAIN * np.sqrt(HEAD_DIM)) * rms[1]
    slow = np.concatenate([np.arange(HEAD_DIM // 4, HEAD_DIM // 2), np.arange(3 * HEAD_DIM // 4, HEAD_DIM)])
    at = "model.layers.1.self_attn."
    found[at + "q_proj.weight"][slow, :CODE] = eye * scale
    found[at + "k_proj.weight"][slow, _BEFORE] = eye * scale
    found[at + "v_proj.weight"][:CODE, :CODE] = eye * rms[1]
    found[at + "o_proj.weight"][_COPIED, :CODE] = eye

    head = zeros("lm_head.weight", size, HIDDEN)
    head[:, _COPIED] = code * 40.0
    head[mute_ids()] = 0.0
    head[mute_ids(), _CONSTANT] = -1000.0
    return found


def config() -> dict[str, Any]:
    """Return the content of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary()),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rope_theta": ROPE_THETA,  # how transformers 4 spells it
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},  # transformers 5
        "rms_norm_eps": RMS_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
