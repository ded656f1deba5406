"""How fast a run goes, and so how long it will take.

What a run is doing right now, by phase and by agent: live in a terminal, a line per step elsewhere.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from hacrl.tracking.console import literal, say
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer, Phase
from hacrl.types import VerifiedRollout

_LAST_STEPS = 10  # the median of so many: one evaluation or restart among them does not count, a trend does


class Pace:
    """Counts steps, and the time from the end of one to the end of the next, all between them included."""

    def __init__(self, steps: int, done: int, clock: Callable[[], float]) -> None:
        self.steps = steps
        self.done = done
        self._clock = clock
        self._mark: float | None = None  # when the step under way began: when the last one ended
        self._lasted: deque[float] = deque(maxlen=_LAST_STEPS)

    def step_begins(self) -> None:
        """Work on a step is under way. Only the first of a process counts: others begin where one ended."""
        if self._mark is None:
            self._mark = self._clock()

    def step_ends(self, step: int, seconds: float) -> None:
        """A step is done; ``seconds`` counts if nobody said when it began."""
        now = self._clock()
        self._lasted.append(seconds if self._mark is None else now - self._mark)
        self._mark, self.done = now, step

    @property
    def left(self) -> float | None:
        """Seconds until the last step is done; None before there is a step to judge by."""
        if not self._lasted:
            return None
        one = statistics.median(self._lasted)
        under_way = 0.0 if self._mark is None else min(one, self._clock() - self._mark)
        return max(0.0, one * (self.steps - self.done) - under_way)


def duration(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``; days as ``2.5 days``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{seconds / 86400:.1f} days"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTABLE_GAP = 1e-4  # between sampler and learner; rounding in float32 makes 1e-6, the paper clips at 3e-4
_DOING: dict[Phase, str] = {
    "evaluate": "evaluating",
    "sync": "updating engine",
    "rollout": "answering",
    "verify": "being judged",
    "learn": "learning",
    "save": "being saved",
}
_NOW_WIDTH = 22  # of "updating engine · 1:23" and "evaluating 1234 · 5:07"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last values as a row of blocks, from 0 to 1."""
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(top, max(0, round(value * top)))] for value in values[-width:])


@dataclass
class _Work:
    """What an agent is at."""

    phase: Phase
    since: float
    ended: int = 0  # responses


class RunProgress(Observer):
    """Use as a context manager around one run. ``first_step`` steps were made by earlier processes."""

    def __init__(
        self,
        title: str,
        agents: Sequence[str],
        steps: int,
        console: Console,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._agents = list(agents)
        self._console = console
        self._clock = clock
        self._pace = Pace(steps, first_step, clock)
        self._began = clock()
        self._step = 0
        self._at_work: dict[str, _Work] = {}  # by agent
        self._paused: set[str] = set()
        self._tokens: dict[str, int] = {}  # generated in the step under way
        self._speeds: dict[str, float] = {}  # tokens per second of the last step
        self._rewards: dict[str, list[float]] = {name: [] for name in agents}
        self._gaps: dict[str, float] = {}  # of the newest step, where they are worth a word
        self._accuracy: dict[str, Accuracy] = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> RunProgress:
        self._began = self._clock()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Show who is at work."""
        phases = {phase, *(work.phase for work in self._at_work.values())}
        side_by_side = self._step == step and phases <= {"sync", "rollout"}  # else verdicts come in between
        others = self._at_work if side_by_side else {}
        self._step, self._at_work = step, {**others, agent: _Work(phase, self._clock())}
        if phase not in ("evaluate", "save"):
            self._pace.step_begins()

    def on_response(self, agent: str) -> None:
        """One more response of the phase has ended."""
        # in an evaluation, agents may answer in turns or side by side: who answers is at work
        self._at_work.setdefault(agent, _Work("evaluate", self._clock())).ended += 1

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Count an agent's tokens."""
        self._tokens[agent] = sum(verified.rollout.num_tokens for verified in rollouts)

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Move the bar; off a terminal, print a line."""
        self._pace.step_ends(report.step, seconds["whole"])
        for name, agent in report.agents.items():
            self._rewards[name].append(agent.rollout.reward)
        self._paused = set(self._agents) - set(report.agents)
        gaps = {name: agent.learning.sampler_gap or 0.0 for name, agent in report.agents.items()}
        self._gaps = {name: gap for name, gap in gaps.items() if gap > _NOTABLE_GAP}
        spent = {name: seconds.get(f"rollout/{name}", 0.0) for name in self._tokens}
        self._speeds = {name: self._tokens[name] / spent[name] for name in spent if spent[name] > 0}
        self._tokens = {}
        if not self._console.is_terminal:
            self._print(self._step_line(report, seconds["whole"]))

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Keep the newest accuracies; off a terminal, print a line."""
        self._accuracy = dict(accuracies)
        if not self._console.is_terminal:
            listed = "  ".join(f"{name} {accuracy.mean:.3f}" for name, accuracy in accuracies.items())
            self._print(f"after {step} steps  accuracy {listed}")

    def on_note(self, step: int, note: str) -> None:
        """Print it, above the live display if there is one."""
        self._print(f"note: {note}")

    def _print(self, line: str) -> None:
        say(self._console, f"{self._title}: {line}")

    def _step_line(self, report: StepReport, seconds: float) -> str:
        rewards = {name: f"{agent.rollout.reward:.3f}" for name, agent in report.agents.items()}
        parts = [f"step {report.step}/{self._pace.steps}", _listed("reward", rewards)]
        if self._gaps:
            parts.append(_listed("sampler gap", {name: f"{gap:.1e}" for name, gap in self._gaps.items()}))
        if self._speeds:
            speeds = {name: f"{speed:,.0f}" for name, speed in self._speeds.items()}
            parts.append(_listed("tokens/s", speeds))
        left = f", about {duration(self._pace.left)} left" if self._pace.left else ""
        return "  ".join([*parts, f"({seconds:.1f} s{left})"])

    def _render(self) -> Group:
        return Group(self._header(), self._table())

    def _header(self) -> Table:
        """Title, bar, steps, time elapsed and left, on one line of 80 columns."""
        pace = self._pace
        times = f"{duration(self._clock() - self._began)} elapsed"
        if pace.left is not None:
            times += f" · about {duration(pace.left)} left"
        words = literal(f"{pace.done}/{pace.steps} steps · {times}")
        title = literal(self._title)
        width = max(6, min(40, self._console.width - title.cell_len - words.cell_len - 3))
        header = Table.grid(padding=(0, 1))
        header.add_row(title, ProgressBar(total=max(1, pace.steps), completed=pace.done, width=width), words)
        return header

    def _table(self) -> Table:
        gaps = self._gaps  # this runs in the display's thread
        names = {name: literal(name) for name in self._agents}
        longest = max([len("agent"), *(name.cell_len for name in names.values())])
        last = {name: f"{values[-1]:.3f}" if values else "" for name, values in self._rewards.items()}
        # what the other columns take, with two spaces between any two
        taken = longest + _NOW_WIDTH + max(5, *map(len, last.values())) + len("accuracytokens/s") + 5 * 2
        taken += len("3.1e-03") + 2 if gaps else 0
        width = min(24, self._console.width - taken)
        roomy = width >= len("reward")  # otherwise the curves go, and "now" takes several lines
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("agent", overflow="fold", min_width=min(longest, 12))
        table.add_column("now", no_wrap=roomy, min_width=_NOW_WIDTH if roomy else None)
        if roomy:
            heading = "reward per step" if width >= len("reward per step") else "reward"
            table.add_column(heading, no_wrap=True, min_width=width)
        for heading in ("" if roomy else "reward", "accuracy", "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        if gaps:
            table.add_column("sampler gap", justify="right", min_width=len("3.1e-03"))
        for name in self._agents:
            accuracy, speed = self._accuracy.get(name), self._speeds.get(name)
            table.add_row(
                names[name],
                self._now(name),
                *([sparkline(self._rewards[name], width)] if roomy else []),
                last[name],
                f"{accuracy.mean:.3f}" if accuracy else "",
                f"{speed:,.0f}" if speed is not None else "",
                *([f"{gaps[name]:.1e}" if name in gaps else ""] if gaps else []),
            )
        return table

    def _now(self, name: str) -> str:
        work = self._at_work.get(name)  # this runs in the display's thread
        if work is None:
            return "paused" if name in self._paused else ""
        count = f" {work.ended}" if work.ended else ""
        return f"{_DOING[work.phase]}{count} · {duration(self._clock() - work.since)}"


def _listed(heading: str, values: Mapping[str, str]) -> str:
    return f"{heading} " + "  ".join(f"{name} {value}" for name, value in values.items())
