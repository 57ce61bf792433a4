"""A logits processor for the vLLM of the tests: it changes no logit and makes every step last, so that a poll can watch steps.

Loaded by vLLM itself (``--logits-processors slow_steps:SlowSteps`` with this folder on PYTHONPATH); STEP_S is the pause in seconds.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor  # type: ignore[import-not-found,unused-ignore]


class SlowSteps(LogitsProcessor):  # type: ignore[misc,unused-ignore]
    """Waits in every step of the engine."""

    def __init__(self, *_: Any) -> None:
        self.pause_s = float(os.environ.get("STEP_S", "0.04"))

    def is_argmax_invariant(self) -> bool:
        """Say that greedy answers need this processor too, so that it is called for them."""
        return False

    def update_state(self, _: Any) -> None:
        """Keep nothing of the batch."""

    def apply(self, logits: Any) -> Any:
        """Return the logits as they came, a pause later."""
        time.sleep(self.pause_s)
        return logits
