"""A comparison as a picture: who ended where, and how they got there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hacrl.plain_text import plot_text
from hacrl.report.comparison import Comparison

_COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # safe for colour-blind eyes
_BEFORE = "#BBBBBB"
_SMOOTHING = 3  # steps; one step's mean reward is noisy


def plot_comparison(comparison: Comparison, labels: Mapping[str, str], path: Path) -> None:
    """Write a PNG: bars of held-out accuracy, and one panel of training reward per agent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    agents = comparison.agents
    figure, panels = plt.subplots(
        1, 1 + len(agents), figsize=(4.5 + 2.6 * len(agents), 3.8), layout="constrained",
        width_ratios=[1.8, *[1] * len(agents)],
    )  # fmt: skip
    _draw_accuracy(panels[0], comparison, labels)
    for axes, agent in zip(panels[1:], agents, strict=True):
        _draw_rewards(axes, comparison, labels, agent)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(0, 1)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_accuracy(axes: Any, comparison: Comparison, labels: Mapping[str, str]) -> None:
    agents, methods = comparison.agents, comparison.methods
    series = [("before", _BEFORE, [comparison.before(agent) for agent in agents])]
    for method, colour in zip(methods, _COLOURS, strict=False):
        series.append(
            (labels[method], colour, [comparison.outcomes[method][agent].after for agent in agents])
        )
    width = 0.84 / len(series)
    for slot, (label, colour, accuracies) in enumerate(series):
        positions = [i + (slot - (len(series) - 1) / 2) * width for i in range(len(agents))]
        means, errors = [a.mean for a in accuracies], [a.stderr for a in accuracies]
        bars = axes.bar(positions, means, width * 0.94, yerr=errors, color=colour, label=label, capsize=2)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_xticks(range(len(agents)), [plot_text(agent) for agent in agents])
    axes.set_title("Sampled accuracy, held-out problems", fontsize=10)


def _draw_rewards(axes: Any, comparison: Comparison, labels: Mapping[str, str], agent: str) -> None:
    for method, colour in zip(comparison.methods, _COLOURS, strict=False):
        rewards = comparison.outcomes[method][agent].rewards
        steps = range(1, len(rewards) + 1)
        axes.plot(steps, rewards, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, _smoothed(rewards), color=colour, label=labels[method])
    axes.set_title(f"{plot_text(agent)}: training reward", fontsize=10)
    axes.set_xlabel("step")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each value and the few before it."""
    windows = [values[max(0, i + 1 - _SMOOTHING) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
