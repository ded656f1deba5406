"""Pooling like SAPO, swarm sampling policy optimization, arXiv 2509.08721.

    J_hete = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A),   r = (pi_k(y) / pi_k_old(y))^(1/|y|)

Agents exchange decoded text. Every agent encodes it again, scores it with its own policy, and learns from it
as if it had written it: r compares with the learner's own policy before the step, not with the source's. So
nothing about the source is needed, and nothing corrects for it: in the step's first update r is 1.

Assumptions: what another agent writes is worth imitating or avoiding as it stands.

Our reading. As in the paper, a source's responses to a prompt are one group, advantages are relative to it,
and external groups of equal rewards teach nothing. The paper's nodes work on different questions and draw
external groups at random; here all agents have the same prompts and a learner takes every external group,
which for two agents of equal G is the paper's best proportion, half and half. ``learning.max_cross_rollouts``
limits external responses with more agents. Ratio and clip are GSPO's.
"""

from __future__ import annotations

from hacrl.algorithms.advantage import (
    Advantages,
    CapabilityRatio,
    Normaliser,
    PromptRewards,
    group_relative_by_source,
)
from hacrl.algorithms.losses.gspo import gspo_loss
from hacrl.config.rules import SapoSettings
from hacrl.types import LossBatch, LossTerms


def advantages(
    _: SapoSettings, normaliser: Normaliser, rewards: PromptRewards, __: str, ___: CapabilityRatio
) -> Advantages:
    """Return every response's advantage among the responses of its own source."""
    return group_relative_by_source(rewards, normaliser)


def loss(batch: LossBatch, settings: SapoSettings) -> LossTerms:
    """Return GSPO's loss of all responses.

    The learner gives the batch its own old policy's log-probabilities in all rows (``settings.rescores``).
    """
    return gspo_loss(batch, settings)
