"""The start of an engine's child process: it imports vLLM early and builds the engine when asked to.

The process and its program are the real ones. What they import is a stand-in for vLLM, which is not here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm import child_program
from hacrl.engines.vllm.backend import EngineLostError
from hacrl.engines.vllm.child import ChildBackend

SECONDS = 60.0  # a hang guard
STAND_IN = """
import os, pathlib, time
here = pathlib.Path(__file__).parent.parent
if (here / "broken").exists():
    raise ImportError("no such library")
with (here / "told").open("a") as told:
    told.write("imported\\n")

class LLM:
    def __init__(self, model, **_):
        if model == "endless":
            time.sleep(600)
        if model == "bad":
            raise ValueError("no such model")
        with (here / "told").open("a") as told:
            told.write(f"built {model}\\n")

    def collective_rpc(self, method, timeout=None, args=()):
        if method == "hangs":
            time.sleep(600)
        if method == "fails" or (here / "without workers").exists():
            raise RuntimeError("no such thing")
        return [method]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)  # a child finds what we find
    return tmp_path


@pytest.fixture
def backend(folder: Path) -> Iterator[Callable[..., ChildBackend]]:
    made: list[ChildBackend] = []

    def make(model: str = "small", start_timeout: float = SECONDS) -> ChildBackend:
        log = folder / "log"
        made.append(
            ChildBackend("vLLM engine of agent 'ada'", {"model": model}, {}, False, log, start_timeout)
        )
        return made[-1]

    yield make
    for child in made:
        child.close()


def told(folder: Path) -> list[str]:
    path = folder / "told"
    return path.read_text().splitlines() if path.exists() else []


def soon(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if child_program.__name__ in p.cmdline()]


def test_launching_imports_vllm_and_starting_builds_the_engine(folder: Path, backend) -> None:
    child = backend()
    child.launch()
    assert soon(lambda: told(folder) == ["imported"])
    child.start()
    assert told(folder) == ["imported", "built small"]
    assert child.call("hello") == ["hello"]
    (first,) = processes()
    first.kill()
    with pytest.raises(EngineLostError, match="died while hello"):
        child.call("hello")
    child.start()  # without a launch: that is part of it then
    assert told(folder) == ["imported", "built small"] * 2
    assert child.call("hello") == ["hello"]
    child.close()
    assert processes() == []


def test_an_engine_that_hangs_is_lost_and_ended(folder: Path, backend) -> None:
    child = backend()
    child.start()
    (process,) = processes()
    number = child._send({"do": "call", "method": "hangs", "arguments": []})
    with pytest.raises(EngineLostError, match=r"gave no answer while working for 0.5 s, its log is"):
        child._receive(number, "working", 0.5)
    child.start()  # ends the other one
    assert not process.is_running()
    assert child.call("hello") == ["hello"]


def test_a_launched_process_can_be_closed_before_it_starts(folder: Path, backend) -> None:
    child = backend()
    child.launch()
    assert soon(lambda: bool(processes()))  # the command line of a new process is empty for a moment
    (process,) = processes()
    child.close()
    assert not process.is_running()
    child.launch()
    assert soon(lambda: told(folder)[-1:] == ["imported"])
    child.close()
    assert processes() == []
    assert "built small" not in told(folder)


def test_a_process_that_died_after_its_launch_fails_to_start(folder: Path, backend) -> None:
    child = backend()
    child.launch()
    assert soon(lambda: bool(processes()))  # the command line of a new process is empty for a moment
    (process,) = processes()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(SECONDS)
    message = (
        r"engine of agent 'ada' does not start: its process is gone \(exit code .*; its log .*log is empty"
    )
    with pytest.raises(EngineError, match=message):
        child.start()
    child.start()
    assert told(folder)[-1] == "built small"
    child.close()


@pytest.mark.parametrize(
    ("model", "breaks", "message"),
    [
        ("bad", False, "does not start: no such model; its log .*ValueError: no such model"),
        ("small", True, "does not start: no such library; its log .*ImportError: no such library"),
    ],
)
def test_a_failed_start_names_the_error(folder: Path, backend, model, breaks, message: str) -> None:
    if breaks:
        (folder / "broken").touch()
    child = backend(model)
    child.launch()
    with pytest.raises(EngineError, match=f"(?s){message}"):
        child.start()
    assert processes() == []


def test_a_process_that_is_never_ready_is_ended(folder: Path, backend) -> None:
    child = backend("endless", start_timeout=1.0)
    child.launch()
    with pytest.raises(EngineLostError, match=r"was not ready after 1 s;"):
        child.start()
    assert processes() == []


def test_a_failed_call_is_told_from_dead_workers(folder: Path, backend) -> None:
    child = backend()
    child.start()
    with pytest.raises(EngineError, match="failed while fails: no such thing") as caught:
        child.call("fails")
    assert not isinstance(caught.value, EngineLostError)
    assert child.call("hello") == ["hello"]
    (folder / "without workers").touch()
    with pytest.raises(EngineLostError, match="died while hello: no such thing"):
        child.call("hello")
