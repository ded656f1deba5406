"""Methods by benchmark, the shape of the paper's main tables, from the results of ``hacrl eval``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.files import UnreadableFileError, read_json
from hacrl.report.runs import RunData
from hacrl.report.statistics import TEST, holm, paired_difference
from hacrl.report.tables import Cell, Spread, Table

AVERAGE = "average"  # over all benchmarks
BEFORE = "before"  # the stage, and the name of its rows


@dataclass(frozen=True)
class Score:
    """One agent's average on one benchmark."""

    variant: str | None  # of a study; None: the agent before training, or of a single run
    seed: int | None
    agent: str
    stage: str  # "before" or "after" training
    benchmark: str
    mean: float
    margin: float  # half of the 95% interval over problems


def read_scores(folder: Path) -> list[Score]:
    """Return all scores in the evaluations of a run's or study's folder."""
    scores = []
    for path in sorted((folder / "evaluations").glob("*/results.json")):
        try:
            scores += [_score(record) for record in read_json(path, folder)["results"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableFileError(f"{path} is damaged or of another version: {error!r}") from error
    return scores


def _score(record: dict[str, object]) -> Score:
    average = record["average"]
    assert isinstance(average, dict)
    seed = record["run_seed"]
    return Score(
        variant=None if record["variant"] is None or record["stage"] == BEFORE else str(record["variant"]),
        seed=None if seed is None else int(str(seed)),
        agent=str(record["agent"]),
        stage=str(record["stage"]),
        benchmark=str(record["benchmark"]),
        mean=float(average["mean"]),
        margin=(float(average["high"]) - float(average["low"])) / 2,
    )


def run_benchmark_table(run: RunData, name: str) -> Table | None:
    """Return a run's agents by benchmark, before and after training; None if none was evaluated."""
    scores = {(score.agent, score.stage, score.benchmark): score for score in read_scores(run.folder)}
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
            key = (score.agent, score.variant or BEFORE, score.benchmark)
            seed = None if score.variant is None else score.seed
            self._means.setdefault(key, {})[seed] = score.mean
        self.benchmarks = list(dict.fromkeys(benchmark for _, _, benchmark in self._means))

    def by_seed(self, agent: str, variant: str, benchmark: str) -> dict[int | None, float]:
        """Return the scores of each seed; for the average, of seeds that have all benchmarks."""
        if benchmark != AVERAGE:
            return self._means.get((agent, variant, benchmark), {})
        columns = [self._means.get((agent, variant, name), {}) for name in self.benchmarks]
        seeds = [seed for seed in columns[0] if all(seed in column for column in columns)]
        return {seed: statistics.fmean(column[seed] for column in columns) for seed in seeds}


def study_benchmark_tables(
    folders: Iterable[Path], agents: Sequence[str], variants: Sequence[str]
) -> list[Table]:
    """Return methods by benchmark and their paired differences; ``variants[0]`` is the reference."""
    found = StudyScores(score for folder in folders for score in read_scores(folder))
    if not found.benchmarks:
        return []
    columns = [*found.benchmarks, *([AVERAGE] if len(found.benchmarks) > 1 else [])]
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
