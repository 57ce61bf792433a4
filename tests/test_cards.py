"""The cards of a launched server, through NVIDIA's real bindings on a stub of their library: chosen, held, free, and given back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_server import launch_text

ROOT = Path(__file__).parent.parent
HEAD = """
import os, sys, threading, time
from pathlib import Path
from pytest_kvcache.cards import Cards, find_cards, held
from pytest_kvcache.errors import KvError, LaunchFailed, UsageError
from pytest_kvcache.settings import Settings

state = Path(os.environ["STUB_STATE"])

def refused(call):
    try:
        call()
    except KvError as error:
        return f"{type(error).__name__}: {error}"
    raise SystemExit("it was not refused")
"""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The file that says what is on the cards: two idle ones."""
    path = tmp_path / "state"
    path.write_text("0 10\n1 12\n")
    return path


def inside(library: Path, state: Path, code: str, **environment: str) -> None:
    """Run code in a process whose cards are those of the stub; a failed assertion in it fails the test."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env = {**kept, "LD_LIBRARY_PATH": str(library), "STUB_STATE": str(state), "TMPDIR": str(state.parent), "PYTHONPATH": str(ROOT), **environment}
    result = subprocess.run([sys.executable, "-c", HEAD + code], env=env, cwd=state.parent, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_cards_are_chosen_by_index_or_uuid_and_shown_to_the_server_by_uuid(nvml_library: Path, state: Path) -> None:
    code = """
assert find_cards(Settings(gpus="1"), {}).environment == {"CUDA_VISIBLE_DEVICES": "GPU-stub-1"}
assert find_cards(Settings(gpus="GPU-stub-1, 0"), {}).environment == {"CUDA_VISIBLE_DEVICES": "GPU-stub-1,GPU-stub-0"}
assert "there is no card '7'" in refused(lambda: find_cards(Settings(gpus="7"), {}))
assert "0 (GPU-stub-0), 1 (GPU-stub-1)" in refused(lambda: find_cards(Settings(gpus="7"), {}))
assert "names 2 cards" in refused(lambda: find_cards(Settings(gpus="GPU-stub"), {}))
assert "MIG instance" in refused(lambda: find_cards(Settings(gpus="MIG-1"), {}))
assert "in one way" in refused(lambda: find_cards(Settings(gpus="1"), {"CUDA_VISIBLE_DEVICES": "0"}))
assert "named twice" in refused(lambda: find_cards(Settings(gpus="1,GPU-stub-1"), {}))
unnamed = find_cards(Settings(), {})
assert [row.index for row in unnamed.rows] == [0, 1] and unnamed.environment == {}
assert [row.index for row in find_cards(Settings(), {"CUDA_VISIBLE_DEVICES": "1"}).rows] == [1]
assert find_cards(Settings(), {"CUDA_VISIBLE_DEVICES": ""}) is None, "a server that sees no card needs none"
os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-stub-1"
assert [row.index for row in find_cards(Settings(), {}).rows] == [1]
"""
    inside(nvml_library, state, code)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has the driver: every other test here runs on it")
def test_without_a_driver_there_is_nothing_to_watch_and_nothing_to_name(state: Path) -> None:
    code = """
assert find_cards(Settings(), {}) is None
assert "none can be seen" in refused(lambda: find_cards(Settings(gpus="0"), {}))
"""
    inside(state.parent / "nowhere", state, code)


def test_a_card_in_use_is_refused_or_recorded(nvml_library: Path, state: Path) -> None:
    code = """
state.write_text(f"0 10\\n1 700 {os.getpid()}:600 4000000:?\\n")
assert find_cards(Settings(gpus="0"), {}).make_ready() == []
text = refused(find_cards(Settings(gpus="1"), {}).make_ready)
assert text.startswith("LaunchFailed: a card of the launched server is not free"), text
assert f"pid {os.getpid()} (" in text and "600.00 MiB" in text and "pid 4000000" in text and "--kv-gpu-others=record" in text, text
(note,) = find_cards(Settings(gpus="1", gpu_others="record"), {}).make_ready()
assert "others were on its cards" in note and "pid 4000000" in note, note
state.write_text("0 10\\n1 60000\\n")
text = refused(find_cards(Settings(gpus="1"), {}).make_ready)
assert "58.59 GiB in use by processes that are not told" in text, text
"""
    inside(nvml_library, state, code)


def test_between_launches_memory_is_given_back_in_time_or_nothing_more_is_measured(nvml_library: Path, state: Path) -> None:
    code = """
cards = find_cards(Settings(gpus="0", gpu_release_s=5.0), {})
cards.make_ready()
state.write_text("0 40000 4000001:39000\\n1 12\\n")
threading.Timer(0.6, lambda: state.write_text("0 10\\n1 12\\n")).start()
began = time.monotonic()
assert cards.make_ready() == []
assert 0.5 < time.monotonic() - began < 5.0
state.write_text("0 40000\\n1 12\\n")
cards.settings = Settings(gpus="0", gpu_release_s=0.3)
text = refused(cards.make_ready)
assert "a card is not free again 300 ms after its server was stopped" in text and "39.06 GiB" in text, text
"""
    inside(nvml_library, state, code)


def test_whoever_was_allowed_before_the_first_launch_is_not_waited_for(nvml_library: Path, state: Path) -> None:
    code = """
state.write_text("0 5000 4000000:4900\\n")
cards = find_cards(Settings(gpus="0", gpu_others="record", gpu_release_s=5.0), {})
assert len(cards.make_ready()) == 1
began = time.monotonic()
assert cards.make_ready() == []
assert time.monotonic() - began < 4.0
"""
    inside(nvml_library, state, code)


def test_two_sessions_do_not_measure_each_other_on_one_card(nvml_library: Path, state: Path) -> None:
    code = """
import subprocess
other = '''
import sys
from pytest_kvcache.cards import find_cards, held
from pytest_kvcache.settings import Settings
with held(find_cards(Settings(gpus="0"), {}), print):
    print("held", flush=True)
    sys.stdin.read()
'''
said = []
with subprocess.Popen([sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == "held\\n"
    cards = find_cards(Settings(gpus="0,1", gpu_wait_s=0.4), {})
    def take():
        with held(cards, said.append):
            pass
    text = refused(take)
    assert "another session measures on card 0" in text and "--kv-gpu-wait-s" in text, text
    assert said == ["waiting for card 0 (Stub Card 0): another session measures on it"], said
    with held(find_cards(Settings(gpus="1"), {}), said.append):
        pass
    threading.Timer(0.5, process.stdin.close).start()
    cards.settings = Settings(gpus="0,1", gpu_wait_s=20.0)
    take()
"""
    inside(nvml_library, state, code)


def test_a_launched_server_sees_its_cards_and_the_run_names_them(nvml_library: Path, state: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    command = f"bash -c 'echo $CUDA_VISIBLE_DEVICES > {seen}; exec {launch_text(metrics='vllm')}'"
    code = f"""
from contextlib import ExitStack
from pytest_kvcache.opening import Servers
servers = Servers(Settings(gpus="1"), (), {{}}, lambda text: None)
with ExitStack() as stack:
    target = servers.open({command!r}, "before", stack, Path("server.log").absolute())
    assert [card["uuid"] for card in target.gpus] == ["GPU-stub-1"] and target.launch_id
    assert Path({str(seen)!r}).read_text() == "GPU-stub-1\\n"
    state.write_text("0 10\\n1 30000 4000001:29000\\n")
for cards in servers._cards.values():
    cards.settings = Settings(gpus="1", gpu_release_s=0.3)
with ExitStack() as stack:
    text = refused(lambda: servers.open({command!r}, "after", stack, Path("server.log").absolute()))
assert "not free again" in text, text
servers.close()
"""
    inside(nvml_library, state, code)
