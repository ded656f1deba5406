"""``hacrl eval``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from hacrl.config.schema import BenchmarkSettings
from hacrl.errors import ConfigError
from hacrl.evaluation.plan import EvaluationRequest
from hacrl.evaluation.results import PairResult, Results
from hacrl.evaluation.run import EvaluationObserver, evaluate_targets
from hacrl.evaluation.tables import TextTable, result_tables, with_interval
from hacrl.plain_text import printable
from hacrl.tracking.console import literal, say

SECONDS_BETWEEN_LINES = 30  # off a terminal
_LESS_IMPORTANT = ("wrong", "correct", "tokens", "stopped")  # columns that go first where there is no room
_LEGEND = {
    "stopped": "stopped: share of responses that ended by themselves.",
    "tokens": "tokens: mean length of a response.",
}


def run_evaluation(request: EvaluationRequest, as_json: bool) -> None:
    """Evaluate, show the tables, and say where every response is."""
    from hacrl.cli.console import without_library_chatter
    from hacrl.cli.interrupts import told_when_interrupted

    without_library_chatter()
    console = Console()
    left = "the responses so far are kept; the same command goes on from there"
    with told_when_interrupted(left), EvaluationProgress(console) as progress:
        results, folder = evaluate_targets(request, progress)
    _show(results, folder, console)
    if as_json:
        print(json.dumps({**results.as_dict(), "folder": str(folder)}))


def exam_settings(pass_at: str | None, **options: Any) -> BenchmarkSettings:
    """The settings of the command line's options; ``pass_at`` is ``1,8,30``."""
    try:
        ks = tuple(int(part) for part in (pass_at or "").split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            f"--pass-at {pass_at}: must be whole numbers separated by commas, e.g. 1,8"
        ) from None
    try:
        return BenchmarkSettings(pass_at=ks, **options)
    except ValueError as error:
        raise ConfigError(f"--{str(error).replace('_', '-')}") from error


class EvaluationProgress(EvaluationObserver):
    """A live bar in a terminal; elsewhere a line now and then. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("responses{task.fields[reward]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("·"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._said_at = 0.0
        self._pair: tuple[str, str] | None = None
        self._pairs = self._finished = 0

    def __enter__(self) -> EvaluationProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def on_start(self, folder: Path, pairs: int) -> None:
        """Say where it goes."""
        self._pairs = pairs
        self._say(f"Evaluation folder: {folder}")
        if self._console.is_terminal:
            self._bars.start()

    def on_note(self, note: str) -> None:
        """A note is kept on the screen."""
        self._say(f"note: {note}")

    def on_load(self, label: str) -> None:
        """Loading a large model takes a while."""
        if not self._console.is_terminal:
            self._say(f"loading {label}")

    def on_progress(self, label: str, benchmark: str, done: int, total: int, reward: float | None) -> None:
        """Move the bar; off a terminal, print a line if the last one is old."""
        pair = (label, benchmark)
        told = "" if reward is None else f" · mean reward {reward:.3f} ·"
        if pair not in self._tasks:
            # what an earlier, interrupted command had done says nothing about this one's speed
            self._tasks[pair] = self._bars.add_task(
                printable(f"{label} on {benchmark}"), total=total, completed=done, reward=told
            )
            self._said_at = time.monotonic()
        self._bars.update(self._tasks[pair], completed=done, reward=told)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_at >= SECONDS_BETWEEN_LINES and done < total:
            self._said_at = now
            self._say(f"{label} on {benchmark}: {done:,}/{total:,} responses{told.rstrip(' ·')}")

    def on_score(self, pair: PairResult) -> None:
        """One line per finished pair."""
        self._finished += 1
        self._bars.update(self._tasks[pair.label, pair.benchmark], visible=False)
        score = pair.score
        self._say(
            f"{self._finished}/{self._pairs}  {pair.label} on {pair.benchmark}: "
            f"avg@{score.samples} {with_interval(score.average)}"
        )

    def _say(self, line: str) -> None:
        say(self._console, line)


def _show(results: Results, folder: Path, console: Console) -> None:
    shown: set[str] = set()
    for text_table in result_tables(results):
        say(console, f"\n{printable(text_table.title)}")
        fitting = _fitting(text_table, console.width)
        shown |= set(fitting.headings)
        console.print(_rich_table(fitting, console.width))
    legend = [words for heading, words in _LEGEND.items() if heading in shown]
    console.print(" ".join(["±: 95% interval over problems.", *legend]), highlight=False)
    say(console, f"Every response and all numbers: {folder}")


def _fitting(text_table: TextTable, width: int) -> TextTable:
    """As many columns as the terminal has room for; all are in results.md."""
    for heading in _LESS_IMPORTANT:
        if text_table.width >= width:
            text_table = text_table.without(heading)
    return text_table


def _rich_table(text_table: TextTable, width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    between = "\n" if text_table.width >= width else " "  # of "math500 avg@8": never cut to "math5…"
    for i, heading in enumerate(text_table.headings):
        shown = literal(heading.replace(" ", between), multiline=True)
        table.add_column(shown, justify="left" if i == 0 else "right", no_wrap=True)
    for row in text_table.rows:
        table.add_row(*map(literal, row))
    return table
