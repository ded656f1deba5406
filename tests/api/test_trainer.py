"""The trainer: the same runs as the command line's, with the user's own functions, models and callbacks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl import AgentSettings, Callback, HACRLTrainer
from hacrl.config.load import build_config, load_config
from hacrl.errors import TrainingError
from hacrl.rollouts.log import RolloutLog
from hacrl.runs import hub
from hacrl.runs.run import run_locally
from hacrl.tasks.arithmetic import ArithmeticTask
from tests.api.conftest import ROWS, SMALL, has_digit, shortness, small
from tests.support.sevens import SevensTask


def loaded(models: Mapping[str, str]) -> dict[str, tuple]:
    return {
        name: (AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
        for name, folder in models.items()
    }


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_run_equals_that_of_the_command_line(models, tmp_path):
    """Names, loaded models with a task object: the same files, to the byte, as from a recipe."""
    recipe = {
        "agents": [{"name": name, "model": folder} for name, folder in models.items()],
        "output": str(tmp_path / "recipe"),
        "evaluation": {"problems": 5},
        **SMALL,
    }
    expected = run_locally(build_config(recipe))
    short = {"evaluation": {"problems": 5}}
    trainers = [
        HACRLTrainer(list(models.values()), task="arithmetic", args=small(tmp_path / "names", **short)),
        HACRLTrainer(loaded(models), task=ArithmeticTask(), args=small(tmp_path / "objects", **short)),
    ]
    for trainer in trainers:
        result = trainer.train()
        for file in ("metrics.jsonl", "evaluations.jsonl"):
            assert (result.folder / file).read_bytes() == (expected.folder / file).read_bytes()
        ours, theirs = (list(RolloutLog(run.folder / "rollouts").read()) for run in (result, expected))
        assert ours
        assert ours == theirs
        for name in models:
            ours, theirs = (weights(run.folder / "agents" / name) for run in (result, expected))
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert load_config(tmp_path / "names" / "config.yaml") == trainers[0].config


class Spy(Callback):
    """Everything that happens, in order."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[tuple] = []
        self.rewards: dict[str, list[tuple[str, float]]] = {}
        self._stop_at = stop_at

    def on_phase(self, step, phase, agent):
        self.events.append((phase, step, agent))

    def on_rollouts(self, step, agent, rollouts):
        self.events.append(("rollouts", step, agent))
        self.rewards.setdefault(agent, []).extend((one.rollout.text, one.reward) for one in rollouts)

    def on_step(self, report, seconds):
        self.events.append(("step", report.step))
        self.seconds = seconds
        if report.step == self._stop_at:
            self.trainer.stop()

    def on_evaluation(self, step, accuracies):
        self.events.append(("evaluation", step))

    def on_end(self):
        self.events.append(("end",))


def test_callbacks_see_everything_in_order(models, tmp_path):
    spy = Spy()
    args = small(tmp_path / "run", steps=1)
    data = {"reward_funcs": has_digit, "train_dataset": ROWS[:12], "eval_dataset": ROWS[12:]}
    HACRLTrainer(models, args=args, callbacks=[spy], **data).train()
    evaluation = [("evaluate", "char"), ("evaluate", "pair")]
    assert spy.events == [
        *[(phase, 0, agent) for phase, agent in evaluation],
        ("evaluation", 0),
        *[(phase, 1, agent) for agent in models for phase in ("rollout", "verify", "rollouts")],
        *[("learn", 1, agent) for agent in models],
        ("step", 1),
        *[(phase, 1, agent) for phase, agent in evaluation],
        ("evaluation", 1),
        *[("save", 1, agent) for agent in models],
        ("end",),
    ]
    phases = {"rollout", "verify", "learn"}  # the step's own
    assert {key.partition("/")[0] for key in spy.seconds} == phases | {"whole"}
    assert spy.seconds["whole"] > sum(seconds for key, seconds in spy.seconds.items() if key != "whole")


def test_stop_ends_after_the_step_and_saves(models, tmp_path):
    spy = Spy(stop_at=2)
    args = small(tmp_path / "run", steps=50, evaluation={"problems": 5})
    result = HACRLTrainer(models, task="arithmetic", args=args, callbacks=[spy]).train()
    metrics = (result.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]
    assert sorted(result.accuracies) == [0, 2]
    assert spy.events[-3:] == [("save", 2, "char"), ("save", 2, "pair"), ("end",)]
    for name in models:
        assert weights(result.folder / "agents" / name)


def test_stop_before_the_first_step_makes_none(models, tmp_path):
    class StopsAtOnce(Spy):
        def on_evaluation(self, step, accuracies):
            super().on_evaluation(step, accuracies)
            self.trainer.stop()

    spy = StopsAtOnce()
    args = small(tmp_path / "run", evaluation={"problems": 2})
    HACRLTrainer(models, task=SevensTask(), args=args, callbacks=[spy]).train()
    assert spy.events[2:] == [("evaluation", 0), ("save", 0, "char"), ("save", 0, "pair"), ("end",)]


def test_a_run_of_objects_does_not_use_the_hub(models, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_probe", lambda _: pytest.fail("nothing here is on the hub"))
    HACRLTrainer(models, reward_funcs=has_digit, train_dataset=ROWS, args=small(tmp_path / "run")).close()


def test_evaluating_after_the_end_leaves_nothing_running(models, tmp_path):
    class Workers(SevensTask):
        running = False

        def verify(self, rollouts):
            self.running = True
            return super().verify(rollouts)

        def close(self):
            self.running = False

    task = Workers()
    trainer = HACRLTrainer(models, task=task, args=small(tmp_path / "run", steps=0))
    trainer.evaluate()
    assert task.running
    trainer.train()
    assert not task.running
    trainer.evaluate()
    assert not task.running


def test_a_task_that_is_falsy_is_still_used(models, tmp_path):
    class Empty(SevensTask):
        def __len__(self):
            return 0

    task = Empty()
    trainer = HACRLTrainer(models, task=task, args=small(tmp_path / "run", steps=0))
    assert trainer._run._task is task
    trainer.close()


def test_the_weighted_sum_of_rewards_reaches_the_advantages(models, tmp_path):
    """GSPO alone: an advantage is (r - mean) / (std + 1e-6) of r = 2 has_digit - 0.25 length in its group."""
    spy = Spy()
    args = small(tmp_path / "run", steps=1, method="gspo", reward_weights=[2, 0.25])
    trainer = HACRLTrainer(
        models, reward_funcs=[has_digit, shortness], train_dataset=ROWS, args=args, callbacks=[spy]
    )
    samples = {}
    for participant in trainer._run.trainer.executor.workers.values():
        keep_samples(participant, samples)
    trainer.train()
    digit = {row["prompt"]: row["digit"] for row in ROWS}
    for name, groups in samples.items():
        assert len(groups) == 3
        taken = iter(spy.rewards[name])
        for prompt, advantages in groups:
            judged = [next(taken) for _ in range(4)]
            rewards = [2.0 * (digit[prompt] in text) - 0.25 * len(text) for text, _ in judged]
            assert [reward for _, reward in judged] == pytest.approx(rewards)
            spread = stdev(rewards) + 1e-6
            expected = [(reward - mean(rewards)) / spread if spread > 1e-6 else 0.0 for reward in rewards]
            assert advantages == pytest.approx(expected, abs=1e-5)
        assert any(abs(value) > 0.5 for _, advantages in groups for value in advantages)


def keep_samples(participant, kept: dict[str, list]) -> None:
    """Per prompt, the advantages the learner was given, in the order of the responses."""
    build = participant.builder.build

    def building(groups: Sequence, *others):
        built = build(groups, *others)
        advantages = [sample.advantage for sample in built.samples]
        assert len(advantages) == 4 * len(groups)
        kept[participant.name] = [
            (group.problem.prompt, advantages[4 * i : 4 * i + 4]) for i, group in enumerate(groups)
        ]
        return built

    participant.builder.build = building


def test_given_models_are_trained_in_place(models, tmp_path):
    mine = loaded(models)
    before = {name: {k: v.clone() for k, v in pair[0].state_dict().items()} for name, pair in mine.items()}
    trainer = HACRLTrainer(mine, task=SevensTask(), args=small(tmp_path / "run", learning={"lr": 0.01}))
    result = trainer.train()
    for name, (model, tokenizer) in mine.items():
        assert trainer.agents[name].model is model
        assert trainer.agents[name].tokenizer is tokenizer
        saved = weights(result.folder / "agents" / name)
        now = model.state_dict()
        assert all(torch.equal(now[key], saved[key]) for key in saved)
        assert max(float((now[key] - before[name][key]).abs().max()) for key in saved) > 1e-3


def test_evaluate_and_save_model(models, tmp_path):
    args = small(tmp_path / "run", learning={"lr": 0.05})
    data = {"reward_funcs": has_digit, "train_dataset": ROWS[:12], "eval_dataset": ROWS[12:]}
    trainer = HACRLTrainer(models, args=args, **data)
    before = trainer.evaluate()
    result = trainer.train()
    after = trainer.evaluate()
    assert result.accuracies == {0: before, 2: after}  # always the same problems and draws
    assert before != after
    assert after["char"].problems == 12  # all of the data set, and none of it made up
    saved = trainer.save_model(tmp_path / "out")
    for name in models:
        assert saved[name] == tmp_path / "out" / name
        ours, theirs = weights(saved[name]), weights(result.folder / "agents" / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_training_the_agents_of_an_earlier_trainer(models, tmp_path):
    first = HACRLTrainer(models, task=SevensTask(), args=small(tmp_path / "one"))
    first.train()
    with pytest.raises(TrainingError, match=r"has trained already.*agents=trainer\.agents"):
        first.train()
    second = HACRLTrainer(first.agents, task=SevensTask(), args=small(tmp_path / "two"))
    second.train()
    assert second.agents["char"] is first.agents["char"]
    assert second.agents["char"].policy_version == 16  # 2 runs x 2 steps x 2 sources x 2 updates


def test_a_failed_run_is_closed_and_reported(models, tmp_path):
    class Breaks(Spy):
        def on_step(self, report, seconds):
            raise ZeroDivisionError("mine")

    class ClosedTask(SevensTask):
        closed = 0

        def close(self):
            self.closed += 1

    spy, task = Breaks(), ClosedTask()
    with pytest.raises(ZeroDivisionError, match="mine"):
        HACRLTrainer(models, task=task, args=small(tmp_path / "run"), callbacks=[spy]).train()
    assert spy.events[-1] == ("end",)
    assert task.closed == 1
    assert not (tmp_path / "run" / "agents").exists()


def test_the_config_describes_the_run(models, tmp_path):
    own = AgentSettings(name="pair", model=models["pair"], lr=0.5, rollouts_per_prompt=2)
    args = small(
        tmp_path / "run", steps=0, reward_weights=(0.5, 2), reward_range=(-80, 1), evaluation={"every": 5}
    )
    trainer = HACRLTrainer(
        [loaded(models)["char"], own],
        reward_funcs=[has_digit, "tests.api.conftest:shortness"],
        train_dataset=ROWS[:12],
        eval_dataset=ROWS[12:],
        args=args,
    )
    trainer.train()
    written = load_config(tmp_path / "run" / "config.yaml")
    assert written == trainer.config
    assert written.task.name == "reward"
    assert written.task.options == {
        "functions": ["tests.api.conftest:has_digit", "tests.api.conftest:shortness"],
        "train": "object:list of 12 rows",
        "test": "object:list of 12 rows",
        "weights": [0.5, 2],
        "reward_range": [-80, 1],
    }
    assert written.agents[0].name == "char"
    assert written.agents[0].model == f"object:Qwen3ForCausalLM from {models['char']}"
    assert written.agents[1] == own
    assert (written.evaluation.problems, written.evaluation.every) == (12, 5)


def test_progress_on_the_terminal(models, tmp_path, capsys):
    args = small(tmp_path / "run", steps=1)
    HACRLTrainer(models, task=SevensTask(), args=type(args)(**{**vars(args), "progress": True})).train()
    said = capsys.readouterr().out
    assert "HACPO: after 0 steps  accuracy char " in said
    assert "HACPO: step 1/1  reward char " in said


def test_a_tracker_has_the_numbers_of_the_run(models, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = small(tmp_path / "run", trackers="tensorboard")
    result = HACRLTrainer(models, task=SevensTask(), args=args).train()
    events = EventAccumulator(str(result.folder / "tensorboard"))
    events.Reload()
    for name in models:
        rewards = [event.value for event in events.Scalars(f"{name}/reward")]
        assert rewards == pytest.approx(result.rewards[name], abs=1e-6)
        accuracies = {event.step: event.value for event in events.Scalars(f"{name}/accuracy")}
        expected = {step: by_agent[name].mean for step, by_agent in result.accuracies.items()}
        assert accuracies == pytest.approx(expected, abs=1e-6)
