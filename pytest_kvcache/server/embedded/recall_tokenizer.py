"""The tokenizer of the recall model: byte-level BPE written down by rule, not trained.

The vocabulary is two special tokens, the 256 bytes, the 85 consonant-vowel syllables, the same syllables with a blank before
them, and 256 words of two syllables with a blank before them. So any text can be tokenised without loss, and each of ``WORDS``
is exactly one token when a blank stands before it. Only the standard library is used.
"""

from __future__ import annotations

from typing import Any

CONSONANTS = "bcdfghjklmnprstvz"
VOWELS = "aeiou"
WORD_COUNT = 256
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
# A blank line between messages, none after the last: then the last word of the question is the last token, and the
# model answers it through the chat API just as it does through completions.
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"

SYLLABLES: tuple[str, ...] = tuple(c + v for c in CONSONANTS for v in VOWELS)


def _byte_characters() -> tuple[str, ...]:
    """Return the printable character that stands for each byte in a byte-level vocabulary (the alphabet of GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))


BYTE_CHARACTERS: tuple[str, ...] = _byte_characters()
BLANK = BYTE_CHARACTERS[0x20]


def _words() -> tuple[str, ...]:
    """Return the words: a walk through all pairs of syllables with a step that shares no factor with their number."""
    pairs = len(SYLLABLES) ** 2
    found: list[str] = []
    for i in range(pairs):
        first, second = divmod((i * 3361 + 1009) % pairs, len(SYLLABLES))
        if first != second and len(found) < WORD_COUNT:
            found.append(SYLLABLES[first] + SYLLABLES[second])
    return tuple(found)


WORDS: tuple[str, ...] = _words()


def merges() -> list[tuple[str, str]]:
    """Return the merges in order of rank: consonant and vowel, blank and syllable, then the two syllables of a word."""
    inside = [(syllable[0], syllable[1]) for syllable in SYLLABLES]
    opening = [(BLANK, syllable) for syllable in SYLLABLES]
    whole = [(BLANK + word[:2], word[2:]) for word in WORDS]
    return inside + opening + whole


def vocabulary() -> list[str]:
    """Return every token in order of its id; a token's blank is written as byte-level vocabularies write it."""
    return [BOS, EOS, *BYTE_CHARACTERS, *(left + right for left, right in merges())]


def word_ids() -> range:
    """Return the ids of ``WORDS`` (each with its leading blank), in the same order."""
    size = len(vocabulary())
    return range(size - WORD_COUNT, size)


def mute_ids() -> list[int]:
    """Return the ids that the model never generates: the special tokens and every byte that is not printable ASCII, newline or tab.

    Then no answer ends before its length was reached, and each token of a stream is text of its own.
    """
    spoken = {*range(0x20, 0x7F), 0x0A, 0x09}
    return [BOS_ID, EOS_ID, *(2 + byte for byte in range(256) if byte not in spoken)]


def tokenizer_json() -> dict[str, Any]:
    """Return the content of ``tokenizer.json``. Like the GGUF it puts ``<s>`` before a text prompt, so prompt counts agree."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    opening = {"SpecialToken": {"id": BOS, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BOS_ID, "content": BOS, **special}, {"id": EOS_ID, "content": EOS, **special}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [opening, first],
            "pair": [opening, first, second],
            "special_tokens": {BOS: {"id": BOS, "ids": [BOS_ID], "tokens": [BOS]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(vocabulary())},
            "merges": [list(pair) for pair in merges()],
        },
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """Return the content of ``tokenizer_config.json``; ``max_length`` in tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
