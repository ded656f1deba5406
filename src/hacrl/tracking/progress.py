"""Show a run's progress: a live table of agents and phases in a terminal, one line per step elsewhere."""

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

from hacrl.tracking.console import print_unstyled, unstyled
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer, Phase
from hacrl.types import VerifiedRollout

# The estimate uses the median of the last steps: a single evaluation among them has no effect, a trend has.
_STEPS_COUNTED = 10


class TimeEstimate:
    """Estimates the remaining time of a run from the time between the ends of its last steps."""

    def __init__(self, steps: int, done: int, clock: Callable[[], float]) -> None:
        self.steps = steps
        self.done = done
        self._clock = clock
        self._step_start: float | None = None  # start of the current step, which is the end of the last one
        self._durations: deque[float] = deque(maxlen=_STEPS_COUNTED)

    def start_step(self) -> None:
        """Record the start of a process's first step; every other step starts when the previous one ends."""
        if self._step_start is None:
            self._step_start = self._clock()

    def end_step(self, step: int, seconds: float) -> None:
        """Record the end of a step; ``seconds`` is its duration if its start was not recorded."""
        now = self._clock()
        self._durations.append(seconds if self._step_start is None else now - self._step_start)
        self._step_start, self.done = now, step

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last step ends; None until one step of this process has ended."""
        if not self._durations:
            return None
        typical = statistics.median(self._durations)
        elapsed = 0.0 if self._step_start is None else min(typical, self._clock() - self._step_start)
        return max(0.0, typical * (self.steps - self.done) - elapsed)


def duration(seconds: float) -> str:
    """Format seconds as ``0:07``, ``12:34``, ``1:02:03``, or ``2.5 days``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{seconds / 86400:.1f} days"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTABLE_GAP = 1e-4  # between sampler and learner; float32 rounding causes 1e-6, the paper clips at 3e-4
_PHASE_NAMES: dict[Phase, str] = {
    "evaluate": "evaluating",
    "sync": "syncing weights",
    "rollout": "generating",
    "verify": "verifying",
    "learn": "training",
    "save": "saving",
}
_PHASE_WIDTH = 22  # of "syncing weights · 1:23" and "generating 1234 · 5:07"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Return the last ``width`` values, each from 0 to 1, as a row of block characters."""
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(top, max(0, round(value * top)))] for value in values[-width:])


@dataclass
class _Activity:
    """The phase of an agent."""

    phase: Phase
    since: float
    responses: int = 0  # finished in this phase


class RunProgress(Observer):
    """Shows the progress of one run; use it as a context manager.

    A resumed run has made ``first_step`` steps in earlier processes. ``overlaps``: agents sample while they
    learn, so each is shown with the phase that it began last.
    """

    def __init__(
        self,
        title: str,
        agents: Sequence[str],
        steps: int,
        console: Console,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
        overlaps: bool = False,
    ) -> None:
        self._title = title
        self._overlaps = overlaps
        self._agents = list(agents)
        self._console = console
        self._clock = clock
        self._time = TimeEstimate(steps, first_step, clock)
        self._began = clock()
        self._step = 0
        self._activities: dict[str, _Activity] = {}  # by agent
        self._paused: set[str] = set()
        self._tokens: dict[str, int] = {}  # generated in the current step
        self._speeds: dict[str, float] = {}  # tokens per second of the last step
        self._rewards: dict[str, list[float]] = {name: [] for name in agents}
        self._gaps: dict[str, float] = {}  # sampler gaps of the last step above _NOTABLE_GAP
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
        """Show the agent's phase; agents that generate concurrently are shown together."""
        phases = {phase, *(activity.phase for activity in self._activities.values())}
        # Agents that do not generate concurrently have a verification in between.
        is_concurrent = self._overlaps or (self._step == step and phases <= {"sync", "rollout"})
        others = self._activities if is_concurrent else {}
        self._step, self._activities = step, {**others, agent: _Activity(phase, self._clock())}
        if phase not in ("evaluate", "save"):
            self._time.start_step()

    def on_response(self, agent: str) -> None:
        """Count a finished response of the phase."""
        # In an evaluation the phases do not say which agents generate concurrently; their responses do.
        activity = self._activities.setdefault(agent, _Activity("evaluate", self._clock()))
        activity.responses += activity.phase in ("rollout", "evaluate")

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Count an agent's tokens."""
        tokens = sum(verified.rollout.num_tokens for verified in rollouts)
        self._tokens[agent] = self._tokens.get(agent, 0) + tokens  # a step may have several rounds

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Update the progress bar; without a terminal, print a line."""
        self._time.end_step(report.step, seconds["whole"])
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
        """Update the accuracies; without a terminal, print a line."""
        self._accuracy = dict(accuracies)
        if not self._console.is_terminal:
            listed = "  ".join(f"{name} {accuracy.mean:.3f}" for name, accuracy in accuracies.items())
            self._print(f"after {step} steps  accuracy {listed}")

    def on_note(self, step: int, note: str) -> None:
        """Print the note, above the live table if there is one."""
        self._print(f"note: {note}")

    def _print(self, line: str) -> None:
        print_unstyled(self._console, f"{self._title}: {line}")

    def _step_line(self, report: StepReport, seconds: float) -> str:
        rewards = {name: f"{agent.rollout.reward:.3f}" for name, agent in report.agents.items()}
        parts = [f"step {report.step}/{self._time.steps}", _format_by_agent("reward", rewards)]
        if self._gaps:
            parts.append(
                _format_by_agent("sampler gap", {name: f"{gap:.1e}" for name, gap in self._gaps.items()})
            )
        if self._speeds:
            speeds = {name: f"{speed:,.0f}" for name, speed in self._speeds.items()}
            parts.append(_format_by_agent("tokens/s", speeds))
        left = f", about {duration(self._time.seconds_left)} left" if self._time.seconds_left else ""
        return "  ".join([*parts, f"({seconds:.1f} s{left})"])

    def _render(self) -> Group:
        return Group(self._header(), self._table())

    def _header(self) -> Table:
        """Return title, bar, steps, elapsed and remaining time, in one line of at most 80 columns."""
        time_estimate = self._time
        times = f"{duration(self._clock() - self._began)} elapsed"
        if time_estimate.seconds_left is not None:
            times += f" · about {duration(time_estimate.seconds_left)} left"
        status = unstyled(f"{time_estimate.done}/{time_estimate.steps} steps · {times}")
        title = unstyled(self._title)
        width = max(6, min(40, self._console.width - title.cell_len - status.cell_len - 3))
        header = Table.grid(padding=(0, 1))
        header.add_row(
            title,
            ProgressBar(total=max(1, time_estimate.steps), completed=time_estimate.done, width=width),
            status,
        )
        return header

    def _table(self) -> Table:
        gaps = self._gaps  # read once: this runs in the display's thread
        names = {name: unstyled(name) for name in self._agents}
        longest = max([len("agent"), *(name.cell_len for name in names.values())])
        last = {name: f"{values[-1]:.3f}" if values else "" for name, values in self._rewards.items()}
        # Width of the other columns, with two spaces between columns.
        others = longest + _PHASE_WIDTH + max(5, *map(len, last.values())) + len("accuracytokens/s") + 5 * 2
        others += len("3.1e-03") + 2 if gaps else 0
        width = min(24, self._console.width - others)
        has_curves = width >= len("reward")  # in a narrow terminal there are none, and "phase" wraps
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("agent", overflow="fold", min_width=min(longest, 12))
        table.add_column("phase", no_wrap=has_curves, min_width=_PHASE_WIDTH if has_curves else None)
        if has_curves:
            heading = "reward per step" if width >= len("reward per step") else "reward"
            table.add_column(heading, no_wrap=True, min_width=width)
        for heading in ("" if has_curves else "reward", "accuracy", "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        if gaps:
            table.add_column("sampler gap", justify="right", min_width=len("3.1e-03"))
        for name in self._agents:
            accuracy, speed = self._accuracy.get(name), self._speeds.get(name)
            table.add_row(
                names[name],
                self._phase(name),
                *([sparkline(self._rewards[name], width)] if has_curves else []),
                last[name],
                f"{accuracy.mean:.3f}" if accuracy else "",
                f"{speed:,.0f}" if speed is not None else "",
                *([f"{gaps[name]:.1e}" if name in gaps else ""] if gaps else []),
            )
        return table

    def _phase(self, name: str) -> str:
        activity = self._activities.get(name)  # read once: this runs in the display's thread
        if activity is None:
            return "paused" if name in self._paused else ""
        count = f" {activity.responses}" if activity.responses else ""
        return f"{_PHASE_NAMES[activity.phase]}{count} · {duration(self._clock() - activity.since)}"


def _format_by_agent(heading: str, values: Mapping[str, str]) -> str:
    return f"{heading} " + "  ".join(f"{name} {value}" for name, value in values.items())
