"""S2L-PO, small-to-large policy optimization, arXiv 2605.30789: a small fixed model explores for others.

    group of learner k:  G_S responses of the explorer, G - G_S of its own
    G_S = G * max(0, 1 - t / (anneal * T))                  step t of T, rounded
    A = (R - mean) / std over the group,   J = min(s A, clip(s) A),   s = (pi_k(y) / pi_source(y))^(1/|y|)

Small models of a family cover more ways to an answer than large ones: their pass@k grows faster. At first the
explorer writes all responses that the learner trains on, later none, so that its lower ceiling does not hold
the learner back.

Assumptions: one family of models, so that ratios stay near 1; an explorer that has not been sharpened by RL.

Our reading. The schedule is linear and ends after ``anneal``, 0.7, of the steps. The agent
``method.explorer`` never learns. Responses are independent draws, so the first ones of each agent are taken.
Other agents than the explorer do not teach. The paper does not generate own responses that the schedule
leaves out. Here every agent responds to every prompt G times, so the rule is charged for more rollouts than
it needs. Ratio and clip are GSPO's, as everywhere here.
"""

from __future__ import annotations

from hacrl.algorithms.advantage import (
    Advantages,
    CapabilityRatio,
    Normaliser,
    PromptRewards,
    group_relative,
    joint_mean,
)
from hacrl.algorithms.context import StepContext
from hacrl.config.rules import S2lpoSettings


def explorer_responses(group_size: int, progress: float, anneal: float) -> int:
    """Return G_S, how many responses of a group the explorer writes after a share of the steps."""
    return round(group_size * max(0.0, 1.0 - progress / anneal))


def training_group(
    settings: S2lpoSettings, rewards: PromptRewards, learner: str, progress: float
) -> tuple[list[float], list[float]]:
    """Return the rewards that the learner trains on: the explorer's first G_S, own ones but the first G_S."""
    explorer = rewards.get(str(settings.explorer), ())  # none if it is paused
    own = rewards[learner]
    explored = min(explorer_responses(len(own), progress, settings.anneal), len(explorer))
    return list(explorer[:explored]), list(own[explored:])


def advantages(
    settings: S2lpoSettings,
    normaliser: Normaliser,
    rewards: PromptRewards,
    learner: str,
    _: CapabilityRatio,
    context: StepContext = StepContext(),  # noqa: B008 - immutable
) -> Advantages:
    """Return group-relative advantages of the training group; none for the explorer, which does not learn."""
    explorer = str(settings.explorer)
    if learner == explorer:
        return {}
    explored, own = training_group(settings, rewards, learner, context.progress)
    relative = group_relative({"group": [*explored, *own]}, "group", normaliser)["group"]
    count = len(explored)
    found: dict[str, list[float | None]] = {learner: [*[None] * count, *relative[count:]]}
    if explorer in rewards:
        found[explorer] = [*relative[:count], *[None] * (len(rewards[explorer]) - count)]
    return found


def baseline(
    settings: S2lpoSettings,
    rewards: PromptRewards,
    learner: str,
    _: CapabilityRatio,
    context: StepContext = StepContext(),  # noqa: B008 - immutable
) -> float:
    """Return the mean reward of the training group; the explorer's own mean for the explorer."""
    if learner == settings.explorer:
        return joint_mean({learner: rewards[learner]}, learner)
    explored, own = training_group(settings, rewards, learner, context.progress)
    return joint_mean({learner: [*explored, *own]}, learner)
