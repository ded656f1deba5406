"""Make the pages and run folders that the browser tests open: python make_pages.py FOLDER [large]."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.report_runs import HOSTILE, MadeUpRun, write_study

from hacrl.report.page import write_report
from hacrl.report.runs import find_runs


def main(folder: Path, is_large: bool) -> None:
    """Write run folders and their pages into ``folder``."""
    if is_large:  # 100 steps of 4 agents; 100,000 short rollouts
        runs = {
            "long": MadeUpRun(steps=100, prompts=16, samples=8, tokens=200, every=10),
            "many": MadeUpRun(steps=100, prompts=125, samples=2, tokens=4, every=10),
        }
    else:
        runs = {
            "plain": MadeUpRun(
                agents=("ada", "bob"),
                steps=6,
                prompts=6,
                models=("bundled:qwen-small-a", "bundled:llama-pairs"),
            ),
            "hostile": MadeUpRun(steps=2, texts=HOSTILE),
            "live": MadeUpRun(steps=6),
        }
        write_report(find_runs([write_study(folder / "study", ["gspo", "hacpo"], 3)]), folder / "study.html")
    for name, run in runs.items():
        run.write(folder / name, until=2 if name == "live" else None)
        write_report(find_runs([folder / name]), folder / f"{name}.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "large" in sys.argv[2:])
