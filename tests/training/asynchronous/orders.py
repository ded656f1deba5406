"""Asynchronous runs whose jobs run one after the other, in an order that a test chooses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hacrl.config.schema import AsynchronousSettings, CheckpointSettings, ReplicaSettings, RunConfig
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun
from hacrl.training.asynchronous.jobs import Ended, Work
from hacrl.training.asynchronous.schedule import Job
from hacrl.training.asynchronous.trainer import AsynchronousTrainer
from hacrl.training.observer import Observer
from tests.training.runs import Runs

Choose = Callable[[Sequence[Job]], Job | None]


class Order:
    """Runs one job at a time. ``choose`` picks it; None lets a second pass."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.now = 0.0
        self.pending: dict[Job, Work] = {}
        self.ran: list[tuple[str, str, int]] = []
        self.kill_at: tuple[str, str, int] | None = None
        self._observer = Observer()

    def begin(self, observer: Observer) -> Order:
        """Stand in for the threads of a run."""
        self._observer, self.pending = observer, {}
        return self

    def start(self, job: Job, work: Work) -> None:
        self.pending[job] = work

    def next(self, seconds: float) -> Ended | None:
        job = self.choose(list(self.pending)) if self.pending else None
        if job is None:
            self.now += max(seconds, 0.5)
            return None
        work = self.pending.pop(job)
        self.ran.append((job.kind, job.agent, job.step))
        if self.ran[-1] == self.kill_at:
            raise KeyboardInterrupt  # as a signal that kills the process: nothing is saved
        try:
            return Ended(job, work(self._observer))
        except BaseException as error:
            return Ended(job, error=error)

    def close(self) -> list[Ended]:
        return []

    @property
    def running(self) -> list[Job]:
        return list(self.pending)


def oldest_first(jobs: Sequence[Job]) -> Job:
    """Choose the job that started first."""
    return jobs[0]


def random_order(seed: int) -> Choose:
    """Return a choice by chance."""
    return random.Random(seed).choice


def delayed(is_delayed: Callable[[Job], bool]) -> Choose:
    """Return a choice of the oldest job that is not delayed."""
    return lambda jobs: next((job for job in jobs if not is_delayed(job)), None)


def asynchronous(
    runs: Runs,
    *agents: str,
    staleness: int = 1,
    patience: float | None = None,
    every: int = 0,
    **options: Any,
) -> RunConfig:
    """Return the config of a run whose agents sample with a copy of their weights."""
    copies = [runs.agent(name, replicas=ReplicaSettings(count=1)) for name in agents]
    config = runs.config(*copies, **options)
    return replace(
        config,
        asynchronous=AsynchronousSettings(max_staleness=staleness, patience=patience),
        checkpoint=CheckpointSettings(every=every, background=False),
    )


def open_run(config: RunConfig, order: Order, observers: Sequence[Observer] = ()) -> LocalRun:
    """Return a run whose jobs run in this order; it is resumed if its folder exists."""
    if Path(config.output).exists():
        found = inspect_run(Path(config.output))
        run = LocalRun(found.config, observers, resumed=found.point)
    else:
        run = LocalRun(config, observers)
    trainer = run.trainer
    assert isinstance(trainer, AsynchronousTrainer)
    trainer._make_jobs, trainer._clock = order.begin, lambda: order.now
    return run


def finish(config: RunConfig, order: Order, observers: Sequence[Observer] = ()) -> LocalRun:
    """Make all steps of a run and save its agents."""
    with open_run(config, order, observers) as run:
        run.train()
        run.save()
    return run


def lines(folder: str | Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of one of a run's files."""
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def logged(config: RunConfig, step: int, agent: str, learnt: bool = False) -> list[dict[str, Any]]:
    """Return the rows of the rollout log: an agent's rollouts, or what it made of all rollouts."""
    folder = f"rollouts/step-{step:06d}" + ("/learnt" if learnt else "")
    return lines(config.output, f"{folder}/{agent}.jsonl")
