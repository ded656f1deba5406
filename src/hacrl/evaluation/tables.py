"""Tables of an evaluation's results, for the terminal and for results.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from hacrl.evaluation.metrics import Estimate
from hacrl.evaluation.results import PairResult, Results
from hacrl.plain_text import markdown_text
from hacrl.types import VerdictLabel

_VERDICTS: tuple[VerdictLabel, ...] = ("correct", "wrong", "unparsable", "timeout", "crash", "scored")


@dataclass(frozen=True)
class TextTable:
    """A title, headings, and rows with one cell per heading."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def width(self) -> int:
        """Characters of a printed line, with two spaces between columns."""
        return sum(max(map(len, column)) + 2 for column in zip(self.headings, *self.rows, strict=True))

    def without(self, heading: str) -> TextTable:
        """Return the table without one column."""
        kept = [i for i, name in enumerate(self.headings) if name != heading]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return TextTable(self.title, tuple(self.headings[i] for i in kept), rows)

    def markdown(self) -> str:
        """Return the table as Markdown, below its title."""
        lines = [f"**{markdown_text(self.title)}**", "", _line(self.headings)]
        lines.append("|" + "---|" * len(self.headings))
        return "\n".join([*lines, *(_line(row) for row in self.rows)]) + "\n"


def result_tables(results: Results) -> list[TextTable]:
    """Return one table per benchmark and, of a study, one over its seeds; of several, a summary first."""
    benchmarks = list(dict.fromkeys(pair.benchmark for pair in results.pairs))
    tables = [_benchmark_table(name, results) for name in benchmarks]
    tables += [table for name in benchmarks if (table := _table_over_seeds(name, results)) is not None]
    return [_summary(benchmarks, results), *tables] if len(benchmarks) > 1 else tables


def results_markdown(results: Results) -> str:
    """Return all tables and notes as Markdown."""
    parts = [table.markdown() for table in result_tables(results)]
    if results.notes:
        parts.append("\n".join(f"- {markdown_text(note)}" for note in results.notes) + "\n")
    return "\n".join(parts)


def _benchmark_table(name: str, results: Results) -> TextTable:
    pairs = [pair for pair in results.pairs if pair.benchmark == name]
    changes = {change.label: change.change for change in results.changes() if change.benchmark == name}
    ks = sorted({k for pair in pairs for k in pair.score.best_at})
    verdicts = [label for label in _VERDICTS if any(pair.score.verdicts[label] for pair in pairs)]
    samples = sorted({pair.score.samples for pair in pairs})
    headings = ["agent", f"avg@{'/'.join(map(str, samples))}"]
    headings += [f"{_best_or_pass(pairs)}@{k}" for k in ks]
    headings += ["change"] if changes else []
    headings += ["stopped", "tokens", *verdicts]
    rows = []
    for pair in pairs:
        score = pair.score
        row = [pair.label, with_interval(score.average)]
        row += [with_interval(score.best_at[k]) if k in score.best_at else "" for k in ks]
        if changes:
            row.append(
                _signed(changes[pair.label]) if pair.stage == "after" and pair.label in changes else ""
            )
        row += [f"{score.stopped:.0%}", f"{score.mean_tokens:.0f}"]
        row += [f"{score.verdicts[label]:,}" for label in verdicts]
        rows.append(tuple(row))
    return TextTable(f"{name}: {_sampling_text(pairs)}", tuple(headings), tuple(rows))


def _table_over_seeds(name: str, results: Results) -> TextTable | None:
    """Return mean and deviation over the seeds of a study, a row per variant and a column per agent."""
    averages: dict[tuple[str, str], list[float]] = {}
    for pair in results.pairs:
        if pair.benchmark == name and pair.variant is not None:
            averages.setdefault((pair.variant, pair.agent), []).append(pair.score.average.mean)
    counts = sorted({len(values) for values in averages.values()})
    if not counts or counts[-1] < 2:
        return None
    agents = list(dict.fromkeys(agent for _, agent in averages))
    rows = [
        (variant, *(_over_seeds(averages.get((variant, agent), [])) for agent in agents))
        for variant in dict.fromkeys(variant for variant, _ in averages)
    ]
    seeds = "/".join(map(str, counts))
    return TextTable(
        f"{name}: mean ± standard deviation over {seeds} seeds", ("method", *agents), tuple(rows)
    )


def _over_seeds(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = f"{fmean(values):.3f}"
    return f"{mean} ± {stdev(values):.3f}" if len(values) > 1 else mean


def _summary(benchmarks: Sequence[str], results: Results) -> TextTable:
    """Return one row per agent and one column per metric."""
    found = {(pair.label, pair.benchmark): pair for pair in results.pairs}
    labels = list(dict.fromkeys(pair.label for pair in results.pairs))
    headings = ["agent"]
    columns: list[tuple[str, int]] = []  # benchmark and k of best@k; 0: the average
    for name in benchmarks:
        pairs = [pair for pair in results.pairs if pair.benchmark == name]
        columns.append((name, 0))
        headings.append(f"{name} avg@{pairs[0].score.samples}")
        for k in sorted({k for pair in pairs for k in pair.score.best_at}):
            columns.append((name, k))
            headings.append(f"{name} {_best_or_pass(pairs)}@{k}")
    rows = []
    for label in labels:
        cells = [label]
        for name, k in columns:
            pair = found.get((label, name))
            estimate = None if pair is None else pair.score.best_at.get(k) if k else pair.score.average
            cells.append("" if estimate is None else f"{estimate.mean:.3f}")
        rows.append(tuple(cells))
    return TextTable("Summary", tuple(headings), tuple(rows))


def with_interval(estimate: Estimate) -> str:
    """Return ``0.432 ± 0.044``: the mean and half the width of its 95% interval."""
    return f"{estimate.mean:.3f} ± {estimate.margin:.3f}"


def _signed(change: Estimate) -> str:
    return f"{change.mean:+.3f} ± {change.margin:.3f}"


def _best_or_pass(pairs: Sequence[PairResult]) -> str:
    """Return the metric's name: with correct and wrong responses, best@k is pass@k."""
    return "pass" if all(pair.score.pass_at for pair in pairs) else "best"


def _sampling_text(pairs: Sequence[PairResult]) -> str:
    """Describe the problems and sampling settings that all pairs have in common."""
    parts = [
        _if_equal([f"{pair.score.problems:,} problems" for pair in pairs]),
        _if_equal([_samples_text(pair.score.samples) for pair in pairs]),
        _if_equal([_temperature_text(pair) for pair in pairs]),
        _if_equal([f"at most {pair.score.max_new_tokens:,} new tokens" for pair in pairs]),
    ]
    return ", ".join(part for part in parts if part)


def _samples_text(samples: int) -> str:
    return "1 response each" if samples == 1 else f"{samples} responses each"


def _temperature_text(pair: PairResult) -> str:
    if pair.temperature == 0:
        return "greedy"
    return f"temperature {pair.temperature:g}" + (f", top-p {pair.top_p:g}" if pair.top_p < 1 else "")


def _if_equal(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ""


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown_text, cells)) + " |"
