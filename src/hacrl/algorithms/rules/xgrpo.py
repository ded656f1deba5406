"""XGRPO, advantage sharing of Mutual RL, arXiv 2605.07244: share rewards, never responses.

    A_i^k = (R(y_i^k) - mu) / sigma      mu, sigma: of all agents' rewards for the prompt;
                                         own responses alone are learnt from

The policy gradient stays on the learner's own support: there is no importance ratio and nothing to
retokenise, and only numbers are exchanged.

Assumptions: an agent gains from knowing how hard a prompt is for others. The baseline of an agent that is
stronger or weaker than the others is biased.

Our reading: mu is the mean of the agents' mean rewards, so that every agent weighs as much, and sigma the
standard deviation of all rewards together, both as in Naive sharing. A group of equal own rewards has an
advantage that is not 0 where partners do better or worse. The loss is GSPO's.
"""

from __future__ import annotations

from hacrl.algorithms.advantage import (
    Advantages,
    CapabilityRatio,
    Normaliser,
    PromptRewards,
    group_relative,
)
from hacrl.config.rules import XgrpoSettings


def advantages(
    _: XgrpoSettings, normaliser: Normaliser, rewards: PromptRewards, learner: str, __: CapabilityRatio
) -> Advantages:
    """Return advantages of own responses against the rewards of all agents."""
    return {learner: group_relative(rewards, learner, normaliser)[learner]}
