"""``hacrl train`` and ``hacrl resume``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from hacrl.cli import exit_codes
from hacrl.config.load import load_config
from hacrl.config.schema import RunConfig
from hacrl.plain_text import printable
from hacrl.tracking.console import print_unstyled, unstyled

if TYPE_CHECKING:
    from hacrl.runs.results import RunResult
    from hacrl.runs.resume import ResumePoint
    from hacrl.runs.run import LocalRun
    from hacrl.training.observer import Observer

MakeRun = Callable[[RunConfig, "Sequence[Observer]"], "LocalRun"]


def run_training(path: Path, overrides: Sequence[str], overwrite: bool, dry_run: bool) -> None:
    """Check the recipe and train; with ``dry_run``, print what the run would do instead."""
    config = load_config(path, overrides)
    if dry_run:
        from hacrl.cli.console import silence_transformers
        from hacrl.cli.dry_run import dry_run_lines
        from hacrl.runs.dry_run import dry_run as check_run

        silence_transformers()
        for line in dry_run_lines(check_run(config, overwrite)):
            print(printable(line, multiline=True))
        return
    train(config, partial(_new_run, overwrite=overwrite))


def resume_training(folder: Path, overrides: Sequence[str]) -> None:
    """Continue a run; if it is finished, say so and how to add steps."""
    from hacrl.runs.resume import inspect_run

    run = inspect_run(folder, overrides)
    if run.finished_after is not None:
        more = f"hacrl resume {folder} steps={2 * max(1, run.finished_after)}"
        if run.point.state is None:
            more = "start a new run from these agents, because this one has no checkpoint"
        typer.echo(
            f"{folder} is finished: it made {run.finished_after} steps, and its agents are in "
            f"{folder / 'agents'}. For more steps: {more}"
        )
        return
    train(run.config, partial(_resumed_run, point=run.point), first_step=run.point.steps_done)


def _new_run(config: RunConfig, observers: Sequence[Observer], overwrite: bool) -> LocalRun:
    from hacrl.runs.run import LocalRun

    return LocalRun(config, observers, overwrite)


def _resumed_run(config: RunConfig, observers: Sequence[Observer], point: ResumePoint) -> LocalRun:
    from hacrl.runs.run import LocalRun

    return LocalRun(config, observers, resumed=point)


def train(config: RunConfig, make_run: MakeRun, first_step: int = 0) -> None:
    """Train with progress on the terminal; a signal stops the run after saving its state."""
    from hacrl.cli.console import silence_transformers
    from hacrl.cli.interrupts import report_interruption, stop_on_signals
    from hacrl.cli.report import report_when_done
    from hacrl.tracking.progress import RunProgress

    silence_transformers()
    console = Console()
    names = [agent.name for agent in config.agents]
    title = config.method.title
    runs: list[LocalRun] = []
    with report_interruption(lambda: _interruption_message(config, runs)):
        progress = RunProgress(
            title, names, config.steps, console, first_step=first_step, overlaps=config.asynchronous.is_on
        )
        with progress, make_run(config, [progress]) as run:
            runs.append(run)
            note = partial(progress.on_note, run.trainer.steps_done)
            with stop_on_signals(run.interrupt, note) as signals:
                run.train()
                run.save()
    if run.is_interrupted:
        typer.echo(
            f"stopped after {run.trainer.steps_done} steps; everything is saved. To continue: "
            f"hacrl resume {config.output}"
        )
        raise typer.Exit(exit_codes.stopped_by(signals.received) if signals.received else exit_codes.FAILED)
    show_result(console, config, run.result)
    report_when_done(run.result.folder)


def _interruption_message(config: RunConfig, runs: Sequence[LocalRun]) -> str:
    if not runs:
        return "before the first step; nothing was written"
    return f"after {runs[0].trainer.steps_done} steps; everything saved so far is in {config.output}"


def show_result(console: Console, config: RunConfig, result: RunResult) -> None:
    """Print the accuracies before and after training, and the run's folder."""
    names = [agent.name for agent in config.agents]
    if result.accuracies:
        first, last = min(result.accuracies), max(result.accuracies)
        measure = "Mean reward" if config.task.name == "reward" else "Accuracy"
        table = Table(title=f"{measure} on held-out problems, {config.method.title}")
        for heading in ("agent", "before", f"after {last} steps", "rollouts", "updates"):
            table.add_column(heading, justify="left" if heading == "agent" else "right")
        for name in names:
            before, after = result.accuracies[first][name], result.accuracies[last][name]
            costs = (f"{result.rollouts.get(name, 0):,}", f"{result.updates.get(name, 0):,}")
            table.add_row(
                unstyled(name), f"{before.mean:.3f}", f"{after.mean:.3f} ± {after.stderr:.3f}", *costs
            )
        console.print(table)
    print_unstyled(console, f"Run folder: {result.folder} (agents in {result.folder / 'agents'})")
