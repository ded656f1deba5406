"""Optimizers and weights of agents that share a device are offloaded by turns; here the device is the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, LearningSettings, OffloadLevel
from hacrl.errors import TrainingError
from hacrl.memory.residency import Residency
from hacrl.models.agent import Agent
from hacrl.training.gradients import OffloadedGradientSums
from hacrl.training.learner import Learner
from tests.support.faults import out_of_memory
from tests.support.late_transfers import LateTransfers
from tests.support.tiny import char_agent
from tests.training.handmade import SAMPLING, largest_difference, sample, weights
from tests.training.small_optimizers import HALF, assert_equal, transfers


@pytest.fixture(autouse=True)
def _rows_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is made to run out by the size of padded rows."""
    monkeypatch.setattr("hacrl.models.logprobs.MAX_PACKED_SHARE", 0.0)


def learner(agent: Agent) -> Learner:
    method = make_method(GspoSettings(clip_low=0.5, clip_high=0.5))
    return Learner(agent, method, LearningSettings(lr=1e-2, micro_batch_tokens=128), SAMPLING)


def half_agent(name: str) -> Agent:
    agent = char_agent(name)
    agent.model.to(HALF)
    return agent


class Shared:
    """Agents in bfloat16 that share a device and have learnt once, so that there are moments."""

    def __init__(self, level: OffloadLevel, names: Sequence[str] = ("ada", "bob")) -> None:
        self.move = transfers()
        self.residency = Residency(make_transfers=lambda _: self.move)
        self.learners = {name: learner(half_agent(name)) for name in names}
        self.count = sum(p.numel() for p in self.learners["ada"].agent.model.parameters())
        self.samples = [sample(self.learners["ada"].agent, i, 0.95, 1.0) for i in range(4)]
        for one in self.learners.values():
            one.learn(self.samples, 1, seed=0)
            self.residency.add(one.agent, one, level)

    def learn(self, name: str) -> None:
        self.residency.prepare_learning(name)
        self.learners[name].learn(self.samples, 2, seed=1)

    @property
    def offloaded_per_parameter(self) -> float:
        return self.move.away / self.count


def test_optimizers_are_offloaded_unless_their_agent_learns() -> None:
    shared = Shared("optimizer")
    assert shared.offloaded_per_parameter == 0
    shared.residency.prepare_generation("ada")
    assert shared.offloaded_per_parameter == 2 * 12  # a master and two moments, float32
    shared.residency.prepare_generation("bob")
    assert shared.offloaded_per_parameter == 2 * 12
    shared.residency.prepare_learning("ada")
    assert shared.offloaded_per_parameter == 12
    shared.residency.prepare_learning("bob")
    assert shared.offloaded_per_parameter == 12
    shared.residency.reload_all_weights()
    assert shared.offloaded_per_parameter == 12  # optimizers stay offloaded


def test_weights_of_idle_agents_are_offloaded_if_the_level_says_so() -> None:
    shared = Shared("weights", ("ada", "bob", "cyd"))
    shared.residency.prepare_generation("ada")
    assert shared.offloaded_per_parameter == 3 * 12 + 2 * 2
    shared.residency.prepare_learning("bob")
    assert shared.offloaded_per_parameter == 3 * 12 + 2 * 2  # the optimizer streams during the update only
    shared.learn("bob")
    assert shared.offloaded_per_parameter == 3 * 12 + 2 * 2
    shared.residency.offload("bob")
    assert shared.offloaded_per_parameter == 3 * 12 + 3 * 2
    shared.residency.reload_all_weights()
    assert shared.offloaded_per_parameter == 3 * 12
    for one in shared.learners.values():
        assert all(parameter.isfinite().all() for parameter in one.agent.model.parameters())


def test_agents_that_were_not_added_and_other_devices_are_left_alone() -> None:
    moves: list[LateTransfers] = []

    def fresh(_: torch.device) -> LateTransfers:
        moves.append(transfers())
        return moves[-1]

    residency = Residency(make_transfers=fresh)
    ada, bob = learner(half_agent("ada")), learner(half_agent("bob"))
    residency.add(ada.agent, ada, "never")
    residency.prepare_generation("ada")
    assert moves == []
    residency.add(ada.agent, ada, "weights")
    elsewhere = type("Elsewhere", (Agent,), {"device": torch.device("meta")})
    bob.agent.__class__ = elsewhere  # as on another device
    residency.add(bob.agent, bob, "weights")
    residency.offload("bob")
    before = moves[1].away
    residency.prepare_learning("ada")
    assert moves[0].away == 4 * sum(p.numel() for p in ada.agent.model.parameters())  # her masters
    assert moves[1].away == before > 0


def test_a_streaming_optimizer_is_on_the_device_only_for_the_update() -> None:
    shared = Shared("stream")
    shared.residency.prepare_generation("ada")
    assert shared.offloaded_per_parameter == 2 * 12
    shared.residency.prepare_learning("ada")
    assert shared.offloaded_per_parameter == 2 * 12
    seen = []
    (piece,) = shared.learners["ada"].optimizer.blocks
    hook = piece.adamw.register_step_pre_hook(lambda *_: seen.append(shared.offloaded_per_parameter))
    shared.learn("ada")
    hook.remove()
    assert seen == [12, 12]  # two updates
    assert shared.offloaded_per_parameter == 2 * 12


@pytest.mark.parametrize("level", ["optimizer", "stream", "weights", "all"])
def test_agents_that_take_turns_learn_the_same(level: OffloadLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hacrl.training.gradients.MIN_OFFLOAD_BYTES", 100)  # bytes, so that some travel
    apart, shared = Shared("never"), Shared(level)
    for one in shared.learners.values():
        assert isinstance(one.optimizer._sums, OffloadedGradientSums) == (level == "all")
    for name in ("ada", "bob", "bob", "ada"):
        apart.learn(name)
        shared.learn(name)
        shared.residency.prepare_generation(name)
    shared.residency.reload_all_weights()
    for name, one in shared.learners.items():
        assert_equal(weights(one.agent), weights(apart.learners[name].agent))
        assert_equal(one.optimizer.tensors(), apart.learners[name].optimizer.tensors())
    start = Shared("never").learners["ada"].agent
    assert largest_difference(weights(shared.learners["ada"].agent), weights(start)) > 1e-2


def test_memory_that_runs_out_in_learning_costs_the_same_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples have 16, 10, 5 and 4 tokens; only one or two of them fit at once."""
    monkeypatch.setattr("hacrl.training.gradients.MIN_OFFLOAD_BYTES", 100)  # bytes, so that some travel
    found = []
    for shared in (Shared("never"), Shared("all")):
        shared.residency.prepare_generation("ada")
        shared.residency.prepare_learning("bob")
        bob = shared.learners["bob"]
        with out_of_memory(bob.agent.model, lambda ids: ids.numel() > 20) as failed:
            stats = bob.learn(shared.samples, 1, seed=1)
        assert (stats.oom_retries, stats.updates) == (len(failed), 1)
        assert failed
        shared.residency.offload("bob")
        shared.residency.reload_all_weights()
        found.append((bob.optimizer.tensors(), weights(bob.agent), bob.state_dict()))
    (one, its_weights, state), (other, other_weights, other_state) = found
    assert_equal(one, other)
    assert_equal(its_weights, other_weights)
    assert state == other_state


def test_an_optimizer_that_cannot_be_reloaded_gives_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = Shared("optimizer")
    shared.residency.prepare_generation("ada")

    def full(*_, **__) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", full)
        with pytest.raises(TrainingError, match=r"agent 'ada': its optimizer did not fit .*offload=stream"):
            shared.residency.prepare_learning("ada")
    shared.learn("ada")  # the optimizer's tensors are still there


def test_an_agent_can_be_saved_while_its_weights_are_offloaded(tmp_path: Path) -> None:
    """As a callback may do. Host buffers of weights share memory, as tied weights do."""
    shared = Shared("all")
    expected = weights(shared.learners["ada"].agent)
    shared.residency.offload("ada")
    shared.learners["ada"].agent.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert len(saved) == len(expected)
    assert_equal(saved, expected)
