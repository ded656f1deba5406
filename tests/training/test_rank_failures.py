"""What one rank alone meets, all ranks treat alike: memory, numbers, errors, death and silence."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hacrl.config.schema import AgentSettings
from hacrl.errors import TrainingError
from hacrl.models import lm_head
from hacrl.models.agent import Agent
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.types import LearnerSample
from tests.support.ranks import run_ranks
from tests.training.test_sharded_learning import folder, learner, samples, settings

__all__ = ["folder"]

TIMEOUT = 3.0  # seconds that a rank waits for another one


def break_memory(where: str, most: int) -> None:
    """Let memory run out in passes over more than so many tokens."""
    mlp, head = Qwen3MLP.forward, lm_head._chunk_logprobs

    def check(tokens: int, computes: bool) -> None:
        if computes and tokens > most:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")

    def small_mlp(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        tokens, again = hidden.shape[:-1].numel(), torch.is_grad_enabled()
        check(tokens, again if where == "backward" else where == "forward")
        return mlp(self, hidden)

    def small_head(layer: Any, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        check(len(hidden), where == "head")
        return head(layer, hidden, *rest)

    Qwen3MLP.forward, lm_head._chunk_logprobs = small_mlp, small_head


def learn_with_little_memory(
    group: RankGroup, agent: AgentSettings, given: list[LearnerSample], where: str, most: int
) -> dict[str, Any]:
    trainee = learner(ShardedAgent.load_shards(agent, "cpu", group), micro_batch_tokens=64)
    if group.rank == 1:
        break_memory(where, most)
    stats = trainee.learn(given, updates=1, seed=0)
    return {
        "notes": stats.notes,
        "retries": stats.oom_retries,
        "budget": trainee.state_dict()["micro_batch_tokens"],
        "losses": stats.losses,
        "tensors": trainee.optimizer.tensors(),
    }


@pytest.mark.parametrize(("where", "most"), [("forward", 20), ("head", 12), ("backward", 20)])
def test_memory_that_runs_out_on_one_rank_makes_all_ranks_use_less(
    folder: Path, where: str, most: int
) -> None:
    given = samples(folder)
    agent = settings(folder, gradient_checkpointing=where == "backward")
    leader, follower = run_ranks(learn_with_little_memory, 2, agent, given, where, most)
    trainee = learner(Agent.load(agent, "cpu"), micro_batch_tokens=64)
    expected = trainee.learn(given, updates=1, seed=0).losses

    assert leader["retries"] == follower["retries"] > 0
    assert leader["notes"] == follower["notes"]
    assert "did not fit into the memory" in leader["notes"][0]
    assert leader["budget"] == follower["budget"] < 64
    assert leader["losses"] == pytest.approx(expected, abs=1e-5)
    for name, tensor in trainee.optimizer.tensors().items():
        assert torch.allclose(leader["tensors"][name], tensor, atol=2e-4), name


def learn_with_nan(
    group: RankGroup, agent: AgentSettings, given: list[LearnerSample]
) -> tuple[int, list[str], bool]:
    sharded = ShardedAgent.load_shards(agent, "cpu", group)
    trainee = learner(sharded)
    before = trainee.optimizer.tensors()
    if group.rank == 1:
        mlp = Qwen3MLP.forward
        Qwen3MLP.forward = lambda self, hidden: mlp(self, hidden) * float("nan")
    stats = trainee.learn(given, updates=1, seed=0)
    after = trainee.optimizer.tensors()
    return stats.bad_updates, stats.notes, all(torch.equal(before[name], after[name]) for name in before)


def test_all_ranks_leave_out_an_update_that_is_not_finite_on_one(folder: Path) -> None:
    leader, follower = run_ranks(learn_with_nan, 2, settings(folder), samples(folder))
    assert leader == follower
    bad_updates, notes, unchanged = leader
    assert bad_updates == 1
    assert "are not finite: the update was left out, the weights were not changed" in notes[0]
    assert unchanged


def learn_until_a_rank_fails(
    group: RankGroup, agent: AgentSettings, given: list[LearnerSample], how: str
) -> float:
    trainee = learner(ShardedAgent.load_shards(agent, "cpu", group))
    trainee.learn(given, updates=1, seed=0)
    if group.rank == 1:
        mlp = Qwen3MLP.forward

        def fail(self: Any, hidden: torch.Tensor) -> torch.Tensor:
            if how == "dies":
                os._exit(9)
            if how == "hangs":
                time.sleep(600)
            if how == "raises":
                raise ValueError("a layer of rank 1 is broken")
            return mlp(self, hidden)

        Qwen3MLP.forward = fail
    started = time.monotonic()
    with pytest.raises(TrainingError) as caught:
        trainee.learn(given, updates=1, seed=1)
    with pytest.raises(TrainingError, match="rank 0 of 2 cannot go on"):  # without waiting again
        trainee.optimizer.tensors()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dies", "rank 0 of 2 cannot go on: another rank is gone"),
        ("hangs", "rank 0 of 2 cannot go on: another rank did not answer in time"),
        ("raises", "rank 0 of 2 cannot go on: rank 1 failed: ValueError: a layer of rank 1 is broken"),
    ],
)
def test_a_lost_rank_ends_the_others_with_a_sentence(folder: Path, how: str, message: str) -> None:
    given = settings(folder), samples(folder), how
    ((found, seconds),) = run_ranks(learn_until_a_rank_fails, 2, *given, timeout=TIMEOUT, answers=1)
    assert message in found
    assert "hacrl resume" in found
    assert seconds < 10 * TIMEOUT
