"""Responses that do not end: cut by the length limit, or by a policy that never stops."""

from __future__ import annotations

from collections.abc import Iterator

from hacrl.training.health.symptoms import Check, StepView, Symptom

# A cut response has no answer, so its reward says nothing about its reasoning. Up to a fifth is common with
# long reasoning; above a third, learning is about length first.
CUT_SHARE = 1 / 3
STEPS = 2


def cut(view: StepView) -> Iterator[Symptom]:
    """Find an agent many of whose responses the length limit cut. Episodes have a check of their own."""
    limit = view.config.rollout.max_new_tokens
    for name, agent in view.agents.items():
        share = 1 - agent.rollout.stopped
        if agent.rollout.episodes is None and CUT_SHARE <= share < 1:
            yield Symptom(
                name,
                f"{share:.0%} of the responses of {name} were cut at rollout.max_new_tokens={limit}, and a "
                f"cut response has no answer. Set rollout.max_new_tokens={2 * limit}, or "
                "learning.mask_truncated=true to learn from whole responses only",
            )


def never_stops(view: StepView) -> Iterator[Symptom]:
    """Find an agent none of whose responses ended with a stop token or a stop string."""
    limit = view.config.rollout.max_new_tokens
    for name, agent in view.agents.items():
        if agent.rollout.stopped == 0:
            yield Symptom(
                name,
                f"not one of the {agent.rollout.rollouts} responses of {name} ended by itself within "
                f"rollout.max_new_tokens={limit}. Either the limit is far too short "
                f"(try {4 * limit}), or the model does not know its stop token: a base model without a chat "
                "template needs a stop string (rollout.stop, e.g. the start of its next question), and an "
                f"instruction model its own template (agents.{name}.chat_template; `hacrl train --dry-run` "
                "lists stop tokens)",
            )


CHECKS = (Check("cut", cut, STEPS), Check("never_stops", never_stops, STEPS))
