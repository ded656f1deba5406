"""``hacrl compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hacrl.cli.interrupts import report_interruption
from hacrl.cli.report import PAGE, report_when_done
from hacrl.config.load import apply_override, read_recipe
from hacrl.errors import ConfigError
from hacrl.files import check_file
from hacrl.runs.results import RunResult
from hacrl.studies.benchmarks import StudyBenchmarks
from hacrl.studies.capacity import AUTO, capacity_of
from hacrl.studies.compare import PlannedRun, plan_runs
from hacrl.studies.execution import StudyObserver, run_study
from hacrl.studies.markdown import study_markdown
from hacrl.studies.plots import plot_curves, plot_study
from hacrl.studies.study import make_study
from hacrl.tracking.console import print_unstyled


def jobs_at_a_time(text: str) -> int | None:
    """Return the number in ``--jobs``; None for ``auto``."""
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--jobs {text}: must be a whole number above 0, or auto")
    return int(text)


class _Lines(StudyObserver):
    """Prints a line for every run that is done, and every note."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0

    def on_done(self, run: PlannedRun, result: RunResult) -> None:
        """Print the run's accuracies."""
        self._done += 1
        final = result.accuracies[max(result.accuracies)]
        accuracies = "  ".join(f"{agent} {accuracy.mean:.3f}" for agent, accuracy in final.items())
        line = f"{self._done}/{self._total}  {run.variant}  seed {run.seed}  {accuracies}"
        print_unstyled(self._console, line)

    def on_note(self, note: str) -> None:
        """Print the note."""
        print_unstyled(self._console, note)


def run_comparison(
    path: Path,
    variants: Sequence[str],
    seeds: int,
    jobs: int | None,
    output: Path | None,
    overrides: Sequence[str],
    overwrite: bool,
    benchmarks: StudyBenchmarks | None = None,
) -> None:
    """Run the study, print its tables, and write tables, numbers and plots. ``jobs`` None: automatic."""
    console = Console()
    recipe = read_recipe(path)
    for override in overrides:
        apply_override(recipe, override)
    folder = output or Path("runs") / f"compare-{path.stem}"
    for name in ("study.md", "study.json", "study.png", "curves.png", PAGE):
        check_file(folder / name, folder)  # checked before the runs, which may take days
    runs = plan_runs(recipe, variants, seeds, folder)
    if benchmarks is not None:
        benchmarks.check()
    capacity = capacity_of(jobs, [run.config for run in runs])
    print_unstyled(console, f"{len(runs)} runs in {folder}, {capacity.describe()}")
    with report_interruption(f"finished runs are in {folder}; the same command continues from there"):
        results = run_study(runs, capacity, _Lines(console, len(runs)), overwrite, benchmarks)
    scores = {run.key: benchmarks.scores(run.folder) for run in runs} if benchmarks is not None else {}
    study = make_study(results, variants[0], scores)
    table = study_markdown(study)
    (folder / "study.md").write_text(table + "\n", encoding="utf-8")
    (folder / "study.json").write_text(json.dumps(study.as_dict(), indent=2) + "\n", encoding="utf-8")
    plot_study(results, folder / "study.png")
    plot_curves(results, folder / "curves.png")
    print_unstyled(console, table)
    print_unstyled(console, f"Table, numbers and plots: {folder}")
    report_when_done(folder)
