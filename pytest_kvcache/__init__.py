"""Measured evidence and a verdict on a change of KV-cache configuration. Importing this package imports nothing else."""

__version__ = "0.1.0"
