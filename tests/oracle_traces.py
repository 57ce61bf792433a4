"""Recorded traces of a real vLLM 0.32 (tests/recordings/oracle_*.csv) as Run folders: polls are telemetry, events are requests."""

from __future__ import annotations
