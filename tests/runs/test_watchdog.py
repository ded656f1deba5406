"""A run without progress is reported with its phase, and is not changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

import pytest

from hacrl.runs.watchdog import STALLS, Watchdog, child_processes
from hacrl.training.observer import Observers
from tests.tracking.scenario import accuracies, report
from tests.tracking.test_progress import Clock

GUARD = 60.0  # seconds a thread may take that is not stuck
NOON = datetime(2026, 1, 2, 12, 0, 0)


class Watched:
    """A watchdog of 30 minutes with the test's clock, and its reports. Its thread hardly ever checks."""

    def __init__(self, folder: Path, minutes: float = 30, interval: float | None = 1000.0) -> None:
        self.clock = Clock()
        self.reports: list[str] = []
        self.reported = threading.Event()
        self.dog = Watchdog(
            minutes, folder, self.report, clock=self.clock, now=lambda: NOON, interval=interval
        )

    def report(self, message: str) -> None:
        self.reports.append(message)
        self.reported.set()

    def wait(self, minutes: float) -> int:
        """Let time pass and check; return the number of reports so far."""
        self.clock.now += 60 * minutes
        self.dog.check()
        return len(self.reports)


@pytest.fixture
def watched(tmp_path: Path):
    one = Watched(tmp_path)
    yield one
    one.dog.on_end()
    assert "hacrl-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_a_report_names_phase_agent_and_time_and_is_repeated_after_the_limit(watched) -> None:
    watched.dog.on_phase(7, "rollout", "qwen")
    assert watched.wait(29.9) == 0
    assert watched.wait(0.1) == 1
    assert watched.reports[0].startswith(
        "no progress for 30 min, since 2026-01-02 11:30:00, in the generation of qwen (rollout, step 7), "
        "which began 30 min ago; the run keeps waiting. Stacks of all threads and a list of processes: "
    )
    assert watched.wait(29.9) == 1
    assert watched.wait(0.1) == 2
    assert watched.reports[1].startswith("no progress for 60 min, since 2026-01-02 11:00:00, in the gen")


def test_a_finished_response_is_progress_and_ends_a_stall(watched) -> None:
    watched.dog.on_phase(7, "rollout", "qwen")
    watched.clock.now += 60 * 25
    watched.dog.on_response("qwen")
    assert watched.wait(29.9) == 0
    watched.dog.on_response("qwen")
    assert watched.wait(31) == 1
    # 25 + 29.9 + 31 minutes after the phase began
    assert "no progress for 31 min" in watched.reports[0]
    assert "which began 86 min ago" in watched.reports[0]
    watched.clock.now += 60 * 5
    watched.dog.on_response("qwen")
    assert watched.wait(1) == 2
    assert watched.reports[1] == "progress again after 36 min, in the generation of qwen (rollout, step 7)"
    assert watched.wait(29.5) == 3  # counted from the progress, not from the report
    assert "no progress for 30 min" in watched.reports[2]


def test_agents_that_generate_concurrently_are_both_named(watched) -> None:
    for phase, agent in (("sync", "qwen"), ("sync", "llama"), ("rollout", "llama")):
        watched.dog.on_phase(7, phase, agent)
    assert watched.wait(31) == 1
    update = "in the weight sync of qwen (sync, step 7)"
    assert f"{update} and the generation of llama (rollout, step 7), which began" in watched.reports[0]
    watched.dog.on_phase(7, "rollout", "qwen")
    watched.wait(31)
    assert "in the generation of qwen and llama (rollout, step 7), which began 31 min" in watched.reports[-1]
    watched.dog.on_phase(7, "verify", "qwen")
    watched.dog.on_phase(7, "rollout", "llama")
    watched.wait(31)
    assert "in the generation of llama (rollout, step 7)" in watched.reports[-1]


def test_every_event_but_a_note_is_progress(watched) -> None:
    events = [
        lambda: watched.dog.on_phase(1, "learn", "qwen"),
        lambda: watched.dog.on_rollouts(1, "qwen", []),
        lambda: watched.dog.on_step(report(1), {}),
        lambda: watched.dog.on_evaluation(1, accuracies(1)),
    ]
    for event in events:
        watched.clock.now += 60 * 20
        event()
        assert watched.wait(20) == 0
    watched.dog.on_note(1, "the collapse watch has something to say")
    assert watched.wait(10) == 1
    assert "in the work after the evaluation at step 1, which began 30 min ago" in watched.reports[0]


def test_a_report_may_be_sent_to_all_observers_including_itself(tmp_path: Path) -> None:
    everyone: list[Observers] = []
    clock = Clock()
    dog = Watchdog(
        30, tmp_path, lambda message: everyone[0].on_note(0, message), clock=clock, interval=1000.0
    )
    heard: list[str] = []

    class Listener(Watchdog):
        def on_note(self, step: int, note: str) -> None:
            heard.append(note)

    everyone.append(Observers([dog, Listener(0, tmp_path, heard.append)]))
    for _ in range(3):
        clock.now += 60 * 30
        dog.check()
    assert [note[:23] for note in heard] == [f"no progress for {n} min," for n in (30, 60, 90)]


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("evaluate", "the evaluation of llama (evaluate, before the first step)"),
        ("sync", "the weight sync of llama (sync, before the first step)"),
        ("verify", "the verification of llama (verify, before the first step)"),
        ("learn", "the training of llama (learn, before the first step)"),
        ("save", "the saving of llama (save, before the first step)"),
    ],
)
def test_every_phase_has_a_description(watched, phase, words: str) -> None:
    watched.dog.on_phase(0, phase, "llama")
    assert watched.wait(30) == 1
    assert words in watched.reports[0]


def hold(gate: threading.Event) -> None:
    gate.wait()


def test_the_file_lists_stacks_of_threads_and_processes(watched, tmp_path: Path) -> None:
    gate = threading.Event()
    stuck = threading.Thread(target=hold, args=(gate,), name="stuck\x1b[2J")
    stuck.start()
    child = subprocess.Popen([sys.executable, "-c", "input()", "\x1b[2J"], stdin=subprocess.PIPE)
    try:
        watched.dog.on_phase(3, "verify", "qwen")
        watched.wait(30)
        watched.wait(30)
    finally:
        gate.set()
        stuck.join()
        child.communicate()
    text = (tmp_path / STALLS).read_text("utf-8")
    assert text.count("2026-01-02 12:00:00  no progress for ") == 2  # the second does not replace the first
    first = text.split("-" * 80)[0]
    assert re.search(
        rf"  pid {child.pid} \(parent {os.getpid()}\), \w+, \d+\.\d s of CPU: .*-c input\(\)", first
    )
    name = re.search(r"  (0x[0-9a-f]{16}) stuck\\x1b\[2J\n", first)
    assert name
    stack = first.split(f"Thread {name[1]}")[1].split("\n\n")[0]  # what faulthandler wrote of that thread
    assert re.search(r'test_watchdog\.py", line \d+ in hold', stack)
    assert "test_the_file_lists_stacks" in first  # and of this one
    assert "\x1b" not in text


def test_a_stall_is_reported_without_a_folder_or_disk_space(tmp_path: Path) -> None:
    early = Watched(tmp_path / "not-yet")
    assert early.wait(30) == 1
    assert "in the start of the run, " in early.reports[0]
    assert early.reports[0].endswith("The run's folder does not exist yet, so no stacks were written")
    assert not (tmp_path / "not-yet").exists()
    (tmp_path / STALLS).mkdir()  # cannot be written to
    full = Watched(tmp_path)
    assert full.wait(30) == 1
    assert "The stacks of all threads could not be written: [Errno 21] Is a directory" in full.reports[0]


def test_the_thread_finds_a_stall_and_ends(tmp_path: Path) -> None:
    watched = Watched(tmp_path, interval=0.01)
    watched.dog.on_phase(1, "learn", "qwen")
    (thread,) = (one for one in threading.enumerate() if one.name == "hacrl-watchdog")
    assert thread.daemon
    watched.clock.now += 60 * 29
    assert not watched.reported.wait(0.2)  # by its clock the limit is not reached, however often it checks
    watched.clock.now += 60
    assert watched.reported.wait(GUARD)
    watched.dog.on_end()
    assert not thread.is_alive()
    watched.dog.on_phase(2, "evaluate", "qwen")  # an evaluation after the end
    watched.dog.on_end()
    assert "hacrl-watchdog" not in {one.name for one in threading.enumerate()}


def test_a_disabled_watchdog_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    watched = Watched(tmp_path, minutes=0, interval=None)
    watched.dog.start()
    watched.dog.on_phase(1, "learn", "qwen")
    assert threading.active_count() == before
    watched.dog.on_end()
    never = Watched(tmp_path)
    never.dog.on_end()  # ended before it began
    assert watched.reports == never.reports == []


STUCK = """
import ctypes, sys
from pathlib import Path
from hacrl.runs.watchdog import Watchdog

dog = Watchdog(0.5 / 60, Path(sys.argv[1]), lambda message: print(message, flush=True), interval=0.1)
dog.on_phase(1, "verify", "qwen")
def never_lets_go():
    ctypes.PyDLL(None).sleep(4)  # in C, with Python's lock held: no other thread runs
never_lets_go()
dog.on_end()
"""


def test_code_that_holds_pythons_lock_is_found_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=GUARD,
    )
    assert "Timeout (0:00:00" in done.stderr
    assert re.search(r'File "<string>", line \d+ in never_lets_go', done.stderr)


def test_child_processes_include_all_descendants(tmp_path: Path) -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen(["sh", "-c", f'"{sys.executable}" -c "{inner}"; true'], stdin=subprocess.PIPE)
    try:
        found = []
        for _ in range(6000):
            found = child_processes(child.pid) or []
            if len(found) == 2 and "-c input()" in found[1].command:
                break
            threading.Event().wait(0.01)
        assert [one.parent for one in found] == [child.pid, found[0].pid]
        assert [one.parent for one in child_processes(found[0].pid) or []] == [found[0].pid]
        assert child.pid in {one.pid for one in child_processes(os.getpid()) or []}
        assert child_processes(found[1].pid) == []
        assert child_processes(os.getpid(), proc=tmp_path) is None  # other systems
    finally:
        child.communicate()


def test_names_with_parentheses_and_vanished_processes(tmp_path: Path) -> None:
    """The fields of /proc/PID/stat according to proc(5): utime and stime are the 14th and 15th."""
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").touch()
    for pid, name, parent in ((7, "a) R 9 (b", 5), (8, "gone", 5), (12, "worker", 7)):
        (tmp_path / str(pid)).mkdir()
        fields = [parent, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3 * ticks, ticks // 2, 0]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) D {' '.join(map(str, fields))}\n")
        (tmp_path / str(pid) / "cmdline").write_bytes(b"" if pid == 7 else b"run\0it\0")
    (tmp_path / "8" / "stat").unlink()
    first, second = child_processes(5, proc=tmp_path) or []
    assert str(first) == "pid 7 (parent 5), waiting for a device, 3.5 s of CPU: a) R 9 (b"
    assert (second.pid, second.command) == (12, "run it")
