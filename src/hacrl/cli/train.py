"""``hacrl train``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hacrl.config.loading import load_config
from hacrl.config.schema import RunConfig


def _left(config: RunConfig) -> str:
    if not Path(config.output, "metrics.jsonl").is_file():
        return "before the first step; no agents were saved"
    return f"metrics so far are in {config.output}; agents are saved at the end of a run only"


def run_training(path: Path, overrides: Sequence[str], overwrite: bool, dry_run: bool) -> None:
    """Check the recipe, train, and say where everything is."""
    config = load_config(path, overrides)
    console = Console()
    if dry_run:
        from hacrl.cli.dry_run import dry_run_lines
        from hacrl.cli.quiet import without_library_chatter
        from hacrl.execution.dry_run import dry_run as look_at

        without_library_chatter()
        for line in dry_run_lines(look_at(config, overwrite)):
            print(line)
        return
    from hacrl.cli.interrupts import told_when_interrupted
    from hacrl.cli.quiet import without_library_chatter
    from hacrl.execution.local import run_locally
    from hacrl.report.progress import RunProgress

    without_library_chatter()
    names = [agent.name for agent in config.agents]
    title = config.method.name.upper()
    with (
        told_when_interrupted(partial(_left, config)),
        RunProgress(title, names, config.steps, console) as progress,
    ):
        result = run_locally(config, [progress], overwrite)
    if result.accuracies:
        first, last = min(result.accuracies), max(result.accuracies)
        table = Table(title=f"Accuracy on held-out problems, {config.method.name.upper()}")
        for heading in ("agent", "before", f"after {last} steps", "rollouts", "updates"):
            table.add_column(heading, justify="left" if heading == "agent" else "right")
        for name in names:
            before, after = result.accuracies[first][name], result.accuracies[last][name]
            spent = (f"{result.rollouts.get(name, 0):,}", f"{result.updates.get(name, 0):,}")
            table.add_row(name, f"{before.mean:.3f}", f"{after.mean:.3f} ± {after.stderr:.3f}", *spent)
        console.print(table)
    console.print(f"Run folder: {result.folder} (agents in {result.folder / 'agents'})", soft_wrap=True)
