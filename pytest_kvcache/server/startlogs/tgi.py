"""The start-up lines of Hugging Face's Text Generation Inference.

Source: TGI 3.3.7, ``server/text_generation_server/models/flash_causal_lm.py``, ``launcher/src/main.rs`` and ``backends/v3/src/lib.rs``.
"""

from __future__ import annotations

import re
from typing import ClassVar

from pytest_kvcache.server.startlogs.reading import INT, LogReader, Rule, Sourced, to_flag, to_int


class TgiLog(LogReader):
    """The router's figure of tokens is the pool; the launcher's blocks are the same pool in blocks."""

    ENGINE = "tgi"
    TITLE = "TGI"
    HINT = re.compile(r"KV-cache|max.batch.total.tokens|max_total_tokens|prefix caching|kv_cache_dtype", re.IGNORECASE)
    SIGN = re.compile(r"text_generation_(?:launcher|router|server)|max[-_]batch[-_](?:total|prefill)[-_]tokens|`max_total_tokens|KV-cache blocks")
    VERSION = re.compile(r"\btext.generation.(?:router|launcher) v?([0-9]+\.[0-9]+\.[0-9]+)")
    START = "text_generation_launcher: Args {"
    ONE: ClassVar[tuple[Rule, ...]] = (
        ("pool_blocks", re.compile(rf"KV-cache blocks: {INT}, size: "), to_int),
        ("block_size", re.compile(rf"KV-cache blocks: [0-9,]{{1,18}}, size: {INT}"), to_int),
        ("pool_tokens", re.compile(rf"Setting max batch total tokens to {INT}"), to_int),
        ("max_model_len", re.compile(rf"\bmax_total_tokens: (?:Some\(\s*)?{INT}"), to_int),
        ("max_model_len", re.compile(rf"Default `?max_total_tokens`? to {INT}"), to_int),
        ("kv_dtype", re.compile(r"\bkv_cache_dtype: Some\(\s*([\w.]{1,40})"), str),
        ("kv_dtype", re.compile(r"Using KV-?cache dtype:? ([\w.]{1,40})", re.IGNORECASE), str),
        ("prefix_caching", re.compile(r"Using prefix caching = (True|False|true|false)"), to_flag),
    )

    def totals(self) -> Sourced:
        """Return the tokens of the blocks where the router does not state them."""
        if "pool_tokens" in self.found or not {"pool_blocks", "block_size"} <= self.found.keys():
            return {}
        blocks, line = self.found["pool_blocks"]
        return {"pool_tokens": (int(blocks) * int(self.found["block_size"][0]), f"blocks x size: {line}")}
