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
from hacrl.tracking.console import print_unstyled, unstyled

SECONDS_BETWEEN_LINES = 30  # of progress, without a terminal
_OPTIONAL_COLUMNS = ("wrong", "correct", "tokens", "stopped")  # dropped in this order if a table is too wide
_LEGEND = {
    "stopped": "stopped: share of responses that ended with a stop token or a stop string.",
    "tokens": "tokens: mean length of a response.",
}


def run_evaluation(request: EvaluationRequest, as_json: bool) -> None:
    """Evaluate, then print the tables and the folder of all responses."""
    from hacrl.cli.console import silence_transformers
    from hacrl.cli.interrupts import report_interruption

    silence_transformers()
    console = Console()
    message = "the responses so far are kept; the same command continues from there"
    with report_interruption(message), EvaluationProgress(console) as progress:
        results, folder = evaluate_targets(request, progress)
    _show(results, folder, console)
    if as_json:
        print(json.dumps({**results.as_dict(), "folder": str(folder)}))


def evaluation_settings(pass_at: str | None, **options: Any) -> BenchmarkSettings:
    """Return the settings for the options of the command line; ``pass_at`` is text such as ``1,8,30``."""
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


def named_columns(text: str | None) -> dict[str, str]:
    """Return purpose -> column for ``--columns``, which is text such as ``problem=question,answer=gold``."""
    named = {}
    for part in (text or "").split(","):
        purpose, equals, column = (piece.strip() for piece in part.partition("="))
        if text is not None and not (purpose and equals and column):
            raise ConfigError(
                f"--columns {text}: must be PURPOSE=NAME, separated by commas, e.g. "
                "problem=question,answer=gold"
            )
        if text is not None:
            named[purpose] = column
    return named


class EvaluationProgress(EvaluationObserver):
    """Shows a live progress bar in a terminal, elsewhere a line now and then; use it as a context manager."""

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
        self._printed_at = 0.0
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
        """Print the folder of the evaluation."""
        self._pairs = pairs
        self._print(f"Evaluation folder: {folder}")
        if self._console.is_terminal:
            self._bars.start()

    def on_note(self, note: str) -> None:
        """Print the note above the progress bar."""
        self._print(f"note: {note}")

    def on_load(self, label: str) -> None:
        """Print what is loaded, because a large model takes a while."""
        if not self._console.is_terminal:
            self._print(f"loading {label}")

    def on_progress(self, label: str, benchmark: str, done: int, total: int, reward: float | None) -> None:
        """Update the bar; without a terminal, print a line if the last one is old."""
        pair = (label, benchmark)
        mean = "" if reward is None else f" · mean reward {reward:.3f} ·"
        if pair not in self._tasks:
            # Responses of an earlier, interrupted command must not count in the speed.
            self._tasks[pair] = self._bars.add_task(
                printable(f"{label} on {benchmark}"), total=total, completed=done, reward=mean
            )
            self._printed_at = time.monotonic()
        self._bars.update(self._tasks[pair], completed=done, reward=mean)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._printed_at >= SECONDS_BETWEEN_LINES and done < total:
            self._printed_at = now
            self._print(f"{label} on {benchmark}: {done:,}/{total:,} responses{mean.rstrip(' ·')}")

    def on_score(self, pair: PairResult) -> None:
        """Print one line per finished pair of agent and benchmark."""
        self._finished += 1
        self._bars.update(self._tasks[pair.label, pair.benchmark], visible=False)
        score = pair.score
        self._print(
            f"{self._finished}/{self._pairs}  {pair.label} on {pair.benchmark}: "
            f"avg@{score.samples} {with_interval(score.average)}"
        )

    def _print(self, line: str) -> None:
        print_unstyled(self._console, line)


def _show(results: Results, folder: Path, console: Console) -> None:
    shown: set[str] = set()
    for text_table in result_tables(results):
        print_unstyled(console, f"\n{printable(text_table.title)}")
        fitting = _fitting(text_table, console.width)
        shown |= set(fitting.headings)
        console.print(_rich_table(fitting, console.width))
    legend = [text for heading, text in _LEGEND.items() if heading in shown]
    console.print(" ".join(["±: 95% confidence interval over problems.", *legend]), highlight=False)
    print_unstyled(console, f"All responses and numbers: {folder}")


def _fitting(text_table: TextTable, width: int) -> TextTable:
    """Return the table with as many columns as the terminal is wide; results.md has all of them."""
    for heading in _OPTIONAL_COLUMNS:
        if text_table.width >= width:
            text_table = text_table.without(heading)
    return text_table


def _rich_table(text_table: TextTable, width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # A long heading such as "math500 avg@8" takes two lines rather than being cut to "math5…".
    separator = "\n" if text_table.width >= width else " "
    for i, heading in enumerate(text_table.headings):
        shown = unstyled(heading.replace(" ", separator), multiline=True)
        table.add_column(shown, justify="left" if i == 0 else "right", no_wrap=True)
    for row in text_table.rows:
        table.add_row(*map(unstyled, row))
    return table
