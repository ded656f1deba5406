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
    """Check the recipe, train, and say where everything is."""
    config = load_config(path, overrides)
    if dry_run:
        from hacrl.cli.console import silence_transformers
        from hacrl.cli.dry_run import dry_run_lines
        from hacrl.runs.dry_run import dry_run as look_at

        silence_transformers()
        for line in dry_run_lines(look_at(config, overwrite)):
            print(printable(line, multiline=True))
        return
    train(config, partial(_new_run, overwrite=overwrite))


def resume_training(folder: Path, overrides: Sequence[str]) -> None:
    """Go on with a run where it was left."""
    from hacrl.runs.resume import inspect_run

    found = inspect_run(folder, overrides)
    if found.finished_after is not None:
        more = f"hacrl resume {folder} steps={2 * max(1, found.finished_after)}"
        if found.point.state is None:
            more = "a new run from these agents, since this one has no checkpoint"
        typer.echo(
            f"{folder} is finished: {found.finished_after} steps, agents in {folder / 'agents'}. "
            f"For more steps: {more}"
        )
        return
    train(found.config, partial(_resumed_run, point=found.point), first_step=found.point.steps_done)


def _new_run(config: RunConfig, observers: Sequence[Observer], overwrite: bool) -> LocalRun:
    from hacrl.runs.run import LocalRun

    return LocalRun(config, observers, overwrite)


def _resumed_run(config: RunConfig, observers: Sequence[Observer], point: ResumePoint) -> LocalRun:
    from hacrl.runs.run import LocalRun

    return LocalRun(config, observers, resumed=point)


def train(config: RunConfig, make_run: MakeRun, first_step: int = 0) -> None:
    """Train with everything a person wants to see; signals end it in good order."""
    from hacrl.cli.console import silence_transformers
    from hacrl.cli.interrupts import report_interruption, stop_on_signals
    from hacrl.tracking.progress import RunProgress

    silence_transformers()
    console = Console()
    names = [agent.name for agent in config.agents]
    title = config.method.name.upper()
    runs: list[LocalRun] = []
    with report_interruption(lambda: _what_is_left(config, runs)):
        progress = RunProgress(title, names, config.steps, console, first_step=first_step)
        with progress, make_run(config, [progress]) as run:
            runs.append(run)
            say = partial(progress.on_note, run.trainer.steps_done)
            with stop_on_signals(run.interrupt, say) as signals:
                run.train()
                run.save()
    if run.is_interrupted:
        typer.echo(
            f"stopped after {run.trainer.steps_done} steps; everything is saved. To go on: "
            f"hacrl resume {config.output}"
        )
        raise typer.Exit(exit_codes.stopped_by(signals.received) if signals.received else exit_codes.FAILED)
    show_result(console, config, run.result)


def _what_is_left(config: RunConfig, runs: Sequence[LocalRun]) -> str:
    if not runs:
        return "before the first step; nothing was begun"
    return f"after {runs[0].trainer.steps_done} steps; what was saved is in {config.output}"


def show_result(console: Console, config: RunConfig, result: RunResult) -> None:
    """Accuracies before and after, and where everything is."""
    names = [agent.name for agent in config.agents]
    if result.accuracies:
        first, last = min(result.accuracies), max(result.accuracies)
        what = "Mean reward" if config.task.name == "reward" else "Accuracy"
        table = Table(title=f"{what} on held-out problems, {config.method.name.upper()}")
        for heading in ("agent", "before", f"after {last} steps", "rollouts", "updates"):
            table.add_column(heading, justify="left" if heading == "agent" else "right")
        for name in names:
            before, after = result.accuracies[first][name], result.accuracies[last][name]
            spent = (f"{result.rollouts.get(name, 0):,}", f"{result.updates.get(name, 0):,}")
            table.add_row(
                unstyled(name), f"{before.mean:.3f}", f"{after.mean:.3f} ± {after.stderr:.3f}", *spent
            )
        console.print(table)
    print_unstyled(console, f"Run folder: {result.folder} (agents in {result.folder / 'agents'})")
