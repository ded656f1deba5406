"""The figures of one run: accuracy, metrics by step, time, and what was learnt from whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hacrl.plain_text import plot_text
from hacrl.report.colours import BEFORE_COLOUR
from hacrl.report.rollouts import BINS, RatioBins, ratio_bins
from hacrl.report.runs import RunData
from hacrl.report.statistics import NORMAL_QUANTILE
from hacrl.report.summary import clip_ranges

METRICS = {
    "rollout/reward": "mean reward",
    "capability": "capability",
    "rollout/entropy": "entropy, nats per token",
    "learning/policy_kl": "KL of old policy to policy",
    "learning/reference_kl": "KL of policy to reference",
    "learning/sampler_kl": "KL, sampler to learner",
    "learning/sampler_gap": "gap between sampler and learner",
    "rollout/response_tokens": "response tokens",
    "rollout/stopped": "share of responses that ended",
    "learning/grad_norm": "gradient norm",
    "learning/gradient_alignment": "cosine of own and cross gradients",
}
_BAND_COLOUR = "#DFE6F1"
_PARTS = (  # of a source's rollouts at a learner: label, shade, hatch
    ("used", "#475467", ""),
    ("clipped below", "#98A2B3", "\\\\\\\\"),
    ("clipped above", "#98A2B3", "////"),
    ("dropped", "#F0B090", "||"),
    ("over limit", "#D5DAE1", ""),
)
Draw = Callable[[Any], None]
Ratios = Mapping[str, Counter[int]]  # "learner>source" -> bin -> rollouts


def run_figures(run: RunData, colours: Mapping[str, str], ratios: Ratios) -> dict[str, Draw]:
    """Return what draws each figure of a run on the axes that it is given, by the figure's name."""
    figures: dict[str, Draw] = {}
    if len(run.evaluations) > 1:
        figures["accuracy"] = lambda axes: _accuracy(axes, run, colours)
        figures["before-after"] = lambda axes: _before_after(axes, run, colours)
    if any("/" in name for name in run.seconds):
        figures["time"] = lambda axes: _time(axes, run, colours)
    for name, label in METRICS.items():
        if any(value is not None for agent in run.agents for value in run.series(agent, name)):
            figures[name.replace("/", "-")] = _metric(run, colours, name, label)
    if any(len(sources) > 1 for sources in run.pairs.values()):
        figures["who-taught-whom"] = lambda axes: _fates(axes, run)
    for learner, sources in run.pairs.items():
        if len(sources) > 1:
            figures[f"taught-{learner}"] = _gradient(run, colours, learner)
        for kind, bins in ratio_bins(clip_ranges(run.config["method"])["own"]).items():
            found = {s: ratios[pair] for s in sources if (pair := f"{learner}>{s}") in ratios}
            wanted = {s: counts for s, counts in found.items() if (s == learner) == (kind == "own")}
            if wanted:
                figures[f"ratios-{kind}-{learner}"] = _ratios(run, colours, learner, kind, bins, wanted)
    return figures


def _accuracy(axes: Any, run: RunData, colours: Mapping[str, str]) -> None:
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


def _before_after(axes: Any, run: RunData, colours: Mapping[str, str]) -> None:
    agents = [agent for agent in run.agents if run.accuracy(agent, last=True)]
    for row, agent in enumerate(agents):
        before, after = run.accuracy(agent, last=False), run.accuracy(agent, last=True)
        assert before is not None
        assert after is not None
        axes.plot([before["mean"], after["mean"]], [row, row], color=colours[agent], alpha=0.4)
        for accuracy, colour in ((before, BEFORE_COLOUR), (after, colours[agent])):
            error = NORMAL_QUANTILE * accuracy["stderr"]
            axes.errorbar(accuracy["mean"], row, xerr=error, color=colour, marker="o", capsize=3)
    axes.set_yticks(range(len(agents)), [plot_text(agent) for agent in agents])
    axes.set_ylim(len(agents) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xlabel("held-out accuracy before (grey) and after")


def _time(axes: Any, run: RunData, colours: Mapping[str, str]) -> None:
    phases = list(dict.fromkeys(name.partition("/")[0] for name in run.seconds if "/" in name))
    left = dict.fromkeys(phases, 0.0)
    for agent in run.agents:
        seconds = [sum(v or 0.0 for v in run.seconds.get(f"{phase}/{agent}", [])) for phase in phases]
        axes.barh(phases, seconds, left=list(left.values()), color=colours[agent], label=plot_text(agent))
        left = {phase: left[phase] + s for phase, s in zip(phases, seconds, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(frameon=False, fontsize=8)


def _metric(run: RunData, colours: Mapping[str, str], name: str, label: str) -> Draw:
    def draw(axes: Any) -> None:
        for agent in run.agents:
            values = with_gaps(run.series(agent, name))
            axes.plot(run.steps, values, color=colours[agent], label=plot_text(agent))
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=8)

    return draw


def _fates(axes: Any, run: RunData) -> None:
    """Draw a bar for each pair of learner and source: what became of the source's rollouts."""
    pairs = [(a, b) for a in run.agents for b in run.agents if b in run.pairs.get(a, {})]
    left = [0.0] * len(pairs)
    counts = [_fate_counts(run, learner, source) for learner, source in pairs]
    totals = [sum(values) or 1.0 for values in counts]
    for i, (label, colour, hatch) in enumerate(_PARTS):
        widths = [values[i] / total for values, total in zip(counts, totals, strict=True)]
        axes.barh(
            range(len(pairs)),
            widths,
            left=left,
            height=0.7,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
            label=label,
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    labels = [f"{plot_text(source)} to {plot_text(learner)}" for learner, source in pairs]
    axes.set_yticks(range(len(pairs)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the source's rollouts")
    axes.legend(frameon=False, fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _fate_counts(run: RunData, learner: str, source: str) -> list[float]:
    """Return the source's rollouts in the order of ``_PARTS``, summed over steps."""
    pair = run.pairs[learner][source]

    def total(name: str, times: str | None = None) -> float:
        values = [value or 0.0 for value in pair.get(name, [])]
        factors = [value or 0.0 for value in pair[times]] if times else [1.0] * len(values)
        return sum(a * b for a, b in zip(values, factors, strict=True))

    uses, clipped, above = total("used"), total("clipped", "used"), total("clipped_above", "used")
    return [uses - clipped, clipped - above, above, total("dropped"), total("left_out")]


def _gradient(run: RunData, colours: Mapping[str, str], learner: str) -> Draw:
    def draw(axes: Any) -> None:
        for source, columns in run.pairs[learner].items():
            shares = with_gaps(columns.get("gradient", []))
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

    return draw


def _ratios(
    run: RunData,
    colours: Mapping[str, str],
    learner: str,
    kind: str,
    bins: RatioBins,
    counts: Mapping[str, Counter[int]],
) -> Draw:
    """Stack the sources' ratios; the clip range is shaded, and the outermost bars hold all further out."""

    def draw(axes: Any) -> None:
        clip = clip_ranges(run.config["method"])[kind]
        if clip is not None:
            axes.axvspan(clip[0], clip[1], color=_BAND_COLOUR, linewidth=0)
        x = [bins.low + (number + 0.5) * bins.width for number in range(BINS + 1)]
        below = [0] * (BINS + 1)
        for source, found in counts.items():
            heights = [found.get(number, 0) for number in range(BINS + 1)]
            axes.bar(x, heights, bins.width, bottom=below, color=colours[source], label=plot_text(source))
            below = [a + b for a, b in zip(below, heights, strict=True)]
        axes.axvline(1.0, color="#667085", linestyle=":", linewidth=1)
        axes.ticklabel_format(useOffset=False)
        axes.set_xlabel(f"importance ratio, {kind} rollouts (shaded: clip range)")
        axes.set_ylabel("rollouts")
        axes.set_title(f"ratios of {plot_text(learner)}", fontsize=10)
        axes.legend(frameon=False, fontsize=8)

    return draw


def with_gaps(values: Sequence[float | None]) -> list[float]:
    """Return the values with NaN for those that are missing."""
    return [float("nan") if value is None else value for value in values]
