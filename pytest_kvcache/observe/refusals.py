"""What is said where a server does not answer as a Prometheus does."""

from __future__ import annotations

from pytest_kvcache.engines import clean
from pytest_kvcache.errors import EndpointRefused, KvError
from pytest_kvcache.observe.moments import TooMany
from pytest_kvcache.server.address import Endpoint
from pytest_kvcache.server.transport import Answer, error_text


def no_prometheus(endpoint: Endpoint, reason: str) -> EndpointRefused:
    """Return the error of an answer that no Prometheus gives."""
    return EndpointRefused(f"it does not answer as a Prometheus does: {reason}", where=endpoint.shown, hint="the address without /api/v1")


def refused(endpoint: Endpoint, path: str, answer: Answer) -> KvError:
    """Return the error of an answer that is no success: EndpointRefused, or TooMany where it is longer than we take."""
    where = endpoint.shown + path
    said = clean(error_text(answer), 300)
    saying = f": {said}" if said else ""
    status = answer.status
    if status in (401, 403):
        hint = "name the environment variable that holds its key: --kv-prometheus-api-key-env"
        return EndpointRefused(f"the Prometheus server wants a key (HTTP {status}){saying}", where=where, hint=hint)
    if status == 404:
        return EndpointRefused("there is no Prometheus API (HTTP 404)", where=where, hint="the address with its path prefix and without /api/v1")
    if status in (400, 422):
        return EndpointRefused(f"the Prometheus server does not take the query (HTTP {status}){saying}", where=where, hint="check the selector")
    if status == 503:
        return EndpointRefused(f"the query took too long or the server is starting (HTTP 503){saying}", where=where, hint="a shorter window")
    if 300 <= status < 400:
        return EndpointRefused(f"it redirects (HTTP {status}), and redirects are not followed", where=where, hint="name the address it leads to")
    if answer.cut:
        return TooMany("the answer is longer than 32 MiB", where=where, hint="a longer step, a shorter window or a narrower selector")
    if answer.is_html:
        return EndpointRefused(f"it answers with a web page{saying}", where=where, hint="a login page or a gateway stands in the way")
    if status != 200:
        return EndpointRefused(f"the Prometheus server answers HTTP {status}{saying}", where=where, hint="look at its log")
    return no_prometheus(endpoint, said or "an answer of another form")
