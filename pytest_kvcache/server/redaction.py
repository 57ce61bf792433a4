"""Taking keys out of text before it is written or shown. Standard library only: the supervisor imports it.

Two ways, used together: the secrets that we know (the value of an environment variable, the word after ``--api-key``) are
replaced as they stand, and what looks like one is found by its place (a header, a flag, a field, the user part of a URL) or
by its form (``sk-...``, ``hf_...``, a JSON Web Token). Booleans and None are never taken for a secret, nor is a number behind a name
such as ``token``: engines print token counts.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

HIDDEN = "***"

_SECRET_PARTS = frozenset(
    {"KEY", "KEYS", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PWD", "CREDENTIAL", "CREDENTIALS"}
)
_OTHER_TOKENS = frozenset(
    {"EOS", "BOS", "PAD", "UNK", "MASK", "SEP", "CLS", "IMAGE", "AUDIO", "STOP", "FIRST", "NEXT", "PER", "MAX", "SPECIAL", "SORT"}
)

# A field, flag or environment variable whose value is a secret. A bare "key" is not one (cache keys), a bare "token" is.
_NAME = (
    r"(?:[A-Za-z0-9]+[-_.])*?"
    r"(?:api[-_]?keys?|(?:access|secret|private|auth|account|signing|encryption|master|ssh)[-_]keys?"
    r"|(?:access|auth|hf|hub|refresh|session|id|bearer|security|github|gitlab)[-_]token|token"
    r"|(?:client[-_])?secrets?|password|passwd|passphrase|pwd|credentials?|(?:proxy[-_])?authorization|(?:set[-_])?cookie)"
)
# Quoted parts, lists and bare words in any mixture, as a shell reads them, up to the next separator.
_VALUE = r"(?:\[[^\]\n]{0,4000}+\]?|\"(?:[^\"\\\n]|\\.){0,4000}+\\?\"?|'(?:[^'\\\n]|\\.){0,4000}+\\?'?|[^\s,;&'\"()\[\]{}]++)++"
_EMPTY = re.compile(r"[\[\]\"'\s,]*(?:true|false|none|null|auto)?[\[\]\"'\s,]*\Z", re.IGNORECASE)
_NUMBER = re.compile(r"[\[\]\"'\s,]*-?[0-9][0-9,._]*%?x?[\[\]\"'\s,]*\Z")

_SCHEME = re.compile(r"\b(bearer|basic|digest|negotiate)(\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization|x-api-key|api-key|(?:set-)?cookie)([\"']?\s*+:\s*+[\"']?+)(?!\*\*\*)[^\"'\n\r]+")
_FLAG = re.compile(rf"(?i)(--(?:no-)?{_NAME})(=|\s+)({_VALUE})")
_FIELD = re.compile(rf"(?i)(?<![A-Za-z0-9_.-])({_NAME})([\"']?\s*[:=]\s*)({_VALUE})")
_ENVIRONMENT = re.compile(rf"(?<![A-Za-z0-9_])([A-Z][A-Z0-9_]*)(=)({_VALUE})")
_USER = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/?#\"'<>]*@")
_FORMS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{8,}|hf_[A-Za-z0-9]{10,}|nvapi-[A-Za-z0-9_-]{10,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|xox[abprs]-[A-Za-z0-9-]{10,}|A[KS]IA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)


_PRIVATE_HEADERS = ("auth", "cookie", "session")
_SHORTEST_REMEMBERED = 8
_remembered: frozenset[str] = frozenset()


def remember(secrets: Iterable[str]) -> None:
    """Let ``redact`` and ``hide_known`` take these secrets out of every text of this process: a server may repeat a key in any words.

    Those under eight characters are left out: they could be words.
    """
    global _remembered
    _remembered |= {secret for secret in secrets if len(secret) >= _SHORTEST_REMEMBERED}


def hide_known(text: str, known: Iterable[str] = ()) -> str:
    """Return ``text`` without the secrets that are remembered, or in ``known`` (of four characters or more), and otherwise as it is."""
    for secret in sorted({*_remembered, *(word for word in known if len(word) >= 4)}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def header_secrets(headers: Mapping[str, str]) -> list[str]:
    """Return what is secret in HTTP headers, by the headers' names: the key behind ``Bearer``, a password in ``Basic``, a token, a cookie."""
    private = [v for name, v in headers.items() if is_secret_name(name) or any(part in name.lower() for part in _PRIVATE_HEADERS)]
    found = [word for value in private for word in (value, *value.split())]
    for value in private:
        scheme, _, word = value.partition(" ")
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                found.append(base64.b64decode(word, validate=True).decode().partition(":")[2])
    return found


def is_secret_name(name: str) -> bool:
    """Return whether an environment variable of that name holds a secret: HF_TOKEN does, TOKENIZERS_PARALLELISM does not."""
    parts = re.split(r"[^A-Z0-9]+", name.upper())
    return any(part in _SECRET_PARTS for part in parts) and not _OTHER_TOKENS.intersection(parts)


def is_secret_flag(word: str) -> bool:
    """Return whether the value of a flag is a secret: ``--api-key`` is, ``--max-num-batched-tokens`` and ``--ssl-keyfile`` are not."""
    return word.startswith("-") and (re.fullmatch(_NAME, word.lstrip("-"), re.IGNORECASE) is not None or word.lstrip("-").lower() == "key")


def _hide_value(match: re.Match[str]) -> str:
    name, between, value = match.group(1), match.group(2), match.group(3)
    parts = re.split(r"[^A-Z0-9]+", name.upper())
    counted = "TOKEN" in parts and _NUMBER.match(value)
    if counted or _EMPTY.match(value) or _OTHER_TOKENS.intersection(parts):
        return match.group(0)
    return f"{name}{between}{HIDDEN}"


def _hide_environment(match: re.Match[str]) -> str:
    return _hide_value(match) if is_secret_name(match.group(1)) else match.group(0)


def redact(text: str, known: Iterable[str] = ()) -> str:
    """Return ``text`` with keys, passwords and the user part of URLs replaced by ``***``. Never raises; a second pass changes nothing.

    ``known`` are secrets to replace as they stand, beside those remembered; those under four characters are left out.
    """
    text = hide_known(text, known)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1\2{HIDDEN}", text)
    for pattern, change in _BY_PLACE:
        text = pattern.sub(change, text)
    return _FORMS.sub(HIDDEN, text)


_BY_PLACE: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (_FLAG, _hide_value),
    (_FIELD, _hide_value),
    (_ENVIRONMENT, _hide_environment),
)


def redact_json(value: Any) -> Any:
    """Return a decoded JSON value with every text redacted, and what stands under the name of a secret hidden."""
    if isinstance(value, dict):
        return {name: HIDDEN if isinstance(held, str) and held and is_secret_name(name) else redact_json(held) for name, held in value.items()}
    if isinstance(value, list):
        return [redact_json(held) for held in value]
    return redact(value) if isinstance(value, str) else value


def redact_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command with their secrets hidden, and those secrets.

    A flag for keys may take several words (vLLM's ``--api-key A B``), so all up to the next flag are hidden.
    """
    shown: list[str] = []
    secrets: list[str] = []
    hiding = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            hiding = is_secret_flag(name) and not equals
            if equals and is_secret_flag(name):
                secrets.append(value)
                shown.append(f"{name}={HIDDEN}")
                continue
        elif hiding:
            secrets.append(word)
            shown.append(HIDDEN)
            continue
        elif equals and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and is_secret_name(name):
            secrets.append(value)
            shown.append(f"{name}={HIDDEN}")
            continue
        shown.append(redact(word))
    return shown, [secret for secret in secrets if secret]
