"""Runs with a frozen local agent: it is sampled, the others learn from it, and nothing of it changes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hacrl.api.config import HACRLConfig
from hacrl.api.trainer import HACRLTrainer
from hacrl.cli.dry_run import dry_run_lines
from hacrl.config.load import build_config
from hacrl.config.schema import (
    AsynchronousSettings,
    GspoSettings,
    ReplicaSettings,
    RunConfig,
    S2lpoSettings,
    XgrpoSettings,
)
from hacrl.errors import CheckpointError, ConfigError
from hacrl.memory.residency import Residency
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.dry_run import dry_run
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.frozen import FrozenWorker
from tests.support.tiny import char_agent, pair_agent
from tests.training.runs import Runs, Watcher, assert_moved, assert_same_weights
from tests.training.small_optimizers import transfers
from tests.training.test_interruptions import Events


def resumed(folder: Path, *overrides: str) -> None:
    found = inspect_run(folder, list(overrides))
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
        run.save()


def files(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


LASTING = ("metrics.jsonl", "evaluations.jsonl", "agents/char/model.safetensors")


def test_a_frozen_agent_teaches_and_is_left_as_it_was(runs: Runs) -> None:
    before = {path: path.read_bytes() for path in sorted((runs.folder / "start" / "pair").iterdir())}
    run = runs("char", runs.agent("pair", frozen=True), evaluation={"problems": 2, "every": 1})
    folder = run.result.folder
    assert_moved(runs.initial_weights("char"), run.weights("char"))
    assert [path.name for path in (folder / "agents").iterdir()] == ["char"]
    assert {path: path.read_bytes() for path in before} == before
    tensors = {path.name for path in (folder / "checkpoints").rglob("*.safetensors")}
    assert tensors == {"agent-char.safetensors"}
    for own in run.of("pair"):
        assert (own["learning"]["updates"], own["policy_version"]) == (0, 0)
        assert own["learning"]["sources"] == {}
    assert all(own["learning"]["sources"]["pair"]["used"] for own in run.of("char"))
    logged = RolloutLog(folder / "rollouts")
    assert [sum(1 for _ in logged.read(step, "pair")) for step in (1, 2, 3)] == [16, 16, 16]
    assert {row["learner"] for step in (1, 2, 3) for row in logged.read_learnt(step)} == {"char"}


def test_it_is_evaluated_once_and_counts_in_every_evaluation(runs: Runs) -> None:
    agents = (runs.agent("pair", frozen=True), "char")  # any order
    run = runs(*agents, evaluation={"problems": 2, "every": 1})
    evaluations = [phase for phase in run.watcher.phases if phase[1] == "evaluate"]
    assert evaluations == [(0, "evaluate", "pair")] + [(step, "evaluate", "char") for step in range(4)]
    lines = (run.result.folder / "evaluations.jsonl").read_text().splitlines()
    found = [json.loads(line)["agents"]["pair"] for line in lines]
    assert found == [found[0]] * 4


def test_the_learners_first_step_is_that_beside_an_agent_that_learns(runs: Runs) -> None:
    """Only from the second step on does it matter whether the partner has learnt."""
    frozen = runs("char", runs.agent("pair", frozen=True), steps=2)
    learning = runs("char", "pair", steps=2)
    assert frozen.watcher.rollouts[1, "pair"] == learning.watcher.rollouts[1, "pair"]
    assert frozen.of("char")[0] == learning.of("char")[0]
    # two sources, so that there are twice the updates of an agent alone
    assert (
        frozen.of("char")[0]["learning"]["updates"]
        == 2 * runs("char", steps=1).of("char")[0]["learning"]["updates"]
    )


def test_a_resumed_run_is_the_same_to_the_last_bit(runs: Runs) -> None:
    agents = ("char", runs.agent("pair", frozen=True))
    evaluation = {"problems": 2, "every": 2}
    whole = runs(*agents, steps=4, evaluation=evaluation).result.folder
    stopped = runs(*agents, steps=2, evaluation=evaluation).result.folder
    resumed(stopped, "steps=4")
    assert files(stopped, *LASTING) == files(whole, *LASTING)


@pytest.mark.parametrize("at", [("rollouts", "pair"), ("learn", "char")])
def test_a_step_that_was_interrupted_is_resumed_exactly(runs: Runs, at: tuple[str, str]) -> None:
    agents = ("char", runs.agent("pair", frozen=True))
    whole = runs(*agents, steps=2).result.folder
    events = Events(at)
    config = runs.config(*agents, steps=2)
    with LocalRun(config, [events]) as run:
        events.run = run
        run.train()
        assert run.is_interrupted
        run.save()
    resumed(Path(config.output))
    assert files(Path(config.output), *LASTING[::2]) == files(whole, *LASTING[::2])


def test_another_model_in_its_place_is_refused(runs: Runs) -> None:
    folder = runs("char", runs.agent("twin", frozen=True), steps=1).result.folder
    start = runs.folder / "start"
    shutil.copy(start / "char" / "model.safetensors", start / "twin" / "model.safetensors")
    message = r"agent 'twin' is frozen, and its model has changed since the run began: weights \w+ then"
    with pytest.raises(CheckpointError, match=message):
        resumed(folder, "steps=2")


def test_the_explorer_of_s2l_po_is_frozen(runs: Runs) -> None:
    method = S2lpoSettings(explorer="pair", anneal=1.0)
    config = runs.config("char", "pair", method=method)
    assert [agent.frozen for agent in config.agents] == [False, True]
    run_locally(config)
    assert [path.name for path in (Path(config.output) / "agents").iterdir()] == ["char"]


def test_somebody_must_learn() -> None:
    agents = [{"name": name, "model": "m", "frozen": True} for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"agents: all agents are frozen \(a, b\)"):
        build_config({"agents": agents, "output": "x"})


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"model": "m", "frozen": True, "ranks": 2}, "ranks=2 share the work of training"),
        ({"model": "m", "endpoint": {"url": "http://h/v1", "model": "m"}}, "exclude each other"),
        ({}, "model is missing: name a model, or give an endpoint"),
    ],
)
def test_what_has_no_meaning_is_refused(agent: dict[str, Any], message: str) -> None:
    agents = [{"name": "a", "model": "m"}, {"name": "b", **agent}]
    with pytest.raises(ConfigError, match=message):
        build_config({"agents": agents, "output": "x"})


def test_keys_of_training_have_no_effect_on_it() -> None:
    defaults = {"lora": {"rank": 2}, "gradient_checkpointing": True}
    agents = [{"name": "a", "model": "m"}, {"name": "b", "model": "m", "frozen": True}]
    config = build_config({"agents": agents, "agent_defaults": defaults, "output": "x"})
    assert [agent.lora is None for agent in config.agents] == [False, True]
    assert [agent.gradient_checkpointing for agent in config.agents] == [True, False]


def test_a_method_without_sharing_says_that_it_is_sampled_for_nothing(runs: Runs) -> None:
    def notes(method: Any) -> str:
        events = Events()
        config = runs.config("char", runs.agent("pair", frozen=True), method=method, steps=0)
        run_locally(config, [events])
        return " ".join(events.notes)

    assert "the frozen agents (pair) are sampled for nothing" in notes(GspoSettings())
    assert "for nothing" not in notes(XgrpoSettings())  # all agents' rewards are compared


def asynchronous(runs: Runs, *agents: Any, **options: Any) -> RunConfig:
    config = runs.config(*agents, **options)
    return replace(config, asynchronous=AsynchronousSettings(max_staleness=1))


def test_an_asynchronous_run_samples_it_with_the_weights_that_it_has(runs: Runs) -> None:
    """Without copies of its model, which an agent that learns needs."""
    learner = runs.agent("char", replicas=ReplicaSettings(count=1))
    config = asynchronous(
        runs, learner, runs.agent("pair", frozen=True), evaluation={"problems": 2, "every": 1}
    )
    watcher = Watcher()
    result = run_locally(config, [watcher])
    assert result.updates == {"char": result.updates["char"], "pair": 0}
    assert result.updates["char"] > 0
    assert sum(phase[1:] == ("evaluate", "pair") for phase in watcher.phases) == 1
    assert result.accuracies[0]["pair"] == result.accuracies[3]["pair"]
    assert {
        one.rollout.policy_version
        for (_, name), all_ in watcher.rollouts.items()
        if name == "pair"
        for one in all_
    } == {0}
    # the frozen agent's rollouts do not depend on when the learner learns
    synchronous = runs(runs.agent("char"), runs.agent("pair", frozen=True))
    assert [watcher.rollouts[step, "pair"] for step in (1, 2, 3)] == [
        synchronous.watcher.rollouts[step, "pair"] for step in (1, 2, 3)
    ]
    resumed(Path(config.output), "steps=4")


def test_a_model_object_is_not_touched(tmp_path: Path) -> None:
    learner, teacher = char_agent(), pair_agent()
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    for parameter in teacher.model.parameters():
        parameter.requires_grad_(False)
    with HACRLTrainer(
        {
            "char": {"model": learner.model, "tokenizer": learner.tokenizer},
            "pair": {"model": teacher.model, "tokenizer": teacher.tokenizer, "frozen": True},
        },
        task="arithmetic",
        args=HACRLConfig(
            output=str(tmp_path / "run"),
            steps=2,
            rollout={"prompts_per_step": 4, "rollouts_per_prompt": 2, "max_new_tokens": 4},
            evaluation={"problems": 2},
            progress=False,
        ),
    ) as trainer:
        trainer.train()
        assert set(trainer.agents) == {"char", "pair"}
        assert set(trainer.save_model(tmp_path / "saved")) == {"char"}
    assert_same_weights(before, dict(teacher.model.state_dict()))


def test_its_weights_leave_a_shared_device_like_everybodys() -> None:
    move = transfers()
    residency = Residency(make_transfers=lambda _: move)
    agents = {name: char_agent(name) for name in ("teacher", "other")}
    for agent in agents.values():
        residency.add(agent, None, "weights")
    expected = {name: value.clone() for name, value in agents["teacher"].model.state_dict().items()}
    assert not residency.keeps_weights("teacher")
    residency.offload("teacher")
    weights = residency._residents["teacher"].weights
    assert weights is not None
    assert weights.is_offloaded
    residency.prepare_generation("teacher")
    residency.prepare_learning("teacher")  # nothing to do
    assert not weights.is_offloaded
    assert_same_weights(expected, dict(agents["teacher"].model.state_dict()))
    residency.prepare_generation("other")
    assert weights.is_offloaded
    residency.reload_all_weights()
    assert_same_weights(expected, dict(agents["teacher"].model.state_dict()))


def test_a_dry_run_counts_its_weights_and_its_cache_only(runs: Runs) -> None:
    plan = dry_run(runs.config("char", runs.agent("twin", frozen=True)))
    learning, frozen = (agent.footprint for agent in plan.agents)
    assert learning is not None
    assert frozen is not None
    assert (frozen.weights, frozen.cache, frozen.decoding) == (
        learning.weights,
        learning.cache,
        learning.decoding,
    )
    assert frozen.persistent == frozen.weights
    assert frozen.peak == frozen.weights + frozen.cache + frozen.decoding < learning.peak
    lines = list(dry_run_lines(plan))
    assert any(re.match(r"trained +all +none \(frozen\)$", line) for line in lines)
    assert "char trains on all agents' rollouts in 4 updates" in lines  # 2 agents, 2 updates per source


def test_the_worker_of_a_frozen_agent_has_no_learner(runs: Runs) -> None:
    with LocalRun(runs.config("char", runs.agent("pair", frozen=True))) as run:
        worker = run.trainer.executor.workers["pair"]  # type: ignore[attr-defined]
        assert isinstance(worker, FrozenWorker)
        assert not hasattr(worker, "learner")
        assert worker.tensors() == {}
