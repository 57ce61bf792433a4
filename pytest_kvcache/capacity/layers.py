"""What a model keeps per token: its layers as values, whatever file they were read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["full", "sliding", "chunked", "mla", "state", "cross", "none", "shared"]


@dataclass(frozen=True, slots=True)
class State:
    """The fixed memory of a recurrent layer (Mamba, gated delta net, linear attention, short convolution), per sequence.

    ``conv_channels`` channels and ``groups`` groups of ``group_channels`` channels are kept for ``conv_width`` steps; ``recurrent`` elements are the
    state itself. ``recurrent_dtype`` is what the model's configuration or its family says of the latter ("auto": as the convolution).
    ``checkpoint`` states are kept on top where vLLM caches prefixes (its Mamba-2 mixer keeps one). ``heads`` must divide by the tensor parallelism.
    """

    family: str
    conv_channels: int = 0
    conv_width: int = 0
    recurrent: int = 0
    groups: int = 0
    group_channels: int = 0
    heads: int = 0
    recurrent_dtype: str = "auto"
    checkpoint: int = 0

    def elements(self, tp: int = 1) -> tuple[int, int]:
        """Return (convolution elements, recurrent elements) on one of ``tp`` ranks. Groups are replicated until every rank has one (vLLM 0.32)."""
        groups = self.groups
        if groups and groups % tp:
            groups = tp
        channels = self.conv_channels + groups * self.group_channels
        return channels // tp * self.conv_width, self.recurrent // tp


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model, as far as its cache goes.

    ``kind``: ``full`` keeps every token; ``sliding`` the last ``window`` tokens; ``chunked`` the tokens of the current chunk of ``window``;
    ``mla`` one latent vector of ``key_size`` for all heads (of which ``latent`` is the compressed part and the rest is rotary), and with
    ``index_size`` > 0 a second, small cache of the indexer; ``state`` a fixed memory per sequence; ``cross`` the tokens of an encoder or of images and
    nothing that grows with the text; ``none`` keeps nothing; ``shared`` reads another layer's cache. Heads are of the whole model, sizes in elements.
    A layer of any attention kind may have a ``state`` beside it (Falcon-H1, Zamba). ``vllm_window_extra`` is what vLLM's code adds to the window.
    """

    kind: Kind
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    window: int | None = None
    latent: int = 0
    index_size: int = 0
    state: State | None = None
    vllm_window_extra: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as the cache sees it.

    ``context`` is the longest sequence that it was made for (None: not stated; ``context_stated`` False: a class default), ``unscaled_context`` the
    length before LongRoPE, which vLLM takes where nobody states one (None: no LongRoPE); ``dtype`` the data type of its weights ("" not stated);
    ``kv_dtype_stated`` the cache type that the checkpoint itself asks for ("" none); ``query_heads`` what tensor parallelism must divide (0: unknown);
    ``parameters`` where they can be counted; ``assumptions`` what the user stated or what a class default supplied, in words; ``notes`` what a reader
    should know; ``refused_by_vllm`` why vLLM 0.32 would not serve it ("" it would).
    """

    model_type: str
    name: str
    layers: tuple[Layer, ...]
    context: int | None = None
    dtype: str = ""
    kv_dtype_stated: str = ""
    query_heads: int = 0
    parameters: int | None = None
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refused_by_vllm: str = ""
    context_stated: bool = True
    unscaled_context: int | None = None
    mtp_layers: tuple[Layer, ...] = field(default=())

    def of_kind(self, *kinds: Kind) -> tuple[Layer, ...]:
        """Return the layers of these kinds, in the model's order."""
        return tuple(layer for layer in self.layers if layer.kind in kinds)

    @property
    def latent(self) -> bool:
        """Whether any layer keeps one latent vector for all heads (MLA)."""
        return any(layer.kind == "mla" for layer in self.layers)
