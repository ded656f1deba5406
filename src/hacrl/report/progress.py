"""What a run is doing right now, by phase and by agent: live in a terminal, a line per step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from hacrl.evaluation.accuracy import Accuracy
from hacrl.learning.observer import Observer, Phase
from hacrl.learning.reports import StepReport

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTABLE_GAP = 1e-4  # between sampler and learner; rounding in float32 makes 1e-6, the paper clips at 3e-4
_DOING: dict[Phase, str] = {
    "evaluate": "evaluating",
    "sync": "updating its engine",
    "rollout": "answering",
    "verify": "being judged",
    "learn": "learning",
    "save": "being saved",
}


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last values as a row of blocks, from 0 to 1."""
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(top, max(0, round(value * top)))] for value in values[-width:])


class RunProgress(Observer):
    """Use as a context manager around one run."""

    def __init__(self, title: str, agents: Sequence[str], steps: int, console: Console) -> None:
        self._title = title
        self._agents = list(agents)
        self._steps = steps
        self._console = console
        self._doing = dict.fromkeys(agents, "")
        self._rewards: dict[str, list[float]] = {name: [] for name in agents}
        self._gaps: dict[str, float] = {}  # of the newest step, where they are worth a word
        self._accuracy: dict[str, Accuracy] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps ·"),
            TimeElapsedColumn(),
            TextColumn("elapsed ·"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._task = self._bar.add_task(title, total=steps)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> RunProgress:
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
        self._doing = dict.fromkeys(self._agents, "")
        self._doing[agent] = _DOING[phase]

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Move the bar; off a terminal, print a line."""
        for name, agent in report.agents.items():
            self._rewards[name].append(agent.rollout.reward)
        gaps = {name: agent.learning.sampler_gap or 0.0 for name, agent in report.agents.items()}
        self._gaps = {name: gap for name, gap in gaps.items() if gap > _NOTABLE_GAP}
        self._bar.update(self._task, completed=report.step)
        if not self._console.is_terminal:
            rewards = "  ".join(f"{name} {values[-1]:.3f}" for name, values in self._rewards.items())
            total = sum(seconds.values())
            apart = "  ".join(f"{name} {gap:.1e}" for name, gap in self._gaps.items())
            gap_words = f"  sampler gap {apart}" if apart else ""
            self._print(f"step {report.step}/{self._steps}  reward {rewards}{gap_words}  ({total:.1f} s)")

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
        self._console.print(f"{self._title}: {line}", markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for heading in ("agent", "now", "mean reward per step", "", "held-out accuracy"):
            table.add_column(heading)
        if self._gaps:
            table.add_column("sampler gap")
        for name in self._agents:
            rewards = self._rewards[name]
            accuracy = self._accuracy.get(name)
            table.add_row(
                name,
                self._doing[name].ljust(12),
                sparkline(rewards),
                f"{rewards[-1]:.3f}" if rewards else "",
                f"{accuracy.mean:.3f}" if accuracy else "",
                *([f"{self._gaps[name]:.1e}" if name in self._gaps else ""] if self._gaps else []),
            )
        return Group(self._bar, table)
