"""Why an answer of a server is no telemetry: each way of failing has its own words."""

from __future__ import annotations

from pytest_kvcache.engines import Samples, clean
from pytest_kvcache.observe.exposition import parse_samples
from pytest_kvcache.quantities import Missing
from pytest_kvcache.server.transport import Answer, error_text

MOST_METRICS_BYTES = 32 << 20


def samples_of(answer: Answer, wanted: frozenset[str], path: str = "/metrics") -> Samples | Missing:
    """Return the samples of an answer of /metrics, or in one sentence why it is no exposition."""
    reason = refusal(path, answer, "--kv-metrics-api-key-env")
    if reason:
        return Missing(reason)
    if answer.is_html:
        title = error_text(answer)
        return Missing(f"{path} answers with a web page{f' ({title})' if title else ''}: a login page or a gateway stands in the way")
    if answer.body.lstrip()[:1] in {b"{", b"["} and answer.value is not None:
        return Missing(f"{path} answers with JSON and not with the text format: another engine, or another page of it")
    samples = parse_samples(answer.body, wanted)
    if not samples.names:
        return Missing(f"{path} answers with text that holds no sample")
    return samples


def refusal(path: str, answer: Answer, key_flag: str) -> str:
    """Return why an answer is of no use whatever its form should be; "" where it may be. Each way of failing has its own text."""
    status, said = answer.status, clean(error_text(answer), 200)
    saying = f": {said}" if said else ""
    if status in (401, 403):
        return f"{path} answers HTTP {status}: it wants a key, whose environment variable {key_flag} names{saying}"
    if status == 404:
        return f"{path} answers HTTP 404: there is no such page"
    if status == 501:
        return f"{path} answers HTTP 501{saying or ': it is switched off'}"
    if 300 <= status < 400:
        return f"{path} answers HTTP {status}: it redirects, and redirects are not followed"
    if status != 200:
        return f"{path} answers HTTP {status}{saying}"
    if answer.cut:
        return f"{path} is longer than {len(answer.body) >> 20} MiB and was not read"
    if not answer.body.strip():
        return f"{path} answers HTTP 200 with an empty body: nothing is told, which is not zero"
    return ""
