"""The picture of docs/performance.md, from what the other benchmarks wrote with --json.

    python benchmarks/plot_performance.py       # of benchmarks/measured, into docs/images/performance.png
    python benchmarks/plot_performance.py --hacrl hacpo_vllm.json hacpo.json --out new.png

`--trl` are runs of one agent, drawn as often as those of `--hacrl` have agents. A side that was measured by
both engine files is taken from the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parent / "measured"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "performance.png"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"
NAMES = {
    "raw-vllm": "vLLM alone",
    "vllm": "hacrl, vLLM engine",
    "generate": "transformers' generate",
    "transformers": "hacrl, transformers engine",
}


def draw_rollouts(axes: Any, files: list[Path]) -> None:
    """Tokens per second, medians with the range of rounds."""
    sides = {side["side"]: side["tokens_per_s"] for file in files for side in _read(file)["sides"]}
    for place, name in enumerate(name for name in NAMES if name in sides):
        speeds = sides[name]
        middle = statistics.median(speeds)
        spread = [[middle - min(speeds)], [max(speeds) - middle]]
        colour = BLUE if "hacrl" in NAMES[name] else GREY
        axes.barh(place, middle / 1000, xerr=[[s[0] / 1000] for s in spread], color=colour, capsize=3)
        axes.text(max(speeds) / 1000 + 1.5, place, f"{middle / 1000:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(sides)), [NAMES[name] for name in NAMES if name in sides])
    axes.invert_yaxis()
    axes.set_xlim(0, 75)
    axes.set_xlabel("thousand tokens a second")
    axes.set_title("Rollouts: 0.6B, 32 × 8 × 256 tokens", fontsize=10)


def draw_steps(axes: Any, trl: list[Path], hacrl: list[Path]) -> None:
    """Seconds of a whole step by phase: those of the step that is the median."""
    agents = len(_read(hacrl[0])["work"]["shapes"])
    bars = [(file, f"TRL, GSPO, {agents} in turn", agents) for file in trl]
    bars += [(file, f"hacrl, HACPO, {agents} together", 1) for file in hacrl]
    names = []
    for place, (file, name, times) in enumerate(bars):
        record = _read(file)
        names.append(f"{name},\n{record['work']['engine']}")
        steps = sorted(record["found"]["run 1"][0]["seconds"], key=lambda step: step["step"])
        middle, left = steps[(len(steps) - 1) // 2], 0.0
        for phase, colour in (("rollout", BLUE), ("learn", ORANGE), ("rest", GREY)):
            seconds = times * middle[phase]
            axes.barh(place, seconds, left=left, color=colour, label=phase if place == 0 else None)
            left += seconds
        axes.text(left + 0.5, place, f"{left:.1f} s", va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 40)
    axes.set_xlabel("seconds a step")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title(f"A step of {agents} agents of 0.6B", fontsize=10)


def draw_agents(axes: Any, file: Path) -> None:
    """Learning against the number of agents, with and without the cap."""
    steps = _read(file)["steps"]
    for cap, colour, label in ((None, ORANGE, "from everybody"), (8, BLUE, "others' capped at G = 8")):
        chosen = [step for step in steps if step["cap"] == cap]
        numbers = [step["agents"] for step in chosen]
        axes.loglog(numbers, [step["learning"] for step in chosen], "o-", color=colour, label=label)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()
    axes.set_xlabel("agents")
    axes.set_ylabel("seconds of learning a step")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Learning grows with agents (tiny, CPU)", fontsize=10)


def _read(file: Path) -> Any:
    return json.loads(file.read_text())


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, files in (
        ("--engines", ("engines_vllm", "engines")),
        ("--trl", ("step_trl", "step_trl_vllm")),
        ("--hacrl", ("step_hacrl_vllm", "step_hacrl")),
    ):
        parser.add_argument(name, type=Path, nargs="+", default=[MEASURED / f"{file}.json" for file in files])
    parser.add_argument("--agents", type=Path, default=MEASURED / "many_agents.json")
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rollouts, steps, agents) = plt.subplots(
        1, 3, figsize=(15, 3.4), layout="constrained", width_ratios=[1.1, 1, 0.9]
    )
    draw_rollouts(rollouts, options.engines)
    draw_steps(steps, options.trl, options.hacrl)
    draw_agents(agents, options.agents)
    for axes in (rollouts, steps, agents):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
