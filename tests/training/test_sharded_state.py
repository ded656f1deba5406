"""What leaves a sharded agent: checkpoints for any number of ranks, plain folders, weights of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.config.schema import AgentSettings, FsdpSettings, LoraSettings
from hacrl.engines.vllm.weight_transfer import exported_weights
from hacrl.models.agent import Agent
from hacrl.models.logprobs import checking_pass, response_logprobs
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.models.sharding import copy_weights, whole_model
from hacrl.types import LearnerSample, Sampling
from tests.support.ranks import run_ranks
from tests.support.tiny import absolute_agent
from tests.training.test_sharded_learning import folder, learner, samples, settings

__all__ = ["folder"]

PAIRS = [((4, 21), (10, 1)), ((16, 5, 6), (4, 13, 12))]
Tensors = dict[str, torch.Tensor]


def logprobs(agent: Agent, model: Any) -> torch.Tensor:
    with checking_pass(model, PAIRS, Sampling(8)):
        return response_logprobs(model, PAIRS, Sampling(8), torch.device("cpu"))[0].clone()


def three_updates_then_leave(
    group: RankGroup, agent: AgentSettings, given: list[LearnerSample], out: Path
) -> dict[str, Any]:
    """Learn, then take the state in every form in which it leaves the ranks; learn on."""
    sharded = ShardedAgent.load_shards(agent, "cpu", group)
    trainee = learner(sharded, max_grad_norm=1.0)
    trainee.learn(given, updates=3, seed=0)
    tensors = trainee.optimizer.tensors()
    streamed = b"".join(map(bytes, trainee.optimizer.tensor_stream().file()))
    values = trainee.optimizer.tensor_stream().values()
    next(values)
    if group.rank:  # rank 0 stops reading, as after an error; the others go on to the end
        list(values)
    values.close()
    exported = {name: weight.clone() for name, weight in exported_weights(sharded.model)}
    whole = whole_model(sharded.model, torch.device("cpu")) if group.rank == 0 else None
    copy_weights(sharded.model, whole)
    sharded.save(out / f"rank{group.rank}")
    found = {
        "tensors": tensors,
        "streamed": streamed,
        "exported": exported,
        "logprobs": logprobs(sharded, sharded.model),
        "copied": None if whole is None else logprobs(sharded, whole),
    }
    trainee.learn(given, updates=3, seed=1)
    return {**found, "later": trainee.optimizer.tensors()}


def resume(
    group: RankGroup, agent: AgentSettings, given: list[LearnerSample], tensors: Tensors
) -> dict[str, Any]:
    """Continue from a checkpoint as a rank; also return the state as it was loaded."""
    trainee = learner(ShardedAgent.load_shards(agent, "cpu", group), max_grad_norm=1.0)
    trainee.optimizer.load_tensors(tensors if group.rank == 0 else {})
    loaded = trainee.optimizer.tensors()
    trainee.learn(given, updates=3, seed=1)
    return {"loaded": loaded, "later": trainee.optimizer.tensors()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_close(found: Tensors, expected: Tensors, tolerance: float = 2e-4) -> None:
    assert found.keys() == expected.keys()
    assert [n for n in found if not torch.allclose(found[n], expected[n], atol=tolerance)] == []


@pytest.mark.parametrize("adapted", [False, True])
def test_the_state_of_two_ranks_goes_on_in_one_process_and_in_three_ranks(
    folder: Path, tmp_path: Path, adapted: bool
) -> None:
    given = samples(folder)
    lora = LoraSettings(rank=3, alpha=6.0) if adapted else None  # three ranks have uneven shards of it
    agent = settings(folder, lora=lora)
    two, other = run_ranks(three_updates_then_leave, 2, agent, given, tmp_path)

    alone = Agent.load(agent, "cpu")
    trainee = learner(alone, max_grad_norm=1.0)
    trainee.learn(given, updates=3, seed=0)
    assert_close(two["tensors"], trainee.optimizer.tensors())  # the same names, shapes and numbers
    trainee.optimizer.load_tensors(two["tensors"])
    assert_equal(trainee.optimizer.tensors(), two["tensors"])
    assert two["streamed"] == b"".join(map(bytes, trainee.optimizer.tensor_stream().file()))

    # the engine's copy and the saved folder are the policy that the ranks compute with
    expected = logprobs(alone, alone.model)
    assert torch.allclose(two["logprobs"], expected, atol=1e-5)
    assert torch.equal(two["logprobs"], other["logprobs"])
    assert torch.equal(two["copied"], expected)
    exported = {name: weight.clone() for name, weight in exported_weights(alone.model)}
    assert_equal(two["exported"], exported)
    saved = Agent.load(settings(tmp_path / "rank0"), "cpu")
    assert torch.allclose(logprobs(saved, saved.model), expected, atol=1e-5)
    assert not (tmp_path / "rank1").exists()  # rank 0 alone writes

    trainee.learn(given, updates=3, seed=1)
    assert_close(two["later"], trainee.optimizer.tensors())
    three = run_ranks(resume, 3, agent, given, two["tensors"])[0]
    assert_equal(three["loaded"], two["tensors"])
    assert_close(three["later"], two["later"])


def test_the_state_of_one_process_goes_on_in_two_ranks_with_tied_weights_offloaded(tmp_path: Path) -> None:
    absolute_agent().save(tmp_path / "gpt2")
    agent = settings(tmp_path / "gpt2", fsdp=FsdpSettings(cpu_offload=True))
    alone = Agent.load(agent, "cpu")
    assert alone.model.get_output_embeddings().weight is alone.model.get_input_embeddings().weight
    given = [
        LearnerSample((5, 6, 7), (8, 9, 10 + n), (-1.0, -2.0, -0.5), -3.5, 3, "big", True, 1.0 - n)
        for n in range(4)
    ]
    trainee = learner(alone, max_grad_norm=1.0)
    trainee.learn(given, updates=2, seed=0)
    before = {name: tensor.clone() for name, tensor in trainee.optimizer.tensors().items()}
    two = run_ranks(resume, 2, agent, given, before)[0]
    assert_equal(two["loaded"], before)
    trainee.learn(given, updates=3, seed=1)
    assert_close(two["later"], trainee.optimizer.tensors())
