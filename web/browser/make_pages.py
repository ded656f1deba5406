"""Make the pages and run folders that the browser tests open: python make_pages.py FOLDER [large]."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.report_episodes import MadeUpEpisodes
from tests.support.report_runs import HOSTILE, MadeUpRun, write_evaluation, write_study

from hacrl.report.page import write_report
from hacrl.report.runs import find_runs

VARIANTS = ("gspo", "hacpo", "hacpo_no_clip", "hacpo_alpha_0", "hacpo_alpha_2")
OTHERS = ("hacpo_no_baseline", "hacpo_no_discrepancy", "hacpo_alpha_3", "naive", "grpo")
SCORES = [
    (variant, seed, "ada", benchmark, 0.3 + 0.1 * (variant == "hacpo") + 0.01 * seed)
    for variant in ("gspo", "hacpo")
    for seed in range(3)
    for benchmark in ("math500", "gsm8k")
]


def main(folder: Path, is_large: bool) -> None:
    """Write run folders and their pages into ``folder``."""
    if is_large:  # 100 steps of 4 agents: 100,000 short rollouts, 6,400 long ones; a study of 30 runs
        runs = {
            "many": MadeUpRun(steps=100, prompts=125, samples=2, tokens=4, every=10),
            "essays": MadeUpRun(steps=100, prompts=2, samples=8, tokens=400, every=10),
        }
        write_study(folder / "study30", [*VARIANTS, *OTHERS], 3, steps=100, prompts=2, every=10, noise=0.02)
        write_report(find_runs([folder / "study30"]), folder / "study30.html")
    else:
        runs = {
            "plain": MadeUpRun(
                agents=("ada", "bob"),
                steps=6,
                prompts=6,
                models=("bundled:qwen-small-a", "bundled:llama-pairs"),
            ),
            "paper": MadeUpRun(agents=("ada", "bob"), clip=0.0003, prompts=16),  # the paper's clip range
            "episodes": MadeUpEpisodes(steps=2, prompts=3),
            "hostile": MadeUpRun(steps=2, texts=HOSTILE),
            "live": MadeUpRun(steps=6),
        }
        write_study(folder / "study", VARIANTS, 3)
        write_evaluation(folder / "study", SCORES)
        write_report(find_runs([folder / "study"]), folder / "study.html")
    for name, run in runs.items():
        run.write(folder / name, until=2 if name == "live" else None)
        write_report(find_runs([folder / name]), folder / f"{name}.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "large" in sys.argv[2:])
