"""Methods by benchmark, the shape of the paper's main tables, from the results of ``hacrl eval``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hacrl.files import UnreadableFileError, read_json
from hacrl.report.runs import RunData
from hacrl.report.statistics import TEST, holm, paired_difference
from hacrl.report.tables import Cell, Spread, Table

AVERAGE = "average"  # over all benchmarks
BEFORE = "before"  # the stage, and the name of its rows
GREEDY = "greedy"  # one response at temperature 0


@dataclass(frozen=True)
class Score:
    """One agent's result on one benchmark: the mean of its responses, or pass@k."""

    variant: str | None  # of a study; None: the agent before training, or of a single run
    seed: int | None
    agent: str
    stage: str  # "before" or "after" training
    benchmark: str
    measure: str  # "avg@8", "pass@8" or "greedy"
    mean: float
    margin: float  # half of the 95% interval over problems

    @property
    def is_average(self) -> bool:
        """Whether the score is the mean of all responses."""
        return not self.measure.startswith("pass@")

    @property
    def title(self) -> str:
        """The benchmark, and how it was sampled if that is not the usual way."""
        return f"{self.benchmark}, greedy" if self.measure == GREEDY else self.benchmark


def read_scores(folder: Path) -> list[Score]:
    """Return the averages in all evaluations of a run's or study's folder."""
    paths = sorted((folder / "evaluations").glob("*/results.json"))
    return [score for path in paths for score in read_results(path, folder) if score.is_average]


def read_results(path: Path, folder: Path) -> list[Score]:
    """Return all scores of one evaluation, pass@k included; ``folder`` is that of the run or study."""
    try:
        return [score for record in read_json(path, folder)["results"] for score in _scores(record)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnreadableFileError(f"{path} is damaged or of another version: {error!r}") from error


def _scores(record: dict[str, Any]) -> Iterator[Score]:
    """Yield the average of one agent on one benchmark, and its pass@k for every k."""
    seed, samples = record["run_seed"], int(record["samples"])
    is_greedy = samples == 1 and record["temperature"] == 0
    estimates = {GREEDY if is_greedy else f"avg@{samples}": record["average"]}
    estimates |= {f"pass@{k}": estimate for k, estimate in record["pass_at"].items()}
    for measure, estimate in estimates.items():
        is_before = record["stage"] == BEFORE
        yield Score(
            variant=None if record["variant"] is None or is_before else str(record["variant"]),
            seed=None if seed is None else int(seed),
            agent=str(record["agent"]),
            stage=str(record["stage"]),
            benchmark=str(record["benchmark"]),
            measure=measure,
            mean=float(estimate["mean"]),
            margin=(float(estimate["high"]) - float(estimate["low"])) / 2,
        )


def run_benchmark_table(run: RunData, name: str) -> Table | None:
    """Return a run's agents by benchmark, before and after training; None if none was evaluated."""
    scores = {(score.agent, score.stage, score.title): score for score in read_scores(run.folder)}
    benchmarks = list(dict.fromkeys(benchmark for _, _, benchmark in scores))
    rows: list[tuple[Cell, ...]] = []
    for agent in run.agents:
        for stage in (BEFORE, "after"):
            found = [scores.get((agent, stage, benchmark)) for benchmark in benchmarks]
            if any(found):
                cells = [None if one is None else Spread(one.mean, one.margin) for one in found]
                rows.append((agent, stage, *cells))
    if not rows:
        return None
    return Table(
        name,
        f"Benchmarks: {run.name}",
        ("agent", "training", *benchmarks),
        tuple(rows),
        "Averages of hacrl eval; ±: half of the 95% interval over problems.",
        kind="benchmarks",
    )


class StudyScores:
    """Scores of a study's agents by method, seed and benchmark."""

    def __init__(self, scores: Iterable[Score]) -> None:
        self._means: dict[tuple[str, str, str], dict[int | None, float]] = {}
        for score in scores:
            key = (score.agent, score.variant or BEFORE, score.title)
            seed = None if score.variant is None else score.seed
            self._means.setdefault(key, {})[seed] = score.mean
        self.benchmarks = list(dict.fromkeys(benchmark for _, _, benchmark in self._means))
        self.ways = {benchmark.endswith(GREEDY) for benchmark in self.benchmarks}  # of sampling

    def by_seed(self, agent: str, variant: str, benchmark: str) -> dict[int | None, float]:
        """Return the scores of each seed; for the average, of seeds that have all benchmarks."""
        if benchmark != AVERAGE:
            return self._means.get((agent, variant, benchmark), {})
        columns = [self._means.get((agent, variant, name), {}) for name in self.benchmarks]
        seeds = [seed for seed in columns[0] if all(seed in column for column in columns)]
        return {seed: statistics.fmean(column[seed] for column in columns) for seed in seeds}


def study_benchmark_tables(
    runs: Sequence[RunData], agents: Sequence[str], variants: Sequence[str]
) -> list[Table]:
    """Return methods by benchmark and their paired differences; ``variants[0]`` is the reference.

    Scores are in the evaluations of the study (``hacrl eval STUDY``) or of its runs (``hacrl compare --on``).
    """
    folders = dict.fromkeys(run.folder.parent.parent for run in runs)
    found = StudyScores(
        [
            *(score for folder in folders for score in read_scores(folder)),
            *(_placed(score, run) for run in runs for score in read_scores(run.folder)),
        ]
    )
    if not found.benchmarks:
        return []
    is_one_way = len(found.ways) == 1  # greedy and sampled responses have no common average
    columns = [*found.benchmarks, *([AVERAGE] if len(found.benchmarks) > 1 and is_one_way else [])]
    rows: list[tuple[Cell, ...]] = []
    for agent in agents:
        for variant in (BEFORE, *variants):
            values = [list(found.by_seed(agent, variant, column).values()) for column in columns]
            if any(values):
                rows.append((agent, variant, *map(_spread, values)))
    main = Table(
        "study-benchmarks",
        "Methods by benchmark",
        ("agent", "method", *columns),
        tuple(rows),
        "Averages of hacrl eval; ±: standard deviation over seeds.",
        kind="study",
    )
    differences = _differences(found, agents, variants, columns)
    return [main, differences] if differences.rows else [main]


def _placed(score: Score, run: RunData) -> Score:
    """Return a score of a run's own evaluation as one of its study's."""
    return score if score.stage == BEFORE else replace(score, variant=run.variant, seed=run.seed)


def _spread(values: Sequence[float]) -> Cell:
    if not values:
        return None
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def _differences(
    found: StudyScores, agents: Sequence[str], variants: Sequence[str], columns: Sequence[str]
) -> Table:
    reference = variants[0]
    keys, results = [], []
    for agent in agents:
        for variant in variants[1:]:
            for column in columns:
                own = found.by_seed(agent, variant, column)
                other = found.by_seed(agent, reference, column)
                if seeds := [seed for seed in own if seed in other]:
                    keys.append((agent, variant, column))
                    results.append(paired_difference([own[s] for s in seeds], [other[s] for s in seeds]))
    corrected = holm([result.p_value for result in results])
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (*key, result.mean, result.low, result.high, result.p_value, p, result.pairs)
        for key, result, p in zip(keys, results, corrected, strict=True)
    )
    return Table(
        "study-benchmark-differences",
        f"Benchmarks: difference from {reference}, paired by seed",
        ("agent", "method", "benchmark", "difference", "low", "high", "p", "p, corrected", "seeds"),
        rows,
        f"Low and high: 95% confidence, Student's t. Test: {TEST}.",
        kind="study",
    )
