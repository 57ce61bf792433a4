"""Which quantities one row of telemetry holds."""

from __future__ import annotations

from pytest_kvcache.quantities import QUANTITIES

# What moves, and the sizes whose change tells that the server was restarted in between.
SAMPLED = frozenset(name for name, q in QUANTITIES.items() if q.kind != "config") | {"pool_blocks", "usable_blocks", "pool_tokens"}
