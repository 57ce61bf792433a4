"""Where a server is and how it is spoken to: the ``Endpoint`` value, and reading one from a URL and the settings."""

from __future__ import annotations

import base64
import functools
import ipaddress
import json
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urlsplit

import httpx

from pytest_kvcache.errors import UsageError
from pytest_kvcache.server.redaction import HIDDEN, header_secrets, remember
from pytest_kvcache.settings import Settings
from pytest_kvcache.userfiles import bundle

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_.])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_API_PATHS = ("/chat/completions", "/completions", "/models", "/metrics")
_FRAMING = frozenset({"content-length", "transfer-encoding", "connection"})
_OURS_IN_A_BODY = ("model", "prompt", "messages", "stream")


class MetricsPage(NamedTuple):
    """A page of telemetry elsewhere: the server behind a router, and the path of its metrics."""

    endpoint: Endpoint
    path: str


@dataclass(frozen=True)
class PrometheusSource:
    """A Prometheus server that holds the telemetry of an endpoint; ``url`` may hold user-info and is never shown."""

    url: str = field(repr=False)
    selector: str = ""
    api_key_env: str = ""


@dataclass(frozen=True)
class Endpoint:
    """One server. ``root`` is scheme, host, port and path prefix, without ``/v1`` and without a trailing slash.

    ``owned`` says that we launched it; ``pid`` and ``log`` are then its root process and its log file. What is secret
    (headers, user-info) is never part of ``repr`` or ``shown``; the keys themselves stay in the environment. ``metrics`` are the pages
    that hold the telemetry where it is not at ``root``, and ``prometheus`` the server that holds it instead.
    """

    root: str
    model: str = ""
    api: str = "completions"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    ca: str = ""
    proxy: str = field(default="", repr=False)
    api_key_env: str = ""
    metrics_api_key_env: str = ""
    owned: bool = False
    label: str = ""
    pid: int | None = None
    log: Path | None = None
    basic_auth: str = field(default="", repr=False)
    metrics: tuple[MetricsPage, ...] = ()
    cards: tuple[MetricsPage, ...] = ()
    prometheus: PrometheusSource | None = None
    allow_destructive_reads: bool = False

    def url(self, path: str) -> str:
        """Return the address of a path of this server: ``url("/v1/models")``."""
        return self.root + path

    @property
    def shown(self) -> str:
        """The address for messages and records; it holds no user-info."""
        return self.root

    def api_headers(self) -> dict[str, str]:
        """Return the headers of an API request, with the key read from the environment now. Raises UsageError where it is gone."""
        headers = dict(self.headers)
        if self.api_key_env:
            headers["Authorization"] = "Bearer " + read_key(self.api_key_env, "--kv-api-key-env")
        elif self.basic_auth:
            headers["Authorization"] = "Basic " + self.basic_auth
        return headers

    def metrics_headers(self) -> dict[str, str]:
        """Return the headers of a request for telemetry.

        The API key is not among them: only the key that was named for metrics, or the user-info of the address itself, which
        belongs to whatever guards that address. Raises UsageError where the named variable is gone.
        """
        if self.metrics_api_key_env:
            return {"Authorization": "Bearer " + read_key(self.metrics_api_key_env, "--kv-metrics-api-key-env")}
        return {"Authorization": "Basic " + self.basic_auth} if self.basic_auth else {}

    def client(self, timeout_s: float = 30.0, metrics: bool = False) -> httpx.Client:
        """Return a client for this server; the caller closes it.

        It follows no redirect, verifies TLS, and takes no proxy, key or certificate from the environment. Raises UsageError
        for a CA bundle or a key that cannot be read.
        """
        headers = self.metrics_headers() if metrics else self.api_headers()
        # Answers are bounded as they arrive; an answer that unpacks itself could be large before it is counted.
        headers.setdefault("Accept-Encoding", "identity")
        return httpx.Client(
            headers=headers,
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=False,
            verify=_tls(self.ca) if self.root.startswith("https") else _no_tls(),
            proxy=self.proxy or None,
        )


@functools.lru_cache(maxsize=8)
def _tls(ca: str) -> ssl.SSLContext:
    """Return a context that trusts ``ca`` alone where it is given, else certifi's bundle and the system's own store."""
    try:
        if ca:
            return ssl.create_default_context(ssl.Purpose.SERVER_AUTH, **bundle(ca))
        context = httpx.create_ssl_context(trust_env=False)
        context.load_default_certs()
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or "it holds no certificate in PEM form"
        raise UsageError(f"--kv-ca: the bundle cannot be read: {reason}", where=ca, hint="name a PEM file with CA certificates") from None
    return context


@functools.lru_cache(maxsize=1)
def _no_tls() -> ssl.SSLContext:
    """Return a context that trusts nobody, for addresses without TLS: reading a CA bundle takes 20 ms that they do not need."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def read_key(name: str, flag: str) -> str:
    """Return the key that the environment variable ``name`` holds. Raises UsageError, which never shows the key."""
    if not _VARIABLE.fullmatch(name) or len(name) > 64:
        raise UsageError(f"{flag} takes the name of an environment variable", hint="put the key into a variable, and name that variable here")
    key = os.environ.get(name, "").strip()
    if not key:
        state = "is empty" if name in os.environ else "is not set"
        raise UsageError(f"{flag}: the environment variable {name} {state}", hint=f"export {name}=... before the run, or leave {flag} out")
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{flag}: the value of {name} holds characters that no HTTP header can carry", hint="check how the variable was filled")
    remember([key])
    return key


def hide_user(url: str) -> str:
    """Return a URL, or what was meant to be one, with the part before an ``@`` hidden, cut to 200 characters, printable."""
    head, slashes, rest = url.partition("://") if "://" in url else ("", "", url)
    authority, slash, path = rest.partition("/")
    # A key in the wrong place (a path with an @) is hidden as well rather than shown.
    shown = f"{HIDDEN}@{rest.rpartition('@')[2]}" if "@" in rest else authority + slash + path
    shown = shown.partition("?")[0].partition("#")[0]
    return "".join(char if char.isprintable() else "?" for char in head + slashes + shown)[:200]


def parse_endpoint(url: str, settings: Settings) -> Endpoint:
    """Return the Endpoint that ``url`` and the settings name. No packet is sent.

    The URL may end in ``/v1`` or a slash and may have a path prefix. User-info becomes a Basic Authorization header and is
    never shown. Raises UsageError for anything that cannot be meant.
    """
    root, basic_auth = _split(url.strip())
    headers = _headers(settings.header)
    if sum((bool(basic_auth), bool(settings.api_key_env), any(name.lower() == "authorization" for name in headers))) > 1:
        what = "the Authorization header is set in more than one way (user-info in the URL, --kv-api-key-env, --kv-header)"
        raise UsageError(what, where=hide_user(url), hint="keep one of them")
    endpoint = Endpoint(
        root=root,
        model=settings.model,
        api=settings.api,
        headers=headers,
        extra_body=_extra_body(settings.extra_body),
        ca=settings.ca,
        proxy=_proxy(settings.proxy),
        api_key_env=settings.api_key_env,
        metrics_api_key_env=settings.metrics_api_key_env,
        basic_auth=basic_auth,
        metrics=tuple(metrics_page(page, settings) for page in settings.metrics_url),
        cards=tuple(metrics_page(page, settings.replace(metrics_api_key_env="")) for page in settings.dcgm_url),
        prometheus=PrometheusSource(settings.prometheus, settings.prometheus_selector, settings.prometheus_api_key_env)
        if settings.prometheus
        else None,
        allow_destructive_reads=settings.allow_destructive_reads,
    )
    if settings.ca:
        if not Path(settings.ca).is_file():
            raise UsageError("--kv-ca: there is no such file", where=settings.ca, hint="name a PEM file with CA certificates")
        _tls(settings.ca)
    endpoint.api_headers()
    endpoint.metrics_headers()
    return endpoint


def metrics_page(url: str, settings: Settings) -> MetricsPage:
    """Return the page of telemetry that ``url`` names: with its path where it ends in ``metrics``, else its ``/metrics``.

    Of the keys it gets only the one named for metrics, and user-info of this very address. Raises UsageError.
    """
    text = url.strip().rstrip("/")
    path = "/metrics"
    if text.endswith("/metrics"):
        parts = urlsplit(text)
        path = parts.path
        text = text.removesuffix(path)
    root, basic_auth = _split(text)
    endpoint = Endpoint(
        root=root,
        ca=settings.ca,
        proxy=_proxy(settings.proxy),
        metrics_api_key_env=settings.metrics_api_key_env,
        basic_auth="" if settings.metrics_api_key_env else basic_auth,
    )
    endpoint.metrics_headers()
    return MetricsPage(endpoint, path)


def _refuse(url: str, reason: str, hint: str) -> NoReturn:
    raise UsageError(f"this address cannot be used: {reason}", where=hide_user(url), hint=hint)


def _authority(url: str, schemes: tuple[str, ...]) -> tuple[SplitResult, str]:
    """Return the parts of a URL, and its host and port as they are written in one. Raises UsageError."""
    example = "an address looks like http://127.0.0.1:8000 or https://llm.example.org/prefix"
    if not url:
        _refuse(url, "it is empty", example)
    if not url.isprintable() or any(char.isspace() or char == "\\" for char in url):
        _refuse(url, "it holds spaces, control characters or a backslash", example)
    if url.rstrip(":/").lower() in schemes:
        _refuse(url, "it names no host", example)
    if "://" not in url:
        _refuse(url, "it has no scheme", f"write http://{hide_user(url).lstrip('/')}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        if "[" in url or "]" in url:
            _refuse(url, "its IPv6 address cannot be read", "write it in brackets: http://[::1]:8000")
        _refuse(url, "its host or port cannot be read", f"{example}; a port is a number up to 65535")
    if parts.scheme not in schemes:
        _refuse(url, f"its scheme is {hide_user(parts.scheme)}", f"only {' and '.join(schemes)} can be used")
    if not host:
        _refuse(url, "it names no host", example)
    if port == 0:
        _refuse(url, "port 0 is no port of a server", example)
    if ":" in host:
        try:
            host = f"[{ipaddress.IPv6Address(host)}]"
        except ValueError:
            _refuse(url, "its IPv6 address cannot be read", "write it in brackets: http://[::1]:8000")
    elif not host.isascii():
        try:
            host = httpx.URL(scheme="http", host=host).raw_host.decode("ascii")
        except (httpx.InvalidURL, UnicodeError):
            _refuse(url, "its host name cannot be read", example)
    if not host.startswith("[") and not _HOST_NAME.fullmatch(host):
        _refuse(url, "its host name cannot be read", example)
    return parts, f"{host}:{port}" if port is not None else host


def _split(url: str) -> tuple[str, str]:
    """Return the root of an API address and its user-info as Basic credentials ("" where there is none)."""
    parts, place = _authority(url, ("http", "https"))
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        _refuse(url, "it has a query or a fragment", "leave out what follows the ? or #; keys go into --kv-api-key-env or --kv-header")
    path = parts.path.rstrip("/")
    for known in _API_PATHS:
        if path.endswith(known):
            shorter = path.removesuffix(known).removesuffix("/v1").rstrip("/")
            _refuse(url, f"it ends in {known}, which is a path of the API", f"write {parts.scheme}://{place}{shorter}")
    path = path.removesuffix("/v1").rstrip("/")
    root = f"{parts.scheme}://{place}{path}"
    try:
        httpx.URL(root)
    except httpx.InvalidURL as error:
        _refuse(url, str(error)[:100], "an address looks like http://127.0.0.1:8000")
    if "@" not in parts.netloc:
        return root, ""
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    basic_auth = base64.b64encode(unquote_to_bytes(user) + b":" + unquote_to_bytes(password)).decode("ascii")
    remember([password, *header_secrets({"Authorization": f"Basic {basic_auth}"})])
    return root, basic_auth


def _proxy(url: str) -> str:
    """Return a checked proxy address ("" for none). Raises UsageError."""
    url = url.strip()
    if not url:
        return ""
    try:
        parts, _ = _authority(url, ("http", "https"))
        remember([parts.password or "", unquote(parts.password or "")])
        httpx.Proxy(url)
    except UsageError as error:
        raise UsageError(f"--kv-proxy: {error.what}", where=error.where, hint=error.hint) from None
    except (ValueError, httpx.InvalidURL):
        raise UsageError("--kv-proxy: this address cannot be used", where=hide_user(url), hint="a proxy looks like http://proxy:3128") from None
    return url


def _headers(lines: Sequence[str]) -> dict[str, str]:
    """Return ``Name: value`` lines as a mapping. Raises UsageError, which never shows a value: it may be a key."""
    headers: dict[str, str] = {}
    hint = "a header looks like 'X-Tenant: blue'"
    for number, line in enumerate(lines, start=1):
        name, colon, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if not colon or not _HEADER_NAME.fullmatch(name):
            raise UsageError(f"--kv-header: number {number} is not 'Name: value'", hint=hint)
        if not (value.isascii() and value.replace("\t", "").isprintable()):
            raise UsageError(f"--kv-header: the value of {name} holds line breaks or characters that no HTTP header can carry", hint=hint)
        if name.lower() in _FRAMING:
            raise UsageError(f"--kv-header: {name} is set by the client itself", hint="leave it out")
        if name.lower() in {known.lower() for known in headers}:
            raise UsageError(f"--kv-header: {name} is given twice", hint="give its values as one, with commas")
        headers[name] = value
    remember(header_secrets(headers))
    return headers


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _extra_body(text: str) -> dict[str, Any]:
    """Return the JSON object that is merged into request bodies. Raises UsageError."""
    if not text.strip():
        return {}
    hint = 'a JSON object, such as {"ignore_eos": true}'
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--kv-extra-body is not JSON: {str(error)[:200]}", hint=hint) from None
    if not isinstance(value, dict):
        raise UsageError("--kv-extra-body is JSON, but not an object", hint=hint)
    for name in _OURS_IN_A_BODY:
        if name in value:
            raise UsageError(f"--kv-extra-body cannot set {name}", hint="it is set for each request" if name != "model" else "use --kv-model")
    return value
