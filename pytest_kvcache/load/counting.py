"""Counting the tokens of a text before the load, by the server's own /tokenize (llama.cpp, vLLM, SGLang)."""

from __future__ import annotations

from typing import Any

import msgspec

from pytest_kvcache.errors import EndpointUnreachable
from pytest_kvcache.load.asking import Ask

COUNTED_TEXTS = 500
TOKENS_PER_WORD = 4 / 3


def tokenize(ask: Ask, model: str, text: str, *, special: bool = False, pieces: bool = False) -> tuple[list[int], list[str]] | None:
    """Return token ids, and their texts where ``pieces`` are asked for and told; None where the server has no /tokenize."""
    body: dict[str, Any] = {
        "model": model, "prompt": text, "add_special_tokens": special, "content": text, "add_special": special, "parse_special": special,
    }  # fmt: skip
    if pieces:
        body |= {"return_token_strs": True, "with_pieces": True}
    try:
        answer = ask("POST", "/tokenize", msgspec.json.encode(body))
    except EndpointUnreachable:
        return None
    found = answer.json if answer.status == 200 else None
    tokens = found.get("tokens") if isinstance(found, dict) else None
    if not isinstance(tokens, list):
        return None
    ids = [token.get("id") if isinstance(token, dict) else token for token in tokens]
    numbers = [one for one in ids if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    if len(numbers) != len(ids):
        return None
    texts = [token["piece"] for token in tokens if isinstance(token, dict) and isinstance(token.get("piece"), str)]
    told = found.get("token_strs") if isinstance(found, dict) else None
    if isinstance(told, list) and len(told) == len(ids):
        texts = [str(one) for one in told]
    return numbers, texts if len(texts) == len(ids) else []


class TextCounter:
    """Counts the tokens of texts: the first hundreds by the server, further ones by what those had per word.

    ``exact`` says whether the server counts at all; without it there are four tokens for three words.
    """

    def __init__(self, ask: Ask, model: str) -> None:
        self._ask = ask
        self._model = model
        self._words = self._tokens = self._texts = 0
        self.exact = tokenize(ask, model, "one two") is not None

    def __call__(self, text: str) -> int:
        """Return how many tokens the text has, at least 1."""
        words = len(text.split())
        if self.exact and self._texts < COUNTED_TEXTS:
            found = tokenize(self._ask, self._model, text)
            if found is not None:
                self._texts += 1
                self._words += words
                self._tokens += len(found[0])
                return max(1, len(found[0]))
        rate = self._tokens / self._words if self._words else TOKENS_PER_WORD
        return max(1, round(words * rate))
