"""What it costs to keep what each learner made of each rollout, and to compare own and cross gradients.

    python benchmarks/learner_records.py [RECIPE] [--steps 6] [--json]

Trains the recipe, with processor time taken around all that the records need: rounding log-probabilities,
making the records, and writing them. Processor time does not count what other processes do. The same steps
are then trained without the comparison of gradients (``learning.measure_alignment=false``). The first step is
left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

from hacrl.config.load import load_config
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.run import run_locally
from hacrl.training import metrics
from hacrl.training.learn_stats import LearnStats
from hacrl.training.observer import Observer


class Clock(Observer):
    """Takes processor time of steps, and within them of what the records need."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.records: list[float] = []
        self._start = time.process_time()
        self._in_step = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time counted."""

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self._in_step += time.process_time() - start

        return call

    def on_step(self, *_: Any) -> None:
        """Note the step that is over."""
        now = time.process_time()
        self.steps.append(now - self._start)
        self.records.append(self._in_step)
        self._start, self._in_step = now, 0.0


@contextmanager
def counted(clock: Clock) -> Iterator[None]:
    """Within the block, count the time of keeping records."""
    with (
        mock.patch.object(LearnStats, "_keep_first_uses", clock.timed(LearnStats._keep_first_uses)),
        mock.patch.object(metrics, "learnt_rollouts", clock.timed(metrics.learnt_rollouts)),
        mock.patch.object(RolloutLog, "append_learnt", clock.timed(RolloutLog.append_learnt)),
    ):
        yield


def measure(recipe: Path, steps: int, compares: bool) -> Clock:
    """Train some steps."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "steps": steps,
            "output": f"{folder}/run",
            "threads": 1,
            "evaluation.problems": 0,
            "checkpoint.every": 0,
            "learning.measure_alignment": str(compares).lower(),
        }
        config = load_config(recipe, [f"{key}={value}" for key, value in changes.items()])
        clock = Clock()
        with counted(clock):
            run_locally(config, [clock])
    return clock


def main() -> None:
    """Measure with and without the comparison, and print the shares."""
    parser = argparse.ArgumentParser(description="Cost of learner records and of comparing gradients.")
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("demo"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with_it = measure(arguments.recipe, arguments.steps, compares=True)
    without = measure(arguments.recipe, arguments.steps, compares=False)
    step, plain = fmean(with_it.steps[1:]), fmean(without.steps[1:])
    found = {
        "step": step,
        "records": fmean(with_it.records[1:]),
        "records_share": fmean(with_it.records[1:]) / step,
        "step_without_comparison": plain,
        "comparison_share": step / plain - 1,
    }
    if arguments.json:
        print(json.dumps(found))
    else:
        print(f"a step: {step:.3f} s of processor time")
        print(f"records: {found['records'] * 1000:.1f} ms, {found['records_share']:.2%} of it")
        print(f"comparison of gradients: {found['comparison_share']:+.1%} ({plain:.3f} s without)")


if __name__ == "__main__":
    main()
