"""Benchmarks of a study's agents: sampled and greedy responses, evaluated by each run when it has trained.

Each run's results are in its own folder, so several runs are evaluated at a time, and an interrupted
evaluation continues. The agents before training are the same for all runs: one run evaluates them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hacrl.config.schema import BenchmarkSettings, RunConfig
from hacrl.evaluation.benchmarks import label_of
from hacrl.evaluation.plan import EvaluationRequest
from hacrl.evaluation.run import evaluate_targets
from hacrl.evaluation.specs import BenchmarkSpecs, split_names
from hacrl.report.benchmark_tables import Score, read_results
from hacrl.report.tables import file_name


@dataclass(frozen=True)
class StudyBenchmarks:
    """What every run is evaluated on: ``samples`` responses to each problem, and one greedy response."""

    on: tuple[str, ...]
    samples: int = 8
    limit: int | None = None
    max_new_tokens: int | None = None
    data: Path | None = None

    def check(self) -> None:
        """Raise ConfigError or TaskError if a benchmark is unknown or its data are missing."""
        with closing(BenchmarkSpecs(BenchmarkSettings(), self.data)) as specs:
            specs.check(split_names(self.on))

    def evaluate(self, config: RunConfig, before: bool) -> None:
        """Evaluate a trained run, and with ``before`` its agents as they began; skip what is done."""
        for name, settings in self._settings():
            evaluate_targets(
                EvaluationRequest(
                    targets=(config.output,),
                    on=self.on,
                    settings=settings,
                    data=self.data,
                    before=before,
                    engine=config.rollout.engine,
                    device=config.device,
                    output=Path(config.output) / "evaluations" / name,
                )
            )

    def scores(self, run: Path) -> list[Score]:
        """Return the scores of a run that has been evaluated."""
        return [
            score
            for name, _ in self._settings()
            for score in read_results(run / "evaluations" / name / "results.json", run)
        ]

    def _settings(self) -> Iterator[tuple[str, BenchmarkSettings]]:
        """Yield folder name and settings of the sampled and the greedy evaluation."""
        labels = "+".join(label_of(name) for name in split_names(self.on))
        limit = "" if self.limit is None else f"-limit-{self.limit}"
        length = "" if self.max_new_tokens is None else f"-tokens-{self.max_new_tokens}"
        greedy = BenchmarkSettings(
            samples=1, temperature=0.0, limit=self.limit, max_new_tokens=self.max_new_tokens
        )
        sampled = replace(greedy, samples=self.samples, temperature=1.0)
        yield file_name(f"{labels}-avg-{self.samples}{limit}{length}"), sampled
        yield file_name(f"{labels}-greedy{limit}{length}"), greedy


def agents_before(config: RunConfig) -> str:
    """Return a text that is equal for runs whose agents begin as the same models."""
    return repr(
        [
            (agent.name, agent.model, agent.revision, agent.precision, agent.chat_template)
            for agent in config.agents
        ]
    )
