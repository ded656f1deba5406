"""A study as a picture: one panel per agent, one dot per seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hacrl.execution.results import RunResult
from hacrl.plain_text import plot_text


def plot_study(results: Mapping[tuple[str, int], RunResult], path: Path) -> None:
    """Write a PNG: final accuracy of every seed (dots) and their mean (bar), by variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    variants = list(dict.fromkeys(variant for variant, _ in results))
    agents = list(next(iter(results.values())).rewards)
    height = 1.2 + 0.34 * len(variants)
    figure, panels = plt.subplots(
        1,
        len(agents),
        figsize=(3 + 3 * len(agents), height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, agent in zip(panels[0], agents, strict=True):
        for row, variant in enumerate(variants):
            runs = [run for (name, _), run in results.items() if name == variant]
            finals = [run.accuracies[max(run.accuracies)][agent].mean for run in runs]
            mean = sum(finals) / len(finals)
            colour = "#D55E00" if variant.startswith("hacpo") else "#0072B2"
            axes.barh(row, mean, height=0.7, color=colour, alpha=0.35)
            axes.plot(finals, [row] * len(finals), "o", color=colour, markersize=3.5)
            axes.annotate(f"{mean:.3f}", (0.01, row), va="center", fontsize=8)
        start = [run.accuracies[0][agent].mean for run in results.values()]
        axes.axvline(sum(start) / len(start), color="#777777", linestyle=":", linewidth=1)
        axes.set_title(plot_text(agent), fontsize=10)
        axes.set_xlim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
    # long names would squeeze the panels
    labels = [plot_text(variant).replace("@", "\n@") for variant in variants]
    panels[0][0].set_yticks(range(len(variants)), labels, fontsize=8)
    panels[0][0].invert_yaxis()
    figure.supxlabel("sampled accuracy on held-out problems (dots: seeds; dotted line: before)", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
