"""Report a run that makes no progress: its phase, since when, and what all threads and processes do."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from hacrl.plain_text import printable
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer, Phase
from hacrl.types import VerifiedRollout

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "Z": "zombie",
    "T": "stopped",
    "t": "traced",
    "I": "idle",
    "X": "dead",
}
STALL_MINUTES = 30.0  # without movement, until a run says where it hangs
_COMMAND_LIMIT = 200  # characters


@dataclass(frozen=True)
class ChildProcess:
    """A descendant of the run's process."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    command: str

    def __str__(self) -> str:
        used = f"{self.cpu_seconds:.1f} s of CPU"
        return f"pid {self.pid} (parent {self.parent}), {self.state}, {used}: {self.command}"


def child_processes(pid: int, proc: Path = Path("/proc")) -> list[ChildProcess] | None:
    """Return all descendants of a process, its own children first; None if the system has no /proc."""
    if not (proc / "self" / "stat").exists():
        return None
    found = [_read(entry) for entry in proc.iterdir() if entry.name.isdecimal()]
    by_parent: dict[int, list[ChildProcess]] = {}
    for process in sorted((process for process in found if process is not None), key=lambda p: p.pid):
        by_parent.setdefault(process.parent, []).append(process)
    descendants: list[ChildProcess] = list(by_parent.get(pid, []))
    for process in descendants:  # the list grows during the loop
        descendants += by_parent.get(process.pid, [])
    return descendants


def _read(entry: Path) -> ChildProcess | None:
    try:
        # "pid (name) state ppid ...": the name may contain spaces and parentheses
        name, _, rest = entry.joinpath("stat").read_text("utf-8", errors="replace").rpartition(")")
        command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # the process has ended, or may not be read
        return None
    fields = rest.split()
    ticks = int(fields[11]) + int(fields[12])  # user and system time
    return ChildProcess(
        pid=int(entry.name),
        parent=int(fields[1]),
        state=_STATES.get(fields[0], fields[0]),
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
        command=(command.strip() or name.partition("(")[2])[:_COMMAND_LIMIT],
    )


STALLS = "stalls.txt"
_CHECKS_PER_LIMIT = 20  # a stall is reported at most 5% of the limit late ...
_LONGEST_INTERVAL = 30.0  # ... and at most this many seconds late
_PHASE_NAMES: dict[Phase, str] = {
    "evaluate": "the evaluation",
    "sync": "the weight sync",
    "rollout": "the generation",
    "verify": "the verification",
    "learn": "the training",
    "save": "the saving",
}


@dataclass(frozen=True)
class _Activity:
    """What the run started last, and when."""

    description: str
    since: float
    phases: Mapping[str, Phase] = field(default_factory=dict)  # agent -> phase


class Watchdog(Observer):
    """Watches a run from its own thread; it never stops or changes anything.

    The thread starts with the first event (or :meth:`start`) and ends with :meth:`on_end`. Every event but a
    note is progress. ``report`` receives a sentence; it is called in the watchdog's thread, and may send a
    note to all observers.
    """

    def __init__(
        self,
        minutes: float,
        folder: Path,
        report: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
        interval: float | None = None,
        overlaps: bool = False,
    ) -> None:
        """Report a stall after ``minutes`` without progress (0: never); check every ``interval`` seconds.

        ``overlaps``: agents sample while they learn, so the last phase of every agent is reported.
        """
        self._overlaps = overlaps
        self._limit = 60 * minutes
        self._folder = folder
        self._report = report
        self._clock = clock
        self._now = now
        self._interval = interval or min(_LONGEST_INTERVAL, self._limit / _CHECKS_PER_LIMIT)
        self._activity = _Activity("the start of the run", clock())
        self._last_progress = self._activity.since
        self._reported: tuple[float, float] | None = None  # time of the last progress, and of its report
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs already or the watchdog is off."""
        if self._limit <= 0 or self._thread is not None or self._ended.is_set():
            return
        self._thread = threading.Thread(target=self._watch, name="hacrl-watchdog", daemon=True)
        self._thread.start()

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Record the phase; agents that generate concurrently are listed together."""
        # Agents that do not generate concurrently have a verification in between.
        is_concurrent = self._overlaps or {phase, *self._activity.phases.values()} <= {"sync", "rollout"}
        phases: dict[str, Phase] = {**(self._activity.phases if is_concurrent else {}), agent: phase}
        when = f"step {step}" if step else "before the first step"
        agents_by_phase = {
            kind: " and ".join(name for name, agents_phase in phases.items() if agents_phase == kind)
            for kind in dict.fromkeys(phases.values())
        }
        description = " and ".join(
            f"{_PHASE_NAMES[kind]} of {agents} ({kind}, {when})" for kind, agents in agents_by_phase.items()
        )
        self._activity = _Activity(description, self._clock(), phases)
        self._event()

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Count verified rollouts as progress."""
        self._event()

    def on_response(self, agent: str) -> None:
        """Count a finished response as progress."""
        self._last_progress = self._clock()

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Record the end of a step; next comes its checkpoint, which is not a phase."""
        self._activity = _Activity(f"the work after step {report.step}", self._clock())
        self._event()

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Record the end of an evaluation."""
        self._activity = _Activity(f"the work after the evaluation at step {step}", self._clock())
        self._event()

    def on_end(self) -> None:
        """Stop the thread, after a check that is running."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def check(self) -> None:
        """Report a stall, again after each further limit; report also that a stall is over."""
        now, last_progress, activity = self._clock(), self._last_progress, self._activity
        if self._reported is not None and self._reported[0] != last_progress:
            stalled = last_progress - self._reported[0]
            self._reported = None
            self._report(f"progress again after {_in_minutes(stalled)}, in {activity.description}")
        last_report = last_progress if self._reported is None else self._reported[1]
        if now - last_report < self._limit:
            return
        self._reported = (last_progress, now)
        self._report_stall(activity, silent=now - last_progress, in_phase=now - activity.since)

    def _event(self) -> None:
        self._last_progress = self._clock()
        self.start()

    def _report_stall(self, activity: _Activity, silent: float, in_phase: float) -> None:
        since = self._now() - timedelta(seconds=silent)
        message = (
            f"no progress for {_in_minutes(silent)}, since {since:%Y-%m-%d %H:%M:%S}, in "
            f"{activity.description}, which began {_in_minutes(in_phase)} ago; the run keeps waiting"
        )
        try:
            stacks = self._write(message)
        except OSError as error:
            stacks = f"The stacks of all threads could not be written: {error}"
        self._report(f"{message}. {stacks}")

    def _write(self, message: str) -> str:
        """Append the stacks of all threads and a list of processes to stalls.txt; return where they are."""
        if not self._folder.is_dir():
            return "The run's folder does not exist yet, so no stacks were written"
        path = self._folder / STALLS
        with path.open("a", encoding="utf-8") as file:
            file.write(
                f"{self._now():%Y-%m-%d %H:%M:%S}  {printable(message)}\n\nProcesses below this one:\n"
            )
            file.writelines(f"  {printable(line)}\n" for line in _processes())
            file.write("\nThreads:\n")
            for thread in threading.enumerate():
                file.write(f"  0x{thread.ident or 0:016x} {printable(thread.name)}\n")
            file.write("\n")
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(f"\n{'-' * 80}\n")
        return f"Stacks of all threads and a list of processes: {path}"

    def _watch(self) -> None:
        try:
            self._arm_faulthandler()
            while not self._ended.wait(self._interval):
                self._arm_faulthandler()
                self.check()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _arm_faulthandler(self) -> None:
        """Make faulthandler write the stacks to stderr unless this thread runs again in time.

        Code that holds the interpreter lock (e.g. an endless regular expression) stops this thread too;
        faulthandler does not need the lock.
        """
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # a notebook's stderr has no file
            faulthandler.dump_traceback_later(self._limit + 2 * self._interval, file=sys.stderr)


def _processes() -> list[str]:
    found = child_processes(os.getpid())
    if found is None:
        return ["unknown on this system"]
    return [str(process) for process in found] or ["none"]


def _in_minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"
