"""TLS on this machine's loopback address, with a certificate that is made when the tests run."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import trustme


class Tls(NamedTuple):
    """A server's TLS context, and the file of the CA that vouches for it."""

    context: ssl.SSLContext
    ca: Path


def make_tls(folder: Path) -> Tls:
    """Make a CA and a certificate of it; only the CA's certificate is written, into ``folder``."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return Tls(context, folder / "ca.pem")
