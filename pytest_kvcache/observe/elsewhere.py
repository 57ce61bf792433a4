"""Telemetry that is not at the endpoint itself: pages of the servers behind a router, or a Prometheus server that scrapes them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx

from pytest_kvcache.engines import Samples
from pytest_kvcache.errors import EndpointUnreachable, KvError
from pytest_kvcache.observe.answers import MOST_METRICS_BYTES, samples_of
from pytest_kvcache.observe.joining import join_samples
from pytest_kvcache.observe.prometheus import Prometheus
from pytest_kvcache.observe.series import Key
from pytest_kvcache.quantities import Missing
from pytest_kvcache.server.address import Endpoint, MetricsPage, PrometheusSource
from pytest_kvcache.server.transport import ask


class Elsewhere:
    """Reads the samples of all servers of one endpoint as one state. ``text`` is what the last look read, as it came."""

    def __init__(self) -> None:
        self.text = ""

    @staticmethod
    def of(endpoint: Endpoint, wanted: frozenset[str], timeout_s: float) -> Elsewhere | None:
        """Return the reader of an endpoint whose telemetry is elsewhere; None where it is at the endpoint itself."""
        if endpoint.prometheus is not None:
            return _FromPrometheus(endpoint, endpoint.prometheus, timeout_s)
        return _Pages(endpoint.metrics, wanted, timeout_s) if endpoint.metrics else None

    def look(self, *, repeat: bool = True) -> Samples | Missing:
        """Return the samples of all servers; Missing where one of them cannot be read, for the rest would look like the whole.

        ``repeat`` False wants what was not read before: a source that has nothing newer then gives Missing.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections."""


class _Pages(Elsewhere):
    def __init__(self, pages: Sequence[MetricsPage], wanted: frozenset[str], timeout_s: float) -> None:
        super().__init__()
        self._pages = [(page, page.endpoint.client(timeout_s=timeout_s, metrics=True)) for page in pages]
        self._wanted = wanted
        self._timeout_s = timeout_s

    def look(self, *, repeat: bool = True) -> Samples | Missing:
        parts: list[tuple[str, Samples]] = []
        texts: list[str] = []
        for page, client in self._pages:
            name = page.endpoint.shown.partition("://")[2]
            samples = self._one(page, client, texts)
            if isinstance(samples, Missing):
                return Missing(f"{name}: {samples.reason}") if len(self._pages) > 1 else samples
            parts.append((name, samples))
        self.text = "\n".join(texts)
        return join_samples(parts, always=len(parts) > 1)

    def _one(self, page: MetricsPage, client: httpx.Client, texts: list[str]) -> Samples | Missing:
        try:
            answer = ask(page.endpoint, client, "GET", page.path, timeout_s=self._timeout_s, limit_bytes=MOST_METRICS_BYTES)
        except EndpointUnreachable as error:
            return Missing(f"{page.path}: {error.what}")
        except RuntimeError:
            return Missing(f"{page.path} was not read: the reader is closed")
        texts.append(f"# from {page.endpoint.shown}{page.path}\n" + answer.body.decode("utf-8", "replace"))
        return samples_of(answer, self._wanted, page.path)

    def close(self) -> None:
        for _, client in self._pages:
            client.close()


class _FromPrometheus(Elsewhere):
    """The newest scrape that Prometheus holds. Its own scrape interval bounds how often there is a new one."""

    def __init__(self, endpoint: Endpoint, source: PrometheusSource, timeout_s: float) -> None:
        super().__init__()
        self._server = Prometheus(
            source.url, source.selector, api_key_env=source.api_key_env, ca=endpoint.ca, proxy=endpoint.proxy, timeout_s=timeout_s
        )
        self._newest: dict[Key, float] = {}

    def look(self, *, repeat: bool = True) -> Samples | Missing:
        try:
            samples, newest = self._server.latest(time.time())
        except KvError as error:
            return Missing(error.what)
        except RuntimeError:
            return Missing("Prometheus was not read: the reader is closed")
        if not repeat and any(scraped <= self._newest.get(target, 0.0) for target, scraped in newest.items()):
            return Missing("Prometheus holds no newer scrape of every target: its scrape interval is the highest rate that --kv-sample-hz can have")
        self._newest = newest
        return samples

    def close(self) -> None:
        self._server.close()
