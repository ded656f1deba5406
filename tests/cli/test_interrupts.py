"""The first signal stops a run after saving, a second one at once, whatever the main thread is doing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hacrl.cli import interrupts
from hacrl.cli.interrupts import STOP_SIGNALS, stop_on_signals
from hacrl.runs.watchdog import child_processes

GUARD = 120.0  # seconds that nothing may take which is not stuck
MESSAGE = "finishing the current phase, then saving everything; a second signal exits at once, without saving"

PRELUDE = """
import hashlib, signal, sys, threading, time
from hacrl.cli.interrupts import stop_on_signals

stop = threading.Event()
def say(message):
    print("said", message, flush=True)
def work(until):
    print("ready", flush=True)
    until()
"""
SAVES_AND_STOPS = """
with stop_on_signals(stop.set, say) as request:
    work(stop.wait)
    time.sleep(1)  # saving takes its time
    print("saved")
sys.exit(128 + request.received)
"""
HANGS = """
threading.Thread(target=threading.Lock().__enter__).start()
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire).start()  # no daemon: an ordinary exit would wait for it
print("not flushed yet")
with stop_on_signals(stop.set, say):
    work({until})
"""
# waits for a lock; computes in C for minutes, where no Python handler runs; ignores that it is to stop
LOCKED, COMPUTING, IGNORES = (
    "lock.acquire",
    "lambda: hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)",
    "lambda: [time.sleep(0.01) for _ in iter(int, 1)]",
)


@contextmanager
def running(code: str, **options) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # empty: buffered, as it usually is
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code], stdout=subprocess.PIPE, text=True, env=environment, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines_until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    """Return the printed text up to a line that begins like this."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"it ended without {beginning!r}: {lines}")


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("times", [1, 2])
def test_the_first_signal_saves_and_stops(number: signal.Signals, times: int) -> None:
    """Also if the signal comes twice at once, as timeout(1) sends it."""
    with running(SAVES_AND_STOPS) as process:
        lines_until(process, "ready")
        for _ in range(times):
            process.send_signal(number)
        rest, _ = process.communicate(timeout=GUARD)
        assert rest.splitlines() == [f"said {number.name}: {MESSAGE}", "saved"]
        assert process.returncode == 128 + number


@pytest.mark.parametrize(
    ("deliveries", "exits"),
    [
        ([(0.0, 15)], 0),
        ([(0.0, 15), (0.4, 15)], 0),  # the same signal, sent twice
        ([(0.0, 15), (0.4, 15), (0.6, 15)], 1),
        ([(0.0, 15), (0.6, 2)], 1),
        ([(0.0, 15), (60.0, 15 | 0x80)], 0),  # the Python handler runs a minute later
        ([(0.0, 15), (60.0, 15 | 0x80), (60.1, 2)], 1),
        ([(0.0, 15 | 0x80), (60.0, 15 | 0x80)], 1),  # only the Python handler delivers
    ],
)
def test_which_delivery_counts_as_a_second_signal(deliveries, exits: int, monkeypatch) -> None:
    now, stops, exited = [0.0], [], []
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(interrupts, "_exit_now", exited.append)
    request = interrupts.StopRequest(lambda: stops.append(now[0]), lambda message: None)
    for moment, byte in deliveries:
        now[0] = moment
        request.receive(byte)
    assert stops == [0.0]
    assert request.received is signal.SIGTERM
    assert len(exited) == exits


@pytest.mark.parametrize("until", [LOCKED, COMPUTING, IGNORES])
@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_a_second_signal_exits_at_once_whatever_hangs(until: str, second: signal.Signals) -> None:
    with running(HANGS.format(until=until)) as process:
        lines_until(process, "ready")
        process.send_signal(signal.SIGINT)
        assert lines_until(process, "said") == [f"said SIGINT: {MESSAGE}"]  # at once, too
        time.sleep(interrupts.SAME_SIGNAL_SECONDS + 0.2)
        process.send_signal(second)
        assert process.wait(GUARD) == 128 + second


def test_printed_text_is_flushed_and_a_full_pipe_does_not_block_the_exit() -> None:
    code = """
with stop_on_signals(stop.set, lambda message: print(message, file=sys.stderr, flush=True)):
    sys.stdout.write("the last words")
    sys.stderr.write("ready\\n")
    sys.stderr.flush()
    if {full}:
        print("." * 2**20)  # more than a pipe takes, and nobody reads
    time.sleep(600)
"""
    for full, seen in ((False, "the last words"), (True, None)):
        with running(code.format(full=full), stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.stderr.readline() == f"SIGTERM: {MESSAGE}\n"
            time.sleep(interrupts.SAME_SIGNAL_SECONDS + 0.2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(GUARD) == 143
            if seen is not None:
                assert process.stdout is not None
                assert process.stdout.read() == seen


def state_of(pid: int) -> str:
    """Return the letter of ps; Z for an ended process that no parent has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_workers_end_with_a_process_that_exits_at_once() -> None:
    """One worker is idle; the other computes, which its limit of CPU time ends."""
    code = """
from hacrl.tasks.math.pool import MathVerifier
from hacrl.config.schema import VerifierSettings

if __name__ == "__main__":
    verifier = MathVerifier(VerifierSettings(workers=2, time_limit=3.0))
    verifier.verify([("(x+1)^2", r"\\boxed{x^2+2x+1}"), ("(x+2)^2", r"\\boxed{x^2+4x+4}")])
    print("workers", *verifier.worker_pids(), flush=True)
    with stop_on_signals(stop.set, say):
        print("ready", flush=True)
        while True:
            verifier.verify([("\\\\sqrt{8}", r"\\boxed{9^{9^{9^{9}}}}")])
"""
    with running(code) as process:
        first = lines_until(process, "ready")[0].split()
        pids = [int(pid) for pid in first[1:]]
        assert first[0] == "workers"
        assert pids
        assert all(state_of(pid) != "Z" for pid in pids)
        process.send_signal(signal.SIGINT)
        lines_until(process, "said")
        time.sleep(interrupts.SAME_SIGNAL_SECONDS + 0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD) == 130
        assert wait_for(lambda: all(state_of(pid) == "Z" for pid in pids))


def test_a_closed_terminal_saves_and_stops(tmp_path: Path) -> None:
    """Text printed while saving is discarded and does not raise."""
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    code = f"""
with stop_on_signals(stop.set, say) as request:
    open({str(begun)!r}, "w").close()
    stop.wait()
    print("saving", flush=True)
    open({str(saved)!r}, "w").close()
sys.exit(128 + request.received)
"""
    terminal, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", PRELUDE + code], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        assert wait_for(begun.exists)
        os.close(terminal)
        process.send_signal(signal.SIGHUP)  # as the system does if it is the process's own terminal
        assert process.wait(GUARD) == 129
    assert saved.exists()


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGKILL", -9)])
def test_a_stopped_study_leaves_no_process_behind(number: str, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hacrl", "compare", "demo", "--methods", "gspo,hacpo", "--jobs", "2"]
    command += ["--output", str(tmp_path), "steps=500", "evaluation.problems=2", "rollout.prompts_per_step=2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        started = wait_for(lambda: len(list(tmp_path.rglob("metrics.jsonl"))) == 2)
        below = child_processes(process.pid) or []
        process.send_signal(getattr(signal, number))
        said, _ = process.communicate(timeout=GUARD)
    assert started
    assert process.returncode == code
    assert ("the same command continues from there" in said) == (number != "SIGKILL")
    workers = [one.pid for one in below if "spawn_main" in one.command]
    assert len(workers) == 2
    assert wait_for(lambda: all(state_of(pid) == "Z" for pid in workers))


def wait_for(condition: Callable[[], bool]) -> bool:
    """Return whether the condition becomes true before the time limit."""
    end = time.monotonic() + GUARD
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


def test_handlers_and_wakeup_descriptor_are_restored() -> None:
    before = handlers()
    said: list[str] = []
    with suppress(RuntimeError), stop_on_signals(said.clear, said.append) as request:
        assert handlers() != before
        assert "hacrl-signals" in {thread.name for thread in threading.enumerate()}
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError
    assert handlers() == before
    assert "hacrl-signals" not in {thread.name for thread in threading.enumerate()}
    assert signal.set_wakeup_fd(-1) == -1
    assert request.received is signal.SIGTERM  # what has come is taken before it closes
    assert said == [f"SIGTERM: {MESSAGE}"]
    with stop_on_signals(said.clear, said.append) as again:
        pass
    assert again.received is None


def test_the_wakeup_descriptor_of_an_event_loop_is_kept() -> None:
    theirs, other = socket.socketpair()
    theirs.setblocking(False)
    stopped = threading.Event()
    signal.set_wakeup_fd(theirs.fileno())
    try:
        with stop_on_signals(stopped.set, lambda message: None) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped.wait(GUARD)
        assert request.received is signal.SIGTERM
        assert other.recv(1) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
        theirs.close()
        other.close()


def test_a_broken_pipe_does_not_stop_signal_handling() -> None:
    def say(message: str) -> None:
        raise BrokenPipeError

    stopped = threading.Event()
    with stop_on_signals(stopped.set, say) as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(GUARD)
        (thread,) = (one for one in threading.enumerate() if one.name == "hacrl-signals")
        thread.join(0.2)
        assert thread.is_alive()
    assert request.received is signal.SIGINT


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_signals(lambda: None, lambda message: None) as request:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGINT)
        assert request.received is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_changes() -> None:
    before = handlers()
    seen: list[object] = []

    def work() -> None:
        with stop_on_signals(lambda: None, lambda message: None) as request:
            seen.extend([*handlers(), request.received])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [*before, None]
