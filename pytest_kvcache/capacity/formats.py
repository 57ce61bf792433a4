"""How many bytes a vector takes in each data type of a KV cache, scales included.

Sources: the type sizes of PyTorch; the block layouts of llama.cpp's ggml types (a half-precision scale per 32 elements, and a minimum in the ``_1``
types); vLLM 0.32's cache types: ``nvfp4`` keeps a one-byte scale per 16 elements, ``*_per_token_head`` a 4-byte scale after each head's K and V, and
``fp8_ds_mla`` 512 bytes of latent, 16 bytes of scales and the rotary part in bfloat16; ``nvfp4_ds_mla`` half a byte per element of the latent, a
one-byte scale per 16, and the rotary part in fp8. A plain ``fp8`` or ``int8`` has its scales per tensor or layer, outside the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_kvcache.errors import CannotJudge, UsageError


@dataclass(frozen=True, slots=True)
class Format:
    """A data type of a cache: ``block`` elements take ``block_bytes`` bytes, and each head's vector ``per_head_bytes`` more."""

    name: str
    block: int
    block_bytes: int
    per_head_bytes: int = 0
    latent_of_its_own: bool = False

    def vector_bytes(self, heads: int, size: int) -> int:
        """Return the bytes of ``heads`` vectors of ``size`` elements for one token. Raises UsageError where the elements do not fill whole blocks."""
        elements = heads * size
        if elements % self.block:
            raise UsageError(f"{heads} heads of {size} elements are not whole blocks of {self.block}, so they cannot be kept as {self.name}")
        return elements // self.block * self.block_bytes + heads * self.per_head_bytes


def _formats() -> dict[str, Format]:
    made: dict[str, Format] = {}

    def add(names: str, block: int, block_bytes: int, per_head_bytes: int = 0, own: bool = False) -> None:
        first, *others = names.split()
        for name in (first, *others):
            made[name] = Format(first, block, block_bytes, per_head_bytes, own)

    add("float32 fp32 f32 float", 1, 4)
    add("bfloat16 bf16", 1, 2)
    add("float16 fp16 f16 half", 1, 2)
    add("fp8 float8 f8", 1, 1)
    add("fp8_e4m3 fp8_e4m3fn float8_e4m3 float8_e4m3fn", 1, 1)
    add("fp8_e5m2 float8_e5m2", 1, 1)
    add("fp8_inc", 1, 1)
    add("int8", 1, 1)
    add("int4", 2, 1)
    add("fp8_per_token_head", 1, 1, 4)
    add("int8_per_token_head", 1, 1, 4)
    add("int4_per_token_head", 2, 1, 4)
    add("nvfp4 nvfp4_4over6 fp4_e2m1", 16, 9)
    add("fp8_ds_mla", 1, 1, own=True)
    add("nvfp4_ds_mla", 2, 1, own=True)
    add("q8_0", 32, 34)
    add("q5_1", 32, 24)
    add("q5_0", 32, 22)
    add("q4_1", 32, 20)
    add("q4_0", 32, 18)
    add("iq4_nl", 32, 18)
    return made


FORMATS = _formats()
_PACKED = ("turboquant_", "ultraquant_")  # types of vLLM 0.32 whose rows have layouts of their own
VLLM_CACHE_TYPES = frozenset(
    {
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4", "nvfp4_4over6",
        "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head",
    }
)  # fmt: skip


def parse_format(text: str, what: str = "the KV cache") -> Format:
    """Return the format of a name such as ``bfloat16``, ``fp8``, ``q8_0`` or ``nvfp4``.

    Raises UsageError, listing the known ones, and CannotJudge for a packed type of vLLM.
    """
    found = FORMATS.get(text.strip().lower().removeprefix("torch."))
    if text.strip().lower().startswith(_PACKED):
        raise CannotJudge(
            f"cannot judge a cache of type {text[:40]!r}: how it packs keys and values is not known here", hint="a type such as fp8 or nvfp4"
        )
    if found is None:
        known = ", ".join(sorted({form.name for form in FORMATS.values()}))
        raise UsageError(f"unknown data type {text[:40]!r} of {what}", hint=f"one of {known}; or two of them, K/V, such as q8_0/f16")
    return found


def parse_pair(text: str) -> tuple[Format, Format]:
    """Return the formats of keys and of values: ``fp8`` is both, ``q8_0/q4_0`` is K and V apart. Raises UsageError."""
    key, slash, value = text.partition("/")
    return parse_format(key), parse_format(value if slash else key)
