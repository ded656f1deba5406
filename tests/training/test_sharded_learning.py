"""Two ranks learn what one process learns: the same losses, norms and weights, up to rounding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, AlignedSettings, HacpoSettings, LearningSettings, LoraSettings
from hacrl.models import logprobs
from hacrl.models.agent import Agent
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.training.learner import Learner
from hacrl.training.rank_shares import RankShares
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
    losses, norms, ratios, first_uses = [], [], [], 0
    for step in range(STEPS):
        stats = learner.learn(given, updates=2, seed=step)
        losses += stats.losses
        norms += stats.grad_norms
        ratios.append(sorted(ratio for source in stats.sources.values() for ratio in source.ratios))
        first_uses += len(stats.first_uses)
    return {
        "losses": losses,
        "norms": norms,
        "ratios": ratios,
        "first_uses": first_uses,
        "tensors": learner.optimizer.tensors(),
    }


def pack_sequences() -> None:
    """Pack all sequences into one row, with each shared prompt once: what a GPU does."""
    logprobs.has_fused_attention = lambda model: True
    logprobs.has_tree_attention = lambda model: True


def learn_as_rank(
    group: RankGroup, agent: AgentSettings, given: list[LearnerSample], packed: bool, lr: float
) -> dict[str, Any]:
    if packed:
        pack_sequences()
    return ten_steps(learner(ShardedAgent.load_shards(agent, "cpu", group), lr=lr), given)


@dataclass(frozen=True)
class Variant:
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    lr: float = 1e-2
    losses: float = 1e-5  # largest absolute difference
    norms: float = 1e-4  # largest relative difference
    ratios: float = 1e-4
    weights: float = 2e-4  # and moments


VARIANTS = {
    "full": Variant(),
    "lora": Variant({"lora": LoraSettings(rank=4, alpha=8.0)}),
    "packed-checkpointing": Variant({"gradient_checkpointing": True}, packed=True),
    # a log-probability is rounded by 0.01 or so; AdamW moves a weight with next to no gradient either way
    "bfloat16": Variant({"precision": "bfloat16"}, lr=1e-3, losses=0.03, norms=0.1, ratios=0.1, weights=0.02),
}


def measure_as_rank(group: RankGroup, agent: AgentSettings, given: list[LearnerSample]) -> list[list[float]]:
    return measured(ShardedAgent.load_shards(agent, "cpu", group), given)


def measured(agent: Agent, given: list[LearnerSample]) -> list[list[float]]:
    """Cosines of a source that is trained on and of one that has probes, in two steps."""
    method = AlignedSettings(clip_low=0.2, clip_high=0.3)
    settings = LearningSettings(lr=1e-2, micro_batch_tokens=40, compile=False)
    learner = Learner(agent, make_method(method), settings, SAMPLING)
    probes = [replace(one, source="probed", is_probe=True, advantage=2.0) for one in given if not one.is_own]
    return [
        [found.cosine for _, found in sorted(learner.learn([*given, *probes], 2, seed).alignments.items())]
        for seed in range(2)
    ]


def test_two_ranks_measure_the_alignment_that_one_process_measures(folder: Path) -> None:
    given, agent = samples(folder), settings(folder)
    expected = measured(Agent.load(agent, "cpu"), given)
    found, follower = run_ranks(measure_as_rank, 2, agent, given)
    assert found == follower  # or the ranks would not agree on what to train on
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert max(abs(cosine) for row in expected for cosine in row) > 0.05


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_learn_what_one_process_learns(folder: Path, name: str) -> None:
    variant, given = VARIANTS[name], samples(folder)
    agent = settings(folder, **variant.settings)
    expected = ten_steps(learner(Agent.load(agent, "cpu"), lr=variant.lr), given)
    found, follower = run_ranks(learn_as_rank, 2, agent, given, variant.packed, variant.lr)
    assert found["losses"] == pytest.approx(expected["losses"], abs=variant.losses)
    assert found["norms"] == pytest.approx(expected["norms"], rel=variant.norms)
    assert max(expected["norms"]) > 0.5  # so that gradients are clipped
    for one, other in zip(found["ratios"], expected["ratios"], strict=True):
        assert one == pytest.approx(other, abs=variant.ratios)
    assert follower["losses"] == found["losses"]  # every rank knows all numbers
    assert follower["first_uses"] == found["first_uses"] == expected["first_uses"] > 0
    assert follower["tensors"] == {}
    assert found["tensors"].keys() == expected["tensors"].keys()
    for key, tensor in expected["tensors"].items():
        assert found["tensors"][key].dtype == tensor.dtype == torch.float32
        assert torch.allclose(found["tensors"][key], tensor, atol=variant.weights), key


def divide(world: int, packed: bool, *lengths: tuple[int, int]) -> list[list[int]]:
    """Return the numbers of the samples of each rank, for samples of a prompt and a response length."""
    made = [
        LearnerSample((prompt,) * prompt, (1,) * response, None, 0.0, response, "big", True, 1.0)
        for prompt, response in lengths
    ]
    shares = RankShares(world).divide(made, packed)
    return [[next(i for i, one in enumerate(made) if one is sample) for sample in share] for share in shares]


def test_ranks_get_about_as_many_tokens() -> None:
    # the longest first, to the rank with the fewest: 9 | 7; 9 | 7 + 5; 9 + 4 | 12; 13 | 12 + 2
    assert divide(2, False, (1, 8), (1, 6), (1, 4), (1, 3), (1, 1)) == [[0, 3], [1, 2, 4]]
    # a prompt of 3 with responses of 2 and 2 is 7 tokens in one piece, if that is at most half of 14
    assert divide(2, True, (3, 2), (4, 3), (3, 2)) == [[0, 2], [1]]
    # 10 + 4 x 5 = 30 of 34 tokens are more than half: pieces of at most 17 tokens have one response each
    assert divide(2, True, (10, 5), (10, 5), (10, 5), (10, 5), (1, 3)) == [[0, 2, 4], [1, 3]]


def test_a_sample_that_comes_again_stays_with_its_rank() -> None:
    made = [LearnerSample((4,), (1,) * length, None, 0.0, length, "big", True, 1.0) for length in (9, 5, 3)]
    shares = RankShares(2)
    assert shares.divide(made, packed=False) == [[made[0]], [made[1], made[2]]]
    assert shares.divide(made[1:], packed=False) == [[], [made[1], made[2]]]
