"""A report's figures as SVG and PNG files, drawn without a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hacrl.plain_text import plot_text
from hacrl.report.colours import agent_colours, method_colour
from hacrl.report.runs import RunData
from hacrl.report.statistics import NORMAL_QUANTILE
from hacrl.report.study_tables import find_study, study_curves
from hacrl.report.tables import file_name

_METRICS = {
    "rollout/reward": "mean reward",
    "capability": "capability",
    "rollout/response_tokens": "response tokens",
    "learning/grad_norm": "gradient norm",
    "learning/sampler_kl": "KL, sampler to learner",
}
Draw = Callable[[Any], None]


def write_figures(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """Write every figure as NAME.svg and NAME.png; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    colours = agent_colours(name for run in runs for name in run.agents)
    figures: dict[str, Draw] = {}
    for run in runs:
        prefix = f"{run.name}-" if len(runs) > 1 else ""
        figures |= {f"{prefix}{name}": draw for name, draw in _run_figures(run, colours).items()}
    figures |= _study_figures(runs)
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


def _run_figures(run: RunData, colours: dict[str, str]) -> dict[str, Draw]:
    figures: dict[str, Draw] = {}
    if len(run.evaluations) > 1:
        figures["accuracy"] = lambda axes: _accuracy(axes, run, colours)
    for name, label in _METRICS.items():
        if any(value is not None for agent in run.agents for value in run.series(agent, name)):
            figures[name.replace("/", "-")] = lambda axes, name=name, label=label: _metric(  # type: ignore[misc]
                axes, run, colours, name, label
            )
    for learner, sources in run.pairs.items():
        if len(sources) > 1:
            figures[f"taught-{learner}"] = lambda axes, learner=learner: _gradient(  # type: ignore[misc]
                axes, run, colours, learner
            )
    return figures


def _accuracy(axes: Any, run: RunData, colours: dict[str, str]) -> None:
    for agent in run.agents:
        found = [(line["step"], line["agents"][agent]) for line in run.evaluations if agent in line["agents"]]
        x = [run.spent_at(step, agent) for step, _ in found]
        y = [accuracy["mean"] for _, accuracy in found]
        error = [NORMAL_QUANTILE * accuracy["stderr"] for _, accuracy in found]
        axes.plot(x, y, color=colours[agent], marker=".", label=plot_text(agent))
        low, high = ([v + sign * e for v, e in zip(y, error, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colours[agent], alpha=0.15, linewidth=0)
    axes.set_xlabel("rollouts of the agent")
    axes.set_ylabel("held-out accuracy")
    axes.legend(frameon=False, fontsize=8)


def _metric(axes: Any, run: RunData, colours: dict[str, str], name: str, label: str) -> None:
    for agent in run.agents:
        axes.plot(
            run.steps, _with_gaps(run.series(agent, name)), color=colours[agent], label=plot_text(agent)
        )
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=8)


def _gradient(axes: Any, run: RunData, colours: dict[str, str], learner: str) -> None:
    for source, columns in run.pairs[learner].items():
        shares = _with_gaps(columns.get("gradient", []))
        axes.plot(
            run.steps,
            shares or [float("nan")] * len(run.steps),
            color=colours[source],
            label=plot_text(source),
        )
    axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.set_ylabel("share of gradient")
    axes.set_title(f"what {plot_text(learner)} learnt from", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


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
    for curve in curves:
        colour = method_colour(curve["variant"])
        for values in curve["seeds"]:
            axes.plot(curve["rollouts"], values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(
            curve["rollouts"], curve["mean"], color=colour, marker=".", label=plot_text(curve["variant"])
        )
    axes.set_xlabel("rollouts of the agent")
    axes.set_ylabel("held-out accuracy")
    axes.legend(frameon=False, fontsize=8)


def _with_gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _pyplot() -> Any:
    """Import matplotlib, which is slow, with a backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hacrl"  # equal figures have equal files
    import matplotlib.pyplot as plt

    return plt
