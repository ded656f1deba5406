"""The processes that a run has started, as the kernel sees them.

A run that stands still says so: where it stands, since when, and what every thread was doing.
"""

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
from hacrl.training.accuracy import Accuracy
from hacrl.training.metrics import StepReport
from hacrl.training.observer import Observer, Phase
from hacrl.types import VerifiedRollout

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "Z": "ended, not collected",
    "T": "stopped",
    "t": "traced",
    "I": "idle",
    "X": "dead",
}
STALL_MINUTES = 30.0  # without movement, until a run says where it hangs
_LONGEST_COMMAND = 200  # characters


@dataclass(frozen=True)
class ChildProcess:
    """One process below a run's own."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    command: str

    def __str__(self) -> str:
        used = f"{self.cpu_seconds:.1f} s of CPU"
        return f"pid {self.pid} (parent {self.parent}), {self.state}, {used}: {self.command}"


def child_processes(pid: int, proc: Path = Path("/proc")) -> list[ChildProcess] | None:
    """All processes below one, its own children first; None where the system has no /proc to ask."""
    if not (proc / "self" / "stat").exists():
        return None
    found = [_read(entry) for entry in proc.iterdir() if entry.name.isdecimal()]
    by_parent: dict[int, list[ChildProcess]] = {}
    for one in sorted((one for one in found if one is not None), key=lambda one: one.pid):
        by_parent.setdefault(one.parent, []).append(one)
    below: list[ChildProcess] = list(by_parent.get(pid, []))
    for one in below:  # grows while it is walked: children of children
        below += by_parent.get(one.pid, [])
    return below


def _read(entry: Path) -> ChildProcess | None:
    try:
        # "pid (name) state ppid ...": the name may hold spaces and brackets
        name, _, rest = entry.joinpath("stat").read_text("utf-8", errors="replace").rpartition(")")
        command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has ended meanwhile, or is not ours to read
        return None
    fields = rest.split()
    ticks = int(fields[11]) + int(fields[12])  # user and system time
    return ChildProcess(
        pid=int(entry.name),
        parent=int(fields[1]),
        state=_STATES.get(fields[0], fields[0]),
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
        command=(command.strip() or name.partition("(")[2])[:_LONGEST_COMMAND],
    )


STALLS = "stalls.txt"
_LOOKS_PER_LIMIT = 20  # how often it is looked, so that a stall is told at most 5% late ...
_LONGEST_INTERVAL = 30.0  # ... and at most so many seconds
_DOING: dict[Phase, str] = {
    "evaluate": "the evaluation",
    "sync": "the update of the engine",
    "rollout": "the responses",
    "verify": "the verdicts",
    "learn": "the learning",
    "save": "the saving",
}


@dataclass(frozen=True)
class _Place:
    """What was begun last, and when."""

    words: str
    since: float
    at_work: Mapping[str, Phase] = field(default_factory=dict)  # by agent


class Watchdog(Observer):
    """Looks on from a thread of its own; it never ends or changes anything.

    The thread starts with the first event (or :meth:`start`) and goes with :meth:`on_end`. Every event but
    a note is a movement; :meth:`moved` reports others, from any thread. ``say`` is called from the
    watchdog's thread, and may itself send a note to all observers.
    """

    def __init__(
        self,
        minutes: float,
        folder: Path,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
        interval: float | None = None,
    ) -> None:
        """``minutes`` without movement are a stall, 0: never. ``interval``: seconds between two looks."""
        self._limit = 60 * minutes
        self._folder = folder
        self._say = say
        self._clock = clock
        self._now = now
        self._interval = interval or min(_LONGEST_INTERVAL, self._limit / _LOOKS_PER_LIMIT)
        self._place = _Place("the start of the run", clock())
        self._moved_at = self._place.since
        self._told: tuple[float, float] | None = None  # movement that nothing followed, and when it was told
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look; does nothing if it does so already, or if it is off."""
        if self._limit <= 0 or self._thread is not None or self._ended.is_set():
            return
        self._thread = threading.Thread(target=self._watch, name="hacrl-watchdog", daemon=True)
        self._thread.start()

    def moved(self, *_: object) -> None:
        """Something got done. Takes any arguments, so that it can be handed to whoever reports progress."""
        self._moved_at = self._clock()

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Work of one kind begins for one agent."""
        # side by side; otherwise verdicts come in between
        together = {phase, *self._place.at_work.values()} <= {"sync", "rollout"}
        at_work: dict[str, Phase] = {**(self._place.at_work if together else {}), agent: phase}
        when = f"step {step}" if step else "before the first step"
        doing = {
            kind: " and ".join(name for name, at in at_work.items() if at == kind)
            for kind in dict.fromkeys(at_work.values())
        }
        words = " and ".join(f"{_DOING[kind]} of {agents} ({kind}, {when})" for kind, agents in doing.items())
        self._place = _Place(words, self._clock(), at_work)
        self._event()

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """An agent's responses are all judged."""
        self._event()

    def on_response(self, agent: str) -> None:
        """One response has ended."""
        self.moved()

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """A step is done; what comes next may be its checkpoint, which is no phase."""
        self._place = _Place(f"what follows step {report.step}", self._clock())
        self._event()

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """An evaluation is done."""
        self._place = _Place(f"what follows the evaluation after {step} steps", self._clock())
        self._event()

    def on_end(self) -> None:
        """Stop looking; waits for a look that is under way."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def look(self) -> None:
        """Tell a stall, if there is one that has not just been told; and that a told one is over."""
        now, moved_at, place = self._clock(), self._moved_at, self._place
        if self._told is not None and self._told[0] != moved_at:
            stood = moved_at - self._told[0]
            self._told = None
            self._say(f"moving again after {_minutes(stood)}, in {place.words}")
        told_at = moved_at if self._told is None else self._told[1]
        if now - told_at < self._limit:
            return
        self._told = (moved_at, now)
        self._tell(place, silent=now - moved_at, in_phase=now - place.since)

    def _event(self) -> None:
        self.moved()
        self.start()

    def _tell(self, place: _Place, silent: float, in_phase: float) -> None:
        since = self._now() - timedelta(seconds=silent)
        message = (
            f"nothing has moved for {_minutes(silent)}, since {since:%Y-%m-%d %H:%M:%S}, in "
            f"{place.words}, which began {_minutes(in_phase)} ago; the run goes on waiting"
        )
        try:
            stacks = self._write(message)
        except OSError as error:
            stacks = f"stacks of all threads could not be written: {error}"
        self._say(f"{message}. {stacks}")

    def _write(self, message: str) -> str:
        """Append what every thread and process is doing to the run's folder, if that is there yet."""
        if not self._folder.is_dir():
            return "There is no run folder yet to write stacks to"
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
        return f"What all threads and processes are doing: {path}"

    def _watch(self) -> None:
        try:
            self._expect_to_be_back()
            while not self._ended.wait(self._interval):
                self._expect_to_be_back()
                self.look()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _expect_to_be_back(self) -> None:
        """Code that never lets go of Python's lock (an endless regular expression) stops this thread too;
        then faulthandler, which needs no lock, writes the stacks to stderr."""
        with suppress(AttributeError, OSError, RuntimeError, ValueError):  # a notebook's stderr is no file
            faulthandler.dump_traceback_later(self._limit + 2 * self._interval, file=sys.stderr)


def _processes() -> list[str]:
    found = child_processes(os.getpid())
    if found is None:
        return ["not known on this system"]
    return [str(one) for one in found] or ["none"]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"
