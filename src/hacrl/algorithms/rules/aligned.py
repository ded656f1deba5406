"""Trust by measured gradient alignment: theorem 4.3 of HACPO, arXiv 2603.02604, checked instead of assumed.

    C_k    = {k} and the partners that k trusts  (``algorithms/alignment.py``)
    mu_k   = P_k * sum_{j in C_k} m_j / sum_{j in C_k} P_j
    A_i^j  = (R(y_i^j) - mu_k) / sigma,   sigma over the rewards of C_k,   j in C_k
    J_hete = sg[min(s, 1 + eps_high) / s] * s * A     if A > 0 or s >= 1 - eps_low,    else 0

An agent learns from itself, as in GSPO, and from the partners that it trusts: those whose gradient has
pointed the way of its own in the last steps. Everything that a partner touches depends on trust: baseline,
deviation, samples, and the number of updates. So an agent that trusts nobody makes exactly GSPO's updates.

The band is open. A partner's right answer teaches however unlikely the learner finds it, with an importance
weight that is bounded above and carries no bound below; its wrong answer teaches only if the learner might
have written it. There is nothing to set for a pair of agents: the weight s itself measures how far they are
apart, and trust measures whether that matters. The baseline needs no clamp (``ratio_of_sums_baseline``).

Assumptions: the own gradient is a fair judge, so an agent must succeed now and then. One that has no gradient
of its own has nothing to lose, and counts a stronger partner as aligned.
"""

from __future__ import annotations

import torch

from hacrl.algorithms.advantage import (
    Advantages,
    CapabilityRatio,
    Normaliser,
    PromptRewards,
    is_uniform,
    joint_std,
    normalised_advantages,
    ratio_of_sums_baseline,
    zero_advantages,
)
from hacrl.algorithms.context import StepContext
from hacrl.algorithms.importance import sequence_ratio
from hacrl.algorithms.losses.surrogate import clipped_surrogate
from hacrl.algorithms.mismatch import sequence_weight
from hacrl.config.rules import AlignedSettings
from hacrl.types import LossBatch, LossTerms


def advantages(
    settings: AlignedSettings,
    normaliser: Normaliser,
    rewards: PromptRewards,
    learner: str,
    _: CapabilityRatio,
    context: StepContext = StepContext(),  # noqa: B008 - immutable
) -> Advantages:
    """Return the advantages of all responses.

    Those of a partner that is not trusted are as if it were: its gradient is measured with them.
    """
    circle = _circle(rewards, learner, context)
    found = dict(_within(circle, settings, normaliser, learner, context))
    for source, values in rewards.items():
        if source not in circle:
            found[source] = _within({**circle, source: values}, settings, normaliser, learner, context)[
                source
            ]
    return found


def baseline(
    settings: AlignedSettings,
    rewards: PromptRewards,
    learner: str,
    _: CapabilityRatio,
    context: StepContext = StepContext(),  # noqa: B008 - immutable
) -> float:
    """Return mu_k."""
    return _scaled_baseline(_circle(rewards, learner, context), settings, learner, context)


def _circle(rewards: PromptRewards, learner: str, context: StepContext) -> PromptRewards:
    """Return the rewards of the learner and of the partners that it trusts."""
    return {
        source: values for source, values in rewards.items() if source == learner or source in context.trusted
    }


def _scaled_baseline(
    circle: PromptRewards, settings: AlignedSettings, learner: str, context: StepContext
) -> float:
    mu = ratio_of_sums_baseline(circle, learner, context.capabilities, settings.min_reward)
    return settings.baseline_scale * mu


def _within(
    circle: PromptRewards,
    settings: AlignedSettings,
    normaliser: Normaliser,
    learner: str,
    context: StepContext,
) -> dict[str, tuple[float, ...]]:
    if is_uniform(circle):
        return zero_advantages(circle)
    mu = _scaled_baseline(circle, settings, learner, context)
    std = joint_std(circle, normaliser.unbiased)
    return {
        source: normalised_advantages(values, mu, std, normaliser.epsilon)
        for source, values in circle.items()
    }


def loss(batch: LossBatch, settings: AlignedSettings) -> LossTerms:
    """Return GSPO's loss of own responses, and minus J_hete of others'."""
    ratio_B = sequence_ratio(batch, settings.choices.ratio_length)
    own = clipped_surrogate(ratio_B, batch.advantages_B, settings.clip_low, settings.clip_high)
    # Own rows are set to 1: torch.where would multiply an overflow in the unused branch by 0, which is NaN.
    cross_B = ratio_B.masked_fill(batch.is_own_B, 1.0)
    fixed_B = cross_B.detach()
    is_far_B = (batch.advantages_B < 0) & (fixed_B < 1.0 - settings.clip_low) & ~batch.is_own_B
    truncated_B = cross_B * (fixed_B.clamp(max=1.0 + settings.clip_high) / fixed_B)
    objective_B = (truncated_B * batch.advantages_B).masked_fill(is_far_B, 0.0)
    weight = sequence_weight(batch)  # 1 for other agents' responses
    return LossTerms(
        loss_B=-weight.value * torch.where(batch.is_own_B, own.objective, objective_B),
        ratio_B=ratio_B.detach(),
        clipped_below_B=torch.where(batch.is_own_B, own.below, is_far_B).float(),
        clipped_above_B=(own.above & batch.is_own_B).float(),
        weight_B=weight.value,
        capped_B=weight.is_capped.float(),
    )
