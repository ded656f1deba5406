"""Success-gated transfer of Mutual RL, arXiv 2605.07244: learn a partner's success where one has none.

    J_hete = lambda * (1/|y|) log pi_k(y)    for every verified success y of a partner,
                                             on prompts to which all own responses fail

The gradient is a score direction towards a verified success, without an importance ratio: it needs no
log-probabilities of the source, and no ratio can discard the response. Everywhere else the learner is alone.

Assumptions: the verifier can be believed, and the learner can follow a partner's way to an answer.

Our reading. The paper calls the prompts a rescue set and the loss a score direction. We take a response for
a success if it has the highest reward there can be (any above the lowest, where the highest is not known),
use all successes of all partners, and give them the weight ``transfer_weight``, 1 by default. Advantages of
own responses are those of GSPO, |y| counts the learner's tokens. The transferred responses join the updates
on own responses: the rule makes as many updates as GSPO.
"""

from __future__ import annotations

import torch

from hacrl.algorithms.advantage import (
    Advantages,
    CapabilityRatio,
    Normaliser,
    PromptRewards,
    group_relative,
)
from hacrl.algorithms.importance import sequence_ratio
from hacrl.algorithms.losses.surrogate import clipped_surrogate
from hacrl.algorithms.mismatch import sequence_weight
from hacrl.config.rules import SuccessGatedSettings
from hacrl.types import LossBatch, LossTerms


def advantages(
    settings: SuccessGatedSettings,
    normaliser: Normaliser,
    rewards: PromptRewards,
    learner: str,
    _: CapabilityRatio,
) -> Advantages:
    """Return GSPO's advantages of own responses, and ``transfer_weight`` for transferred successes."""
    own = rewards[learner]
    transfers = not any(_is_success(reward, settings) for reward in own)
    found = dict(group_relative({learner: own}, learner, normaliser))
    for source, values in rewards.items():
        if source != learner and transfers:
            weights = [settings.transfer_weight if _is_success(r, settings) else None for r in values]
            found[source] = weights
    return found


def _is_success(reward: float, settings: SuccessGatedSettings) -> bool:
    if settings.max_reward is None:
        return reward > settings.min_reward
    return reward >= settings.max_reward


def loss(batch: LossBatch, settings: SuccessGatedSettings) -> LossTerms:
    """Return GSPO's loss of own responses, and - lambda / |y| log pi_k(y) of transferred ones."""
    ratio_B = sequence_ratio(batch, settings.choices.ratio_length)
    own = clipped_surrogate(ratio_B, batch.advantages_B, settings.clip_low, settings.clip_high)
    # Under top-k or top-p a response may be impossible (log pi = -inf); nothing can be learnt from it.
    logprobs_BT = batch.logprobs_BT.masked_fill(~batch.mask_BT, 0.0)
    is_impossible_B = (logprobs_BT.detach() == -torch.inf).any(dim=-1)
    is_left_out_BT = (batch.is_own_B | is_impossible_B).unsqueeze(-1)
    mean_B = logprobs_BT.masked_fill(is_left_out_BT, 0.0).sum(dim=-1) / batch.mask_BT.sum(dim=-1)
    weight = sequence_weight(batch)
    return LossTerms(
        loss_B=-weight.value * torch.where(batch.is_own_B, own.objective, batch.advantages_B * mean_B),
        ratio_B=ratio_B.detach(),
        clipped_below_B=torch.where(batch.is_own_B, own.below, is_impossible_B).float(),
        clipped_above_B=(own.above & batch.is_own_B).float(),
        weight_B=weight.value,
        capped_B=weight.is_capped.float(),
    )
