"""A scheduler for the vLLM of the tests: vLLM's own, which writes down which requests it preempts.

Loaded by vLLM itself (``--scheduler-cls preempted.Told`` with this folder on PYTHONPATH); PREEMPTED is the file, which gets a JSON line for
each preemption: the token ids of the prompt, and how many tokens of the answer there were by then.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found,unused-ignore]


class Told(Scheduler):  # type: ignore[misc,unused-ignore]
    """Preempts as its base does."""

    def _preempt_request(self, request: Any, *arguments: Any, **named: Any) -> None:
        super()._preempt_request(request, *arguments, **named)
        with Path(os.environ["PREEMPTED"]).open("a") as file:
            file.write(json.dumps([list(request.prompt_token_ids), request.num_output_tokens]) + "\n")
