"""The tables of a study as Markdown: outcomes with costs, and the tests behind every difference."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hacrl.plain_text import markdown_text
from hacrl.studies.study import COSTS, MEAN, Measure, Outcome, Study

_COLUMNS = ("difference", "95% interval", "above", "p", "p, corrected", "detectable")


def study_markdown(study: Study) -> str:
    """Return the study's tables: for each measure the outcomes and, from two seeds on, the differences."""
    parts: list[str] = []
    for i, measure in enumerate(study.measures):
        if i:  # the first table needs no title: it is the study's own accuracy
            parts.append(f"**{markdown_text(measure.name)}**")
        parts.append(_outcomes(study, measure, with_costs=not i))
        if len(study.seeds) > 1 and len(study.variants) > 1:
            parts.append(_differences(study, measure))
    return "\n\n".join([*parts, *_notes(study)])


def _outcomes(study: Study, measure: Measure, with_costs: bool) -> str:
    """Return a row per variant and a column per agent; costs are of the agent with the most."""
    costs = [name for name in COSTS if name != "probe tokens" or _most(study, name) > 0] if with_costs else []
    agents = list(study.agents)
    rows = [
        ["before", *(_spread(measure.before[agent]) for agent in agents), _mean(measure.before[MEAN])]
        + ["0" for _ in costs]
    ]
    for variant in study.variants:
        outcomes = measure.outcomes[variant]
        cells = [_cell(outcomes[agent]) for agent in agents]
        spent = [f"{_largest(study, variant, name):,.0f}" for name in costs]
        rows.append([markdown_text(variant), *cells, _mean(outcomes[MEAN]), *spent])
    return _table(["variant", *map(markdown_text, agents), "mean", *costs], rows)


def _differences(study: Study, measure: Measure) -> str:
    """Return a row per variant and agent: the paired difference from the reference, and its test."""
    rows = []
    for variant in study.variants:
        for agent, outcome in measure.outcomes[variant].items():
            if (test := outcome.difference) is None:
                continue
            interval = (
                "–" if test.low is None or test.high is None else f"{test.low:+.3f} to {test.high:+.3f}"
            )
            rows.append(
                [
                    markdown_text(variant),
                    markdown_text(agent),
                    f"{test.mean:+.3f}",
                    interval,
                    f"{test.positive}/{test.pairs}",
                    _p_value(test.p_value),
                    _p_value(outcome.p_corrected),
                    "–" if test.detectable is None else f"{test.detectable:.3f}",
                ]
            )
    return _table(["variant", "agent", *_COLUMNS], rows)


def _notes(study: Study) -> list[str]:
    seeds, reference = len(study.seeds), markdown_text(study.reference)
    notes = [
        f"Mean ± standard deviation over {seeds} seeds. In brackets: the mean paired difference from "
        f"{reference}, and in how many seeds it is positive."
    ]
    if seeds > 1 and len(study.variants) > 1:
        notes.append(
            f"Differences from {reference}: {study.test}. Detectable: the smallest true difference that the "
            f"test finds with a probability of {study.power:.0%}, at this spread and number of seeds."
        )
    return notes


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "|---" * len(headings) + "|" if i == 1 else f"| {' | '.join(row)} |" for i, row in enumerate(lines)
    )


def _cell(outcome: Outcome) -> str:
    if outcome.difference is None:
        return _spread(outcome)
    test = outcome.difference
    return f"{_spread(outcome)} ({test.mean:+.3f}, {test.positive}/{test.pairs})"


def _spread(outcome: Outcome) -> str:
    return _mean(outcome) + (f" ± {outcome.std:.3f}" if outcome.std is not None else "")


def _mean(outcome: Outcome) -> str:
    return "–" if outcome.mean is None else f"{outcome.mean:.3f}"


def _p_value(value: float | None) -> str:
    if value is None:
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _largest(study: Study, variant: str, cost: str) -> float:
    """Return the cost of the agent that costs the most, a mean over seeds."""
    return max(statistics.fmean(of_agent[cost]) for of_agent in study.costs[variant].values())


def _most(study: Study, cost: str) -> float:
    return max(_largest(study, variant, cost) for variant in study.variants)
