"""Two ranks learn what one process learns: the same losses, norms and weights, up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, HacpoSettings, LearningSettings, LoraSettings
from hacrl.models.agent import Agent
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample
from tests.support.ranks import run_ranks
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, sample

STEPS = 10
METHOD = HacpoSettings(kl_coefficient=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "char"
    sharpened(char_agent(), 10.0).save(path)
    return path


def settings(folder: Path, **changes: Any) -> AgentSettings:
    return AgentSettings(name="big", model=str(folder), **changes)


def samples(folder: Path) -> list[LearnerSample]:
    agent = Agent.load(settings(folder), "cpu")
    ratios = [1.0, 1.2, 0.9, 1.05, 0.95, 1.1, 1.0, 0.8, 1.3]
    advantages = [1.0, 2.0, -1.0, -1.5, 0.5, -0.5, 1.0, -1.0, 0.0]
    which = [0, 1, 2, 3, 3, 0, 4, 1, 5]
    return [
        sample(agent, number, ratio, advantage, own=index % 3 != 2)
        for index, (number, ratio, advantage) in enumerate(zip(which, ratios, advantages, strict=True))
    ]


def learner(agent: Agent, **changes: Any) -> Learner:
    given = {"lr": 1e-2, "micro_batch_tokens": 40, "compile": False, "max_grad_norm": 0.5, **changes}
    return Learner(agent, make_method(METHOD), LearningSettings(**given), SAMPLING, exact_sampler=False)


def ten_steps(learner: Learner, given: list[LearnerSample]) -> dict[str, Any]:
    losses, norms, ratios = [], [], []
    for step in range(STEPS):
        stats = learner.learn(given, updates=2, seed=step)
        losses += stats.losses
        norms += stats.grad_norms
        ratios.append(sorted(ratio for source in stats.sources.values() for ratio in source.ratios))
    weights = learner.optimizer.tensors()
    return {"losses": losses, "norms": norms, "ratios": ratios, "tensors": weights}


def learn_as_rank(group: RankGroup, agent: AgentSettings, given: list[LearnerSample]) -> dict[str, Any]:
    return ten_steps(learner(ShardedAgent.load_shards(agent, "cpu", group)), given)


VARIANTS = {
    "full": {},
    "lora": {"lora": LoraSettings(rank=4, alpha=8.0)},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_learn_what_one_process_learns(folder: Path, variant: str) -> None:
    given = samples(folder)
    agent = settings(folder, **VARIANTS[variant])
    expected = ten_steps(learner(Agent.load(agent, "cpu")), given)
    found, follower = run_ranks(learn_as_rank, 2, agent, given)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert max(expected["norms"]) > 0.5  # so that gradients are clipped
    for one, other in zip(found["ratios"], expected["ratios"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert follower["losses"] == found["losses"]  # every rank knows all numbers
    assert follower["tensors"] == {}
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.allclose(found["tensors"][name], tensor, atol=2e-4), name
