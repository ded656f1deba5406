"""The picture of docs/performance.md, from what the other benchmarks wrote with --json.

    python benchmarks/plot_performance.py       # of benchmarks/measured, into docs/images/performance.png
    python benchmarks/plot_performance.py --hacrl hacpo.json --out new.png

`--trl` may be runs of one agent: each counts as often as those of `--hacrl` have agents. A side that was
measured by both engine files is taken from the last.
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
    """Seconds of a whole step by phase, each the median of the steps."""
    agents = len(_read(hacrl[0])["work"]["shapes"])
    bars = [(file, f"TRL, GSPO, {agents} in turn") for file in trl]
    bars += [(file, f"hacrl, HACPO, {agents} together") for file in hacrl]
    names = []
    for place, (file, name) in enumerate(bars):
        record = _read(file)
        times = agents // len(record["work"]["shapes"])
        names.append(f"{name},\n{record['work']['engine']}")
        steps, left = record["found"]["run 1"][0]["seconds"], 0.0
        for phase, colour in (("rollout", BLUE), ("learn", ORANGE), ("rest", GREY)):
            seconds = times * statistics.median(step[phase] for step in steps)
            axes.barh(place, seconds, left=left, color=colour, label=phase if place == 0 else None)
            left += seconds
        axes.text(left + 0.5, place, f"{left:.1f} s", va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 40)
    axes.set_xlabel("seconds a step")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title(f"A step of {agents} agents of 0.6B", fontsize=10)


def draw_memory(axes: Any, files: list[Path]) -> None:
    """Tokens per second of learning against the GPU's memory; filled: with gradient checkpointing."""
    for file in files:
        record = _read(file)
        for mode, (side, *_) in record["found"].items():
            is_hacrl = side["side"].startswith("hacrl")
            work = record["work"]
            name = f"hacrl, {work['hacrl_offload']}" if is_hacrl else f"TRL, {work['trl_dtype']}"
            colour = BLUE if is_hacrl else GREY
            speed = side["learnt_tokens"] / statistics.median(step["step"] for step in side["seconds"])
            memory = side["memory"]["allocated"]
            filled = colour if mode == "gradient checkpointing" else "white"
            axes.plot(memory, speed / 1000, "o", color=colour, markerfacecolor=filled, markersize=8)
            axes.annotate(
                f"{name}: {memory:.1f}",
                (memory, speed / 1000),
                (0, 7 if is_hacrl else -14),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.set_xscale("log")
    axes.set_xlim(5, 160)
    axes.set_ylim(18, 48)
    axes.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
    axes.minorticks_off()
    axes.set_xlabel("GiB of the GPU (filled: gradient checkpointing)")
    axes.set_ylabel("thousand tokens a second")
    axes.set_title("Learning: 1.7B, 256 × 1,152 tokens an update", fontsize=10)


def draw_agents(axes: Any, file: Path) -> None:
    """Learning against the number of agents, with and without the cap."""
    steps = _read(file)["steps"]
    for cap, colour, label in ((None, ORANGE, "from all agents"), (8, BLUE, "others' capped at G = 8")):
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
        ("--hacrl", ("step_hacrl",)),
        (
            "--learners",
            ("learn_hacrl_all", "learn_hacrl_stream", "learn_trl_float32", "learn_trl_bfloat16"),
        ),
    ):
        parser.add_argument(name, type=Path, nargs="+", default=[MEASURED / f"{file}.json" for file in files])
    parser.add_argument("--agents", type=Path, default=MEASURED / "many_agents.json")
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((rollouts, steps), (memory, agents)) = plt.subplots(
        2, 2, figsize=(12, 7.4), layout="constrained", width_ratios=[1.1, 1]
    )
    draw_rollouts(rollouts, options.engines)
    draw_steps(steps, options.trl, options.hacrl)
    draw_memory(memory, options.learners)
    draw_agents(agents, options.agents)
    for axes in (rollouts, steps, memory, agents):
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(hspace=0.08)  # space between a title and the label above it
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
