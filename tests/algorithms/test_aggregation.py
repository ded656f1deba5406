"""The losses of DAPO and Dr. GRPO: by hand, and against TRL's GRPOTrainer on the same batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hacrl.algorithms.methods import make_method
from hacrl.algorithms.overlong import overlong_penalty
from hacrl.config.schema import GrpoSettings, GspoSettings, HacpoSettings, NaiveSettings
from hacrl.types import LossBatch

from .batches import Row, loss_and_gradient, make_batch, row_with_ratio
from .test_losses import WIDE, tokens_with_ratios

LONGEST = 8


def lengths(batch: LossBatch, mean_tokens: float) -> LossBatch:
    return replace(batch, mean_tokens=mean_tokens, max_tokens=LONGEST)


def five_tokens() -> LossBatch:
    """Three tokens with A = 2 and two with A = -1; clipped sums of r A: 6.16 and -1.9 (test_losses.py)."""
    rows = [tokens_with_ratios([0.7, 1.1, 1.5], 2.0), tokens_with_ratios([0.7, 1.1], -1.0)]
    return lengths(make_batch(rows), mean_tokens=2.5)


@pytest.mark.parametrize(
    ("aggregation", "divisors"),
    [("response", (3.0, 2.0)), ("token", (2.5, 2.5)), ("constant", (8.0, 8.0))],
)
def test_grpo_divides_sums_over_tokens(aggregation, divisors) -> None:
    batch = five_tokens()
    terms = make_method(GrpoSettings(aggregation=aggregation)).loss(batch)
    loss, gradient = loss_and_gradient(batch, terms)
    first, second = divisors
    assert loss == pytest.approx([-6.16 / first, 1.9 / second], rel=1e-12)
    assert gradient[0] == pytest.approx([-1.4 / first, -2.2 / first, 0.0], rel=1e-12)
    assert gradient[1] == pytest.approx([0.0, 1.1 / second, 0.0], rel=1e-12)
    # statistics are shares of a response, however its loss is weighed
    assert terms.clipped_below_B.tolist() == pytest.approx([0, 1 / 2])  # 0.7 with a negative advantage
    assert terms.clipped_above_B.tolist() == pytest.approx([1 / 3, 0])  # 1.5 with a positive one
    assert terms.weight_B.tolist() == [1.0, 1.0]
    if aggregation == "token":  # the mean over the mini-batch is the sum over its 5 tokens / 5
        assert terms.loss_B.mean().item() == pytest.approx((-6.16 + 1.9) / 5)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("response", (1, 1)), ("token", (4 / 3, 2 / 3)), ("constant", (4 / 8, 2 / 8))],
)
def test_gspo_counts_a_response_once_or_once_a_token(aggregation, weights) -> None:
    # s A = 1.1 * 2 over 4 tokens and 0.9 * -1 over 2; the mean length is 3
    rows = [row_with_ratio(1.1, 2.0, own=True, tokens=4), row_with_ratio(0.9, -1.0, own=True, tokens=2)]
    batch = lengths(make_batch(rows), mean_tokens=3.0)
    terms = make_method(GspoSettings(**WIDE, aggregation=aggregation)).loss(batch)
    loss, gradient = loss_and_gradient(batch, terms)
    first, second = weights
    assert loss == pytest.approx([-2.2 * first, 0.9 * second], rel=1e-12)
    assert gradient[0] == pytest.approx([-2.2 * first / 4] * 4, rel=1e-12)
    assert gradient[1] == pytest.approx([0.9 * second / 2] * 2 + [0.0, 0.0], rel=1e-12)


@pytest.mark.parametrize(("aggregation", "divisor"), [("response", 2.0), ("token", 3.0), ("constant", 8.0)])
@pytest.mark.parametrize("kind", [GrpoSettings, GspoSettings])
def test_the_kl_penalty_is_aggregated_like_the_loss(kind, aggregation, divisor) -> None:
    # r = pi_ref / pi = e^0.5 for both tokens: k3 = e^0.5 - 0.5 - 1, summed over 2 tokens
    row = Row([-1.0, -2.0], [-1.0, -2.0], 0.0, own=True, reference=[-0.5, -1.5])
    batch = lengths(make_batch([row]), mean_tokens=3.0)
    terms = make_method(kind(aggregation=aggregation, kl_coefficient=0.1)).loss(batch)
    assert terms.loss_B.item() == pytest.approx(0.1 * 2 * (1.6487212707001282 - 1.5) / divisor)


@pytest.mark.parametrize("settings", [NaiveSettings(**WIDE), HacpoSettings(**WIDE)])
def test_methods_that_share_rollouts_count_every_response_once(settings) -> None:
    batch = five_tokens()
    plain = replace(batch, mean_tokens=None, max_tokens=None)
    method = make_method(settings)
    assert method.loss(batch).loss_B.tolist() == method.loss(plain).loss_B.tolist()


@pytest.mark.parametrize("kind", [GrpoSettings, GspoSettings])
def test_without_the_deviation_an_advantage_is_the_distance_from_the_mean(kind) -> None:
    rewards = {"ada": (1.0, 0.0, 0.0, 0.0), "bob": (1.0, 1.0, 1.0, 1.0)}
    dr_grpo = make_method(kind(divide_by_std=False)).advantages(rewards, "ada", lambda *_: 1.0)
    assert dr_grpo == {"ada": (0.75, -0.25, -0.25, -0.25)}  # ada's own mean is 1/4
    assert make_method(kind(divide_by_std=False)).advantages(rewards, "bob", lambda *_: 1.0) == {
        "bob": (0.0,) * 4
    }
    # squares .5625 + 3 * .0625 = .75, unbiased variance .25, deviation .5 (+ 1e-6)
    grpo = make_method(kind()).advantages(rewards, "ada", lambda *_: 1.0)
    assert grpo["ada"] == pytest.approx((1.5, -0.5, -0.5, -0.5), rel=1e-5)


def test_equal_rewards_teach_nothing_without_the_deviation_either() -> None:
    rewards = {"ada": (0.1, 0.1, 0.1)}  # their mean is not 0.1 in floating point if it is summed naively
    method = make_method(GrpoSettings(divide_by_std=False))
    assert method.advantages(rewards, "ada", lambda *_: 1.0) == {"ada": (0.0, 0.0, 0.0)}


def test_the_overlong_penalty_by_hand_and_as_trl_has_it() -> None:
    trl = pytest.importorskip("trl.rewards").get_soft_overlong_punishment(20, 4)
    # 16 of 20 tokens cost nothing; then a quarter of a reward for each token of the buffer of 4
    expected = {1: 0.0, 16: 0.0, 17: -0.25, 18: -0.5, 19: -0.75, 20: -1.0}
    assert {length: overlong_penalty(length, 20, 4) for length in expected} == expected
    assert trl(completion_ids=[[0] * length for length in expected]) == list(expected.values())
    assert overlong_penalty(20, 20, 0) == 0.0


# TRL's own code, on tensors of ours


def trl_loss(
    parts: list[LossBatch], logprobs: list[Tensor], loss_type: str, level: str, clip: tuple[float, float]
) -> Tensor:
    """Return the sum of the losses of micro-batches, as GRPOTrainer computes and accumulates them."""
    trainer_type = pytest.importorskip("trl").GRPOTrainer
    windows = iter(logprobs)
    args = SimpleNamespace(
        delta=None,
        steps_per_generation=len(parts),
        use_bias_correction_kl=False,
        off_policy_mask_threshold=None,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (next(windows), torch.zeros(1, 1), None),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=SimpleNamespace(training=True),
        args=args,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=len(parts),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    everything = sum(part.mask_BT.sum() for part in parts)
    losses = [
        trainer_type._compute_loss(
            trainer,
            None,
            {
                "prompt_ids": torch.zeros(len(part.mask_BT), 1),
                "prompt_mask": torch.ones(len(part.mask_BT), 1),
                "completion_ids": torch.zeros_like(part.logprobs_BT),
                "completion_mask": part.mask_BT.to(part.logprobs_BT.dtype),
                "advantages": part.advantages_B,
                "old_per_token_logps": part.behaviour_logprobs_BT,
                "num_items_in_batch": everything,
            },
        )
        for part in parts
    ]
    return sum(losses, torch.tensor(0.0))


def rows_of(batch: LossBatch, chosen: slice) -> LossBatch:
    fields = ("logprobs_BT", "mask_BT", "behaviour_logprobs_BT", "behaviour_logprob_B", "source_length_B")
    more = ("advantages_B", "is_own_B")
    return replace(batch, **{name: getattr(batch, name)[chosen] for name in (*fields, *more)})


@pytest.mark.parametrize(
    ("trls", "ours", "micro_batches"),
    [
        *[
            (*names, n)
            for names in (("grpo", "response"), ("dapo", "token"), ("dr_grpo", "constant"))
            for n in (1, 2)
        ],
        ("bnpo", "token", 1),  # averages over each micro-batch on its own: with several it is another loss
    ],
)
@pytest.mark.parametrize(("level", "kind"), [("token", GrpoSettings), ("sequence", GspoSettings)])
def test_loss_and_gradient_are_those_of_trls_grpo_trainer(trls, ours, micro_batches, level, kind) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length, advantage in ((1, 1.3), (5, -0.7), (3, 0.0), (8, 0.4), (2, -1.1), (6, 2.0)):
        old = -torch.rand(length, generator=generator, dtype=torch.float64)
        moved = old + 0.4 * torch.randn(length, generator=generator, dtype=torch.float64)
        rows.append(Row(moved.tolist(), old.tolist(), advantage, own=True))
    padding = {"logprobs": 0.0, "behaviour": 0.0, "reference": 0.0}
    batch = lengths(make_batch(rows, padding=padding), mean_tokens=25 / 6)  # 1 + 5 + 3 + 8 + 2 + 6 = 25
    terms = make_method(kind(aggregation=ours, clip_low=0.2, clip_high=0.28)).loss(batch)
    loss = terms.loss_B.mean()
    size = len(rows) // micro_batches
    parts = [rows_of(batch, slice(start, start + size)) for start in range(0, len(rows), size)]
    theirs = trl_loss(parts, [part.logprobs_BT for part in parts], trls, level, (0.2, 0.28))
    assert 0 < (terms.clipped_below_B + terms.clipped_above_B).sum() < len(rows)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-12)
    (mine,) = torch.autograd.grad(loss, batch.logprobs_BT, retain_graph=True)
    (other,) = torch.autograd.grad(theirs, batch.logprobs_BT)
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-15)
