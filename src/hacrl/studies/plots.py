"""Plots of studies and of the demo. A method has the same colour in every plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hacrl.plain_text import plot_text
from hacrl.report.colours import BEFORE_COLOUR, line_styles, method_colour
from hacrl.runs.results import RunResult
from hacrl.studies.tables import Comparison

_SMOOTHING = 3  # steps; the mean reward of one step is noisy

Runs = Mapping[tuple[str, int], RunResult]  # (variant, seed) -> run


def accuracy_curve(runs: Mapping[int, RunResult], agent: str) -> list[tuple[float, float, float]]:
    """Return (rollouts spent, mean over seeds, standard deviation over seeds) at every evaluation.

    Rollouts are the fair axis: methods differ in the rollouts that a step costs.
    """
    curve = []
    first = next(iter(runs.values()))
    last = max(first.accuracies)
    for step in sorted(first.accuracies):
        values = [run.accuracies[step][agent].mean for run in runs.values()]
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        curve.append((first.rollouts[agent] * step / last, statistics.fmean(values), deviation))
    return curve


def plot_curves(results: Runs, path: Path) -> None:
    """Write a PNG: one panel per agent, one accuracy curve per variant, shaded by the spread over seeds."""
    plt = _pyplot()
    variants = list(dict.fromkeys(variant for variant, _ in results))
    agents = list(next(iter(results.values())).rewards)
    styles = line_styles(variants)
    figure, panels = plt.subplots(
        1, len(agents), figsize=(1 + 3.6 * len(agents), 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, agent in zip(panels[0], agents, strict=True):
        for variant in variants:
            runs = {seed: run for (name, seed), run in results.items() if name == variant}
            spent, means, deviations = zip(*accuracy_curve(runs, agent), strict=True)
            low = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
            high = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
            colour = method_colour(variant)
            axes.plot(
                spent,
                means,
                styles[variant],
                color=colour,
                label=plot_text(variant),
                marker=".",
                linewidth=1.6,
            )
            axes.fill_between(spent, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(plot_text(agent), fontsize=10)
        axes.set_xlabel("rollouts of this agent")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("sampled accuracy, held out")
    panels[0][-1].legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_study(results: Runs, path: Path) -> None:
    """Write a PNG: by variant, the final accuracy of every seed (dots) and their mean (bar)."""
    plt = _pyplot()
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
            colour = method_colour(variant)
            axes.barh(row, mean, height=0.7, color=colour, alpha=0.35)
            axes.plot(finals, [row] * len(finals), "o", color=colour, markersize=3.5)
            axes.annotate(f"{mean:.3f}", (0.01, row), va="center", fontsize=8)
        start = [run.accuracies[0][agent].mean for run in results.values()]
        axes.axvline(sum(start) / len(start), color="#777777", linestyle=":", linewidth=1)
        axes.set_title(plot_text(agent), fontsize=10)
        axes.set_xlim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
    # overrides on a line of their own, because long names would squeeze the panels
    labels = [plot_text(variant).replace("@", "\n@") for variant in variants]
    panels[0][0].set_yticks(range(len(variants)), labels, fontsize=8)
    panels[0][0].invert_yaxis()
    figure.supxlabel("sampled accuracy on held-out problems (dots: seeds; dotted line: before)", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_comparison(comparison: Comparison, labels: Mapping[str, str], path: Path) -> None:
    """Write a PNG: bars of held-out accuracy, and one panel of training rewards per agent."""
    plt = _pyplot()
    agents = comparison.agents
    figure, panels = plt.subplots(
        1,
        1 + len(agents),
        figsize=(4.5 + 2.6 * len(agents), 3.8),
        layout="constrained",
        width_ratios=[1.8, *[1] * len(agents)],
    )
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
    agents = comparison.agents
    series = [("before", BEFORE_COLOUR, [comparison.before(agent) for agent in agents])]
    for method in comparison.methods:
        accuracies = [comparison.outcomes[method][agent].after for agent in agents]
        series.append((labels[method], method_colour(method), accuracies))
    width = 0.84 / len(series)
    for slot, (label, colour, accuracies) in enumerate(series):
        positions = [i + (slot - (len(series) - 1) / 2) * width for i in range(len(agents))]
        means = [accuracy.mean for accuracy in accuracies]
        errors = [accuracy.stderr for accuracy in accuracies]
        bars = axes.bar(positions, means, width * 0.94, yerr=errors, color=colour, label=label, capsize=2)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.set_xticks(range(len(agents)), [plot_text(agent) for agent in agents])
    axes.set_title("Sampled accuracy, held-out problems", fontsize=10)


def _draw_rewards(axes: Any, comparison: Comparison, labels: Mapping[str, str], agent: str) -> None:
    for method in comparison.methods:
        rewards = comparison.outcomes[method][agent].rewards
        steps = range(1, len(rewards) + 1)
        colour = method_colour(method)
        axes.plot(steps, rewards, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, _smoothed(rewards), color=colour, label=labels[method])
    axes.set_title(f"{plot_text(agent)}: training reward", fontsize=10)
    axes.set_xlabel("step")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return a running mean over each value and the few before it."""
    windows = [values[max(0, i + 1 - _SMOOTHING) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _pyplot() -> Any:
    """Import matplotlib, which is slow, with a backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
