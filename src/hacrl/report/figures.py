"""A report's figures as SVG and PNG files, drawn without a browser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hacrl.plain_text import plot_text
from hacrl.report.colours import agent_colours, line_styles, method_colour
from hacrl.report.page import run_sampler
from hacrl.report.run_figures import Draw, Ratios, run_figures, with_gaps
from hacrl.report.runs import RunData
from hacrl.report.study_tables import find_study, study_curves
from hacrl.report.tables import file_name


def write_figures(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write every figure as NAME.svg and NAME.png; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    colours = agent_colours(name for run in runs for name in run.agents)
    figures = _study_figures(runs)
    for run in runs:
        prefix = f"{run.name}-" if len(runs) > 1 else ""
        drawn = run_figures(run, colours, count_ratios(run))
        figures |= {f"{prefix}{name}": draw for name, draw in drawn.items()}
    plt = _pyplot()
    written = []
    for name, draw in figures.items():
        figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        for suffix in ("svg", "png"):
            path = folder / f"{file_name(name)}.{suffix}"
            figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            written.append(path)
        plt.close(figure)
    return written


def count_ratios(run: RunData) -> Ratios:
    """Return how many of all logged rollouts have a ratio in each bin, by learner and source."""
    sampler = run_sampler(run)
    total: dict[str, Counter[int]] = {}
    for step in sampler.steps:
        for pair, counts in sampler.step(step, budget=0).ratios.items():
            total.setdefault(pair, Counter()).update(counts)
    return total


def _study_figures(runs: Sequence[RunData]) -> dict[str, Draw]:
    study = find_study(runs)
    if study is None:
        return {}
    curves = study_curves(study)
    return {
        f"study-{agent}": lambda axes, agent=agent: _study_curves(  # type: ignore[misc]
            axes, [curve for curve in curves if curve["agent"] == agent]
        )
        for agent in study.agents
    }


def _study_curves(axes: Any, curves: Sequence[dict[str, Any]]) -> None:
    styles = line_styles([curve["variant"] for curve in curves])
    for curve in curves:
        colour, style = method_colour(curve["variant"]), styles[curve["variant"]]
        for values in curve["seeds"]:
            axes.plot(curve["rollouts"], values, style, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(
            curve["rollouts"],
            curve["mean"],
            style,
            color=colour,
            marker=".",
            label=plot_text(curve["variant"]),
        )
        low, high = with_gaps(curve["low"]), with_gaps(curve["high"])
        axes.fill_between(curve["rollouts"], low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("rollouts of the agent")
    axes.set_ylabel("held-out accuracy")
    axes.legend(frameon=False, fontsize=8)


def _pyplot() -> Any:
    """Import matplotlib, which is slow, with a backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hacrl"  # equal figures have equal files
    import matplotlib.pyplot as plt

    return plt
