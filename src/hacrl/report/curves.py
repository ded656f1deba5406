"""How accuracy grew with the rollouts spent: the fair axis between methods of different cost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from hacrl.execution.results import RunResult
from hacrl.plain_text import plot_text

_COLOURS = ["#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#E69F00", "#D55E00", "#777777", "#000000"]


def accuracy_curve(runs: Mapping[int, RunResult], agent: str) -> list[tuple[float, float, float]]:
    """(rollouts spent, mean over seeds, standard deviation over seeds) at every evaluation."""
    curve = []
    first = next(iter(runs.values()))
    last = max(first.accuracies)
    for step in sorted(first.accuracies):
        values = [run.accuracies[step][agent].mean for run in runs.values()]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        curve.append((first.rollouts[agent] * step / last, statistics.fmean(values), spread))
    return curve


def plot_curves(results: Mapping[tuple[str, int], RunResult], path: Path) -> None:
    """Write a PNG: one panel per agent, one line per variant, shaded by the spread over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    variants = list(dict.fromkeys(variant for variant, _ in results))
    agents = list(next(iter(results.values())).rewards)
    figure, panels = plt.subplots(
        1, len(agents), figsize=(1 + 3.6 * len(agents), 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, agent in zip(panels[0], agents, strict=True):
        for i, variant in enumerate(variants):
            runs = {seed: run for (name, seed), run in results.items() if name == variant}
            spent, means, spreads = zip(*accuracy_curve(runs, agent), strict=True)
            low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
            high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
            colour = _COLOURS[i % len(_COLOURS)]
            axes.plot(spent, means, color=colour, label=plot_text(variant), marker=".", linewidth=1.6)
            axes.fill_between(spent, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(plot_text(agent), fontsize=10)
        axes.set_xlabel("rollouts of this agent")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("sampled accuracy, held out")
    panels[0][-1].legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
