"""A learning rate and a clip range that do not fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from hacrl.training.health.symptoms import Check, StepView, Symptom

# Of own responses, in updates after a step's first. A fifth is common; above half, most of the rollouts that
# were paid for teach in the first update alone.
CLIPPED_SHARE = 0.5
CLIPPED_STEPS = 2
# Largest distance of a ratio from 1, as a share of the clip range: below it the range might as well not be.
STILL_SHARE = 0.01
STILL_STEPS = 5
# Share of the full learning rate, below which a schedule explains why nothing moves.
SCHEDULED_SHARE = 0.5


def most_clipped(view: StepView) -> Iterator[Symptom]:
    """Find an agent most of whose own responses are clipped from the second update on."""
    method = view.config.method
    for name, agent in view.agents.items():
        share = agent.learning.own_clipped_later
        if share is None or share <= CLIPPED_SHARE:
            continue
        rate = view.learning_rate(name)
        yield Symptom(
            name,
            f"{share:.0%} of the own responses of {name} are clipped after the first update"
            f": the learning rate {rate:g} moves ratios out of "
            f"[{1 - method.clip_low:g}, {1 + method.clip_high:g}] in one update. Widen method.clip_low "
            f"({method.clip_low:g}) and method.clip_high ({method.clip_high:g}), or lower learning.lr to "
            f"{rate / 2:.2g}",
        )


def nothing_moves(view: StepView) -> Iterator[Symptom]:
    """Find an agent whose ratios stay at 1 through all updates of a step."""
    method = view.config.method
    width = min(method.clip_low, method.clip_high)
    for name, agent in view.agents.items():
        own, learning = agent.learning.sources.get(name), agent.learning
        if own is None or learning.updates < 2 or learning.own_clipped_later is None:
            continue
        if learning.learning_rate < SCHEDULED_SHARE * view.learning_rate(name):
            continue
        distance = max(own.ratio_max - 1, 1 - own.ratio_min)
        if distance < STILL_SHARE * width:
            yield Symptom(
                name,
                f"the updates hardly move {name}: its ratios stay within {distance:.1g} of 1, and its clip "
                f"range is {width:g} wide. Raise learning.lr "
                f"({view.learning_rate(name):g}), or narrow the clip range if the learning rate is meant so",
            )


CHECKS = (
    Check("most_clipped", most_clipped, CLIPPED_STEPS),
    Check("nothing_moves", nothing_moves, STILL_STEPS),
)
