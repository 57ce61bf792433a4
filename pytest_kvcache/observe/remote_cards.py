"""Cards of other machines, read while a server is measured: the pages of the DCGM exporters that ``--kv-dcgm-url`` names."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvcache.errors import EndpointUnreachable
from pytest_kvcache.observe.answers import MOST_METRICS_BYTES, samples_of
from pytest_kvcache.observe.dcgm import FAMILIES, read_dcgm
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GpuRow
from pytest_kvcache.server.address import MetricsPage
from pytest_kvcache.server.transport import ask


class RemoteCards:
    """Reads the cards of all exporters as one list, sorted by node and card. ``pages`` get no key but the user-info of their own address."""

    def __init__(self, pages: Sequence[MetricsPage], timeout_s: float = 5.0) -> None:
        self._pages = [(page, page.endpoint.client(timeout_s=timeout_s, metrics=True)) for page in pages]
        self._timeout_s = timeout_s

    def read(self) -> list[GpuRow] | Missing:
        """Return one row a card; Missing, with the reason, where one of the exporters cannot be read. Never raises.

        A node that an exporter does not name is called by the exporter's address.
        """
        rows: list[GpuRow] = []
        for page, client in self._pages:
            name = page.endpoint.shown.partition("://")[2]
            try:
                answer = ask(page.endpoint, client, "GET", page.path, timeout_s=self._timeout_s, limit_bytes=MOST_METRICS_BYTES)
            except EndpointUnreachable as error:
                return Missing(f"{name}: {error.what}")
            except RuntimeError:
                return Missing(f"{name} was not read: the reader is closed")
            samples = samples_of(answer, FAMILIES, page.path)
            found = samples if isinstance(samples, Missing) else read_dcgm(samples)
            if isinstance(found, Missing):
                return Missing(f"{name}: {found.reason}")
            rows += [row if row.host else _named(row, name) for row in found]
        return sorted(rows, key=lambda row: (row.host, row.index))

    def close(self) -> None:
        """Close the connections."""
        for _, client in self._pages:
            client.close()


def _named(row: GpuRow, host: str) -> GpuRow:
    import msgspec

    return msgspec.structs.replace(row, host=host)
