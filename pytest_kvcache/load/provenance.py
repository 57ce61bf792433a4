"""What the start line says of the load process itself: versions, and its command line without secrets."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from pytest_kvcache.server.redaction import HIDDEN, redact_words

_PRIVATE_FLAGS = frozenset({"--kv-header", "--kv-proxy", "--kv-extra-body"})


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("pytest-kvcache", "locust", "geventhttpclient", "gevent"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def argv() -> list[str]:
    """Return the command line, without the values of headers, proxies, bodies and user-info in addresses."""
    words, _ = redact_words(sys.argv)
    for at, word in enumerate(words[1:], start=1):
        name, equals, _ = word.partition("=")
        if name in _PRIVATE_FLAGS and equals:
            words[at] = f"{name}={HIDDEN}"
        elif words[at - 1] in _PRIVATE_FLAGS:
            words[at] = HIDDEN
    return words
