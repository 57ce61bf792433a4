"""Cards of other machines, from a DCGM exporter's text: every card by node, and none left out in silence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvcache.observe.dcgm import read_dcgm
from pytest_kvcache.quantities import Missing
from pytest_kvcache.records import GpuRow

MIB = 1 << 20


def line(field: str, value: object, gpu: int = 0, host: str = "node-a", **more: str) -> str:
    labels = {"gpu": str(gpu), "UUID": f"GPU-{host}-{gpu}", "device": f"nvidia{gpu}", "modelName": "NVIDIA H100", "Hostname": host, **more}
    shown = ",".join(f'{name}="{text}"' for name, text in labels.items())
    return f"DCGM_FI_DEV_FB_{field}{{{shown}}} {value}"


def rows(*lines: str) -> list[GpuRow]:
    found = read_dcgm("# HELP DCGM_FI_DEV_FB_USED Frame buffer memory used (in MiB).\n" + "\n".join(lines) + "\n")
    assert isinstance(found, list), found
    return found


def reason(*lines: str) -> str:
    found = read_dcgm("\n".join(lines) + "\n")
    assert isinstance(found, Missing), found
    return found.reason


def test_cards_of_two_nodes_stay_apart_and_keep_their_pods() -> None:
    found = rows(
        *(
            line(field, value, gpu, host, namespace="prod", pod=f"vllm-{host}-{gpu}", container="vllm")
            for host in ("node-b", "node-a")
            for gpu in (1, 0)
            for field, value in (("FREE", 1000 + gpu), ("USED", 80000), ("RESERVED", 559))
        )
    )
    assert [(row.host, row.index) for row in found] == [("node-a", 0), ("node-a", 1), ("node-b", 0), ("node-b", 1)]
    first = found[0]
    assert first.used_bytes == 80000 * MIB
    assert first.total_bytes == (80000 + 1000 + 559) * MIB
    assert first.reserved_bytes == 559 * MIB
    assert first.labels == {"namespace": "prod", "pod": "vllm-node-a-0", "container": "vllm"}
    assert first.name == "NVIDIA H100"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"USED": 60, "FREE": 30, "TOTAL": 100}, (100, 60, 30, 10)),
        ({"USED": 60, "FREE": 30}, (90, 60, 30, 0)),
        ({"USED": 60, "TOTAL": 100}, (100, 60, 40, 0)),
        ({"USED": 60, "TOTAL": 100, "RESERVED": 10}, (100, 60, 30, 10)),
        ({"FREE": 30, "TOTAL": 100, "RESERVED": 10}, (100, 60, 30, 10)),
    ],
)
def test_the_size_that_an_exporter_leaves_out_follows_from_the_others(told: dict[str, int], expected: tuple[int, ...]) -> None:
    row = rows(*(line(field, value) for field, value in told.items()))[0]
    assert (row.total_bytes, row.used_bytes, row.free_bytes, row.reserved_bytes) == tuple(value * MIB for value in expected)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line("USED", 60)], "neither"),
        ([line("FREE", 60)], "not told"),
        ([line("USED", "NaN"), line("FREE", 5)], "nan"),
        ([line("USED", -1), line("FREE", 5)], "-1"),
        ([line("USED", 200), line("TOTAL", 100)], "200 MiB of 100 MiB"),
        ([line("USED", 1), line("USED", 2), line("FREE", 5)], "twice"),
        ([line("USED", 1), line("FREE", 5), line("USED", 3, gpu=1)], "gpu 1"),
        (["vllm:num_requests_running 3"], "no DCGM_FI_DEV_FB_"),
        ([""], "no DCGM_FI_DEV_FB_"),
    ],
)
def test_a_card_that_cannot_be_read_makes_the_answer_missing_with_the_reason(lines: list[str], words: str) -> None:
    assert words in reason(*lines)


def test_mig_instances_and_shared_cards() -> None:
    found = rows(
        *(line(field, value, GPU_I_ID=part, GPU_I_PROFILE="3g.40gb") for part in ("1", "2") for field, value in (("USED", 10), ("FREE", 30))),
    )
    assert [row.labels["mig_instance"] for row in found] == ["1", "2"]
    shared = rows(line("USED", 10, pod="a"), line("USED", 10, pod="b"), line("FREE", 5, pod="a"))
    assert len(shared) == 1
    assert shared[0].labels["pod"] == "a, b"


def test_labels_that_prometheus_renamed_are_those_of_the_workload() -> None:
    row = rows(
        *(line(field, 10, pod="dcgm-exporter-x", exported_pod="vllm-0", namespace="gpu", exported_namespace="prod") for field in ("USED", "FREE"))
    )[0]
    assert row.labels == {"pod": "vllm-0", "namespace": "prod"}


@settings(deadline=None)
@given(st.lists(st.sampled_from(["DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "{", "}", 'gpu="0"', 'UUID="x"', " 1e400", " 5", "\n", ",", '"', " NaN", "gpu=²"]), max_size=30).map("".join) | st.text(max_size=200))  # fmt: skip
def test_any_text_gives_rows_or_a_reason(text: str) -> None:
    found = read_dcgm(text)
    assert isinstance(found, (list, Missing))
