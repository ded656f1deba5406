"""``hacrl demo``."""

from __future__ import annotations

import json
import time
from itertools import count
from pathlib import Path

from rich.console import Console

from hacrl.cli.console import silence_transformers
from hacrl.cli.interrupts import report_interruption
from hacrl.cli.report import report_when_done
from hacrl.config.schema import RunConfig
from hacrl.studies.demo import METHOD_LABELS, run_demo_methods
from hacrl.studies.plots import plot_comparison
from hacrl.studies.tables import compare, comparison_table
from hacrl.tracking.console import print_unstyled
from hacrl.tracking.progress import RunProgress

_INTRODUCTION = (
    "Three tiny language models learn two-step arithmetic by reinforcement learning: first each one alone "
    "(GSPO), then together (HACPO), where each model also trains on the verified responses of the others. "
    "Both runs use the same problems and generate the same number of responses."
)


def run_demo(output: Path, seed: int, steps: int | None, as_json: bool) -> None:
    """Train with both methods, then print a table and the paths of the results."""
    console = Console()
    folder = unused_folder(output)
    silence_transformers()

    def watch(config: RunConfig) -> RunProgress:
        names = [agent.name for agent in config.agents]
        return RunProgress(METHOD_LABELS[config.method.name], names, config.steps, console)

    console.print(_INTRODUCTION, highlight=False)
    start = time.perf_counter()
    with report_interruption(f"metrics so far are in {folder}"):
        comparison = compare(run_demo_methods(folder, seed, steps, watch))
    seconds = time.perf_counter() - start
    plot = folder / "comparison.png"
    plot_comparison(comparison, METHOD_LABELS, plot)
    console.print(comparison_table(comparison, METHOD_LABELS))
    print_unstyled(console, f"Done in {seconds:.0f} s. Plot: {plot}")
    print_unstyled(console, f"Runs, metrics and trained agents: {folder}")
    summary = {
        "agents": comparison.as_dict(),
        "seed": seed,
        "seconds": round(seconds, 1),
        "plot": str(plot),
        "folder": str(folder),
    }
    (folder / "comparison.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    report_when_done(folder)
    if as_json:
        print(json.dumps(summary))


def unused_folder(path: Path) -> Path:
    """Return the path, with the first number added that makes it unused, so that no earlier demo is lost."""
    path = path.resolve() if path.name in ("", "..") else path
    candidates = (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in count(1))
    return next(candidate for candidate in candidates if not candidate.exists())
