"""The whole story on a laptop: KV quantisation shrinks the cache, and the quality gate sees what it cost."""

from __future__ import annotations

import argparse
import sys

from pytest_kvcache import options, units
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import ValueRecord

BEFORE = "llamacpp --kv-type f16 --ctx 8192 --slots 4"
AFTER = "llamacpp --kv-type q4_0 --ctx 8192 --slots 4"


def run_demo(arguments: argparse.Namespace) -> int:
    """Measure f16 and q4_0 KV on real llama.cpp under the same load, judge the change, and print what happened.

    Returns 0 once the story is told, although its verdict is FAIL; 4 where the evidence was unsound.
    """
    from pytest_kvcache.measure import Planned
    from pytest_kvcache.report.model import SessionView
    from pytest_kvcache.report.terminal import summary
    from pytest_kvcache.session import Session

    settings = options.settings_from(arguments, before=BEFORE, after=AFTER, repeats=3, duration_s=3.0, quality_pressure="none", name="demo")
    print("A change of the KV cache from f16 to q4_0, on real llama.cpp and a model made to recall:", flush=True)
    with Session(settings, say=lambda text: print(f"  {text}", flush=True)) as session:
        session.plan = [Planned("normal", users=4)]
        session.plan_quality = True
        session.repeat = ["pytest-kvcache demo", f'pytest -m capacity --kv-before="{BEFORE}" --kv-after="{AFTER}"']
        comparison = session.compare()
        for gate in comparison.gates:
            session.record(gate)
        verdict = session.finish()
        before, after = session.before_analyses(), session.after_analyses()
        print(summary(SessionView(session.folder, verdict, before, after), color=sys.stdout.isatty()))
        memory = [_shown(side[0].run.record.config.get("pool_bytes")) for side in (before, after)]
        print(f"KV cache memory: {memory[0]} before, {memory[1]} after.")
        quality = [next((a.quality for a in side if not isinstance(a.quality, Missing)), None) for side in (before, after)]
        if quality[0] is not None and quality[1] is not None:
            print(f"Quality: {quality[0].passed}/{quality[0].items} items right before, {quality[1].passed}/{quality[1].items} after.")
        print(f"Verdict: {verdict.verdict}. In CI this change would have been stopped (exit code {0 if verdict.verdict == 'PASS' else 1}).")
        print(f"Report: {session.folder / 'report.html'}")
    return 4 if verdict.verdict == "INVALID" else 0


def _shown(record: ValueRecord | None) -> str:
    value = record.to_value() if record is not None else Missing("not read")
    return value.reason if isinstance(value, Missing) else units.show(value.value, value.unit)
