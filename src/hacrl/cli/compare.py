"""``hacrl compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hacrl.cli.interrupts import report_interruption
from hacrl.cli.report import PAGE, report_when_done
from hacrl.config.load import apply_override, read_recipe
from hacrl.files import check_file
from hacrl.runs.results import RunResult
from hacrl.studies.compare import PlannedRun, plan_runs, run_study
from hacrl.studies.plots import plot_curves, plot_study
from hacrl.studies.tables import make_study, study_markdown
from hacrl.tracking.console import print_unstyled


def run_comparison(
    path: Path,
    variants: Sequence[str],
    seeds: int,
    jobs: int,
    output: Path | None,
    overrides: Sequence[str],
    overwrite: bool,
) -> None:
    """Run the study, print its table, and write table, numbers and plots."""
    console = Console()
    recipe = read_recipe(path)
    for override in overrides:
        apply_override(recipe, override)
    folder = output or Path("runs") / f"compare-{path.stem}"
    for name in ("study.md", "study.json", "study.png", "curves.png", PAGE):
        check_file(folder / name, folder)  # checked before the runs, which may take days
    runs = plan_runs(recipe, variants, seeds, folder)
    done = 0

    def announce(run: PlannedRun, result: RunResult) -> None:
        nonlocal done
        done += 1
        final = result.accuracies[max(result.accuracies)]
        accuracies = "  ".join(f"{agent} {accuracy.mean:.3f}" for agent, accuracy in final.items())
        line = f"{done}/{len(runs)}  {run.variant}  seed {run.seed}  {accuracies}"
        print_unstyled(console, line)

    print_unstyled(console, f"{len(runs)} runs, {jobs} at a time, in {folder}")
    with report_interruption(f"finished runs are in {folder}; the same command continues from there"):
        results = run_study(runs, jobs, announce, overwrite)
    ordered = {(run.variant, run.seed): results[run.variant, run.seed] for run in runs}
    study = make_study(ordered, reference=variants[0])
    table = study_markdown(study)
    (folder / "study.md").write_text(table + "\n", encoding="utf-8")
    (folder / "study.json").write_text(json.dumps(study.as_dict(), indent=2) + "\n", encoding="utf-8")
    plot_study(ordered, folder / "study.png")
    plot_curves(ordered, folder / "curves.png")
    print_unstyled(console, table)
    print_unstyled(console, f"Table, numbers and plots: {folder}")
    report_when_done(folder)
