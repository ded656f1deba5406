"""Learning rates of every step: by hand, against transformers' schedulers, and in runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from hacrl.config.load import build_config
from hacrl.errors import ConfigError
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.lr_schedule import LearningRateSchedule
from hacrl.training.observer import Observer, Phase
from tests.support.chaos import chaos_config, differing_files
from tests.training.runs import Runs, assert_same_weights

STEPS = 11


def factors(**settings) -> list[float]:
    schedule = LearningRateSchedule(**{"steps": STEPS, **settings})
    return [schedule.factor(step) for step in range(1, schedule.steps + 1)]


def test_linear_by_hand() -> None:
    # 2 of 6 steps warm-up: 1/2, 2/2; then 1 - (t - 3)/4 for t = 3 ... 6
    assert factors(kind="linear", warmup=2, steps=6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_with_a_floor_by_hand() -> None:
    # without warm-up, 4 steps: 0.2 + 0.8 * (1 + cos(pi x)) / 2 for x = 0, 1/4, 1/2, 3/4
    root = math.sqrt(0.5)
    expected = [1.0, 0.2 + 0.4 * (1 + root), 0.6, 0.2 + 0.4 * (1 - root)]
    assert factors(kind="cosine", floor=0.2, steps=4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "steps", "expected"),
    [(0.0, 100, 0), (0.1, 30, 3), (0.07, 100, 7), (0.01, 30, 1), (0.5, 5, 3), (4.0, 3, 4)],
)
def test_a_share_of_the_run_is_rounded_up(share: float, steps: int, expected: int) -> None:
    assert LearningRateSchedule(warmup=share, steps=steps).warmup_steps == expected


def theirs(make, warmup: int, *arguments, **options) -> list[float]:
    """Factors of transformers: of its step t in the warm-up and of its step t - 1 afterwards."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, warmup, *arguments, **options)
    seen = []
    for _ in range(STEPS + 1):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return [seen[t] if t <= warmup else seen[t - 1] for t in range(1, STEPS + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 4, 10])
def test_factors_are_those_of_transformers(warmup: int) -> None:
    assert factors(warmup=warmup) == pytest.approx(theirs(get_constant_schedule_with_warmup, warmup))
    linear = theirs(get_linear_schedule_with_warmup, warmup, STEPS)
    assert factors(kind="linear", warmup=warmup) == pytest.approx(linear)
    cosine = theirs(get_cosine_schedule_with_warmup, warmup, STEPS)
    assert factors(kind="cosine", warmup=warmup) == pytest.approx(cosine)


def test_a_floor_is_that_of_transformers() -> None:
    floored = theirs(get_cosine_with_min_lr_schedule_with_warmup, 0, STEPS, min_lr_rate=0.1)
    assert factors(kind="cosine", floor=0.1) == pytest.approx(floored)


def test_every_agent_s_rate_is_scaled_and_reported(runs: Runs) -> None:
    """A step with factor f changes the weights like a run with f times the learning rate."""
    agents = [runs.agent("char", lr=1e-3), "pair"]
    run = runs(*agents, steps=2, learning={"schedule": "linear", "warmup": 0, "lr": 4e-3})
    rates = [[step[name]["learning"]["learning_rate"] for step in run.steps] for name in ("char", "pair")]
    assert rates == [[1e-3, 5e-4], [4e-3, 2e-3]]
    warm = [runs.agent("char", lr=1e-3), "pair"]
    halved = [runs.agent("char", lr=5e-4), "pair"]
    one = runs(*warm, steps=1, learning={"warmup": 2, "lr": 4e-3})
    other = runs(*halved, steps=1, learning={"lr": 2e-3})
    for name in ("char", "pair"):
        assert_same_weights(one.weights(name), other.weights(name))
    (note,) = [
        line for line in (one.result.folder / "notes.txt").read_text().splitlines() if "warmup" in line
    ]
    assert "learning.warmup is 2 steps, but the run has 1: the learning rate reaches 50%" in note


class Stopper(Observer):
    """Interrupts the run after the first learner of step 2."""

    run: LocalRun

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if (step, phase) == (2, "learn"):
            self.run.interrupt()


def test_a_resumed_run_has_the_same_rates(tmp_path: Path) -> None:
    learning = {"lr": 2e-4, "schedule": "cosine", "warmup": 0.3, "lr_floor": 0.1}
    calm, stopped = (chaos_config(tmp_path / name, 3, learning=learning) for name in ("calm", "stopped"))
    run_locally(calm)
    watch = Stopper()
    with LocalRun(stopped, [watch]) as run:
        watch.run = run
        run.train()
        run.save()
    found = inspect_run(tmp_path / "stopped")
    assert found.point.steps_done == 1
    assert not any("schedule" in note for note in found.point.notes)
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
        run.save()
    assert differing_files(tmp_path / "calm", tmp_path / "stopped") == []


def test_more_steps_change_the_schedule_and_a_note_says_so(tmp_path: Path) -> None:
    changes = {"evaluation": {"problems": 0}}
    learning = {"lr": 2e-4, "schedule": "linear"}
    run_locally(chaos_config(tmp_path / "run", 1, learning=learning, **changes))
    found = inspect_run(tmp_path / "run", ["steps=4"])
    (note,) = [note for note in found.point.notes if "schedule" in note]
    # a run of 4 steps has 1 - 1/4 in step 2; one of 1 step was at its end
    assert "from step 2 on, the learning rate follows the schedule of a run of 4 steps" in note
    assert "Step 2 has 0.75 of learning.lr, not 0" in note
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert ['"learning_rate": 0.00015' in line for line in lines] == [False, True, False, False]


def test_more_steps_at_a_constant_rate_need_no_note(tmp_path: Path) -> None:
    run_locally(chaos_config(tmp_path / "run", 1, evaluation={"problems": 0}))
    assert not any("learning rate" in note for note in inspect_run(tmp_path / "run", ["steps=4"]).point.notes)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"warmup": -1}, "warmup must not be negative, not -1"),
        ({"warmup": 1.5}, "warmup must be a whole number of steps, or a share of the run below 1, not 1.5"),
        ({"schedule": "linear", "lr_floor": 1.5}, "lr_floor must be in"),
        ({"lr_floor": 0.1}, "lr_floor must be 0, not 0.1, with the schedule 'constant'"),
        ({"schedule": "cosin"}, "learning.schedule: must be 'constant', 'linear' or 'cosine', not 'cosin'"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict, says: str) -> None:
    agents = [{"name": "ada", "model": "bundled:qwen-small-a"}]
    with pytest.raises(ConfigError) as caught:
        build_config({"agents": agents, "output": "runs/x", "learning": settings})
    assert says in str(caught.value)


def test_the_default_is_a_constant_rate(tmp_path: Path) -> None:
    schedule = LearningRateSchedule.of(chaos_config(tmp_path, 100))
    assert {schedule.factor(step) for step in range(1, 200)} == {1.0}
