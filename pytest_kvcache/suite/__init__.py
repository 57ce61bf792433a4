"""Ready-made tests of a server's KV cache: ``pytest --pyargs pytest_kvcache.suite -m capacity --kv-endpoint=...``."""
