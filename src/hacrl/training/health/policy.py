"""Policies that leave the path: entropy that collapses, a KL that explodes, a sampler that disagrees."""

from __future__ import annotations

from collections.abc import Iterator

from hacrl.training.health.symptoms import Check, StepView, Symptom

# Nats per token. Rounding causes 1e-6 in float32 and .003 to .05 in bfloat16; from .15 on the run ends.
GAP = 0.05
# Share of the entropy of the first step. Training with verified rewards sharpens: the bundled recipes end at
# a sixth after 16 steps. At a twentieth the samples of a prompt hardly differ.
ENTROPY_SHARE = 0.05
ENTROPY_STEPS = 3
FIRST_ENTROPY = 0.001  # a policy that begins with less, e.g. one that always ends at once, cannot collapse
# KL(old || new) within a step, nats per token: updates that are limited by a clip range move by 1e-4 to .02.
POLICY_KL = 0.1
# KL(policy || reference), nats per token: at 1 the text is e times less likely to the reference per token.
REFERENCE_KL = 1.0


def sampler_gap(view: StepView) -> Iterator[Symptom]:
    """Find an engine whose log-probabilities differ from the learner's by more than rounding, or too much."""
    rollout, clip_low = view.config.rollout, view.config.method.clip_low
    for name, agent in view.agents.items():
        gap, shift = agent.learning.sampler_gap, agent.learning.sampler_kl
        if gap is None or shift is None:
            continue
        is_corrected = agent.learning.sampler_weight is not None
        # logits are divided by the temperature, and so is their rounding error
        if gap > GAP / min(1.0, rollout.temperature):
            yield Symptom(
                name,
                f"the sampler of {name} and its learner disagree: their log-probabilities of the same tokens "
                f"differ by {gap:.3g} nats on average, more than rounding explains ({GAP:g}). Check that the "
                f"engine has the learner's precision (agents.{name}.precision) and chat template, or use "
                f"agents.{name}.engine=transformers",
            )
        elif not is_corrected and abs(shift) > clip_low:
            yield Symptom(
                name,
                f"the sampler's numerics move the ratios of {name} by {abs(shift):.3g} before any update, "
                f"more than its clip range of {clip_low:g} is wide, so clipping follows rounding errors. Set "
                "learning.old_policy=learner to correct for it",
            )


def entropy_collapse(view: StepView) -> Iterator[Symptom]:
    """Find an agent whose samples hardly differ any more."""
    for name, agent in view.agents.items():
        first, now = view.first_entropy.get(name), agent.rollout.entropy
        if first is None or first < FIRST_ENTROPY or now is None or now > ENTROPY_SHARE * first:
            continue
        yield Symptom(
            name,
            f"the entropy of {name} has collapsed: {now:.2g} nats per token, {now / first:.0%} of the "
            f"{first:.2g} of the first step. Its samples of a prompt hardly differ, so little is left to "
            "learn from. Lower learning.lr, raise method.clip_high, set method.kl_coefficient, or stop at an "
            "earlier checkpoint",
        )


def kl_explosion(view: StepView) -> Iterator[Symptom]:
    """Find an agent whose policy moves far within a step, or is far from its reference."""
    for name, agent in view.agents.items():
        learning = agent.learning
        if learning.policy_kl is not None and not learning.policy_kl <= POLICY_KL:
            yield Symptom(
                name,
                f"the policy of {name} moves {learning.policy_kl:.2g} nats per token within a step (healthy: "
                f"below {POLICY_KL:g}), so the step's rollouts no longer describe it. Lower learning.lr "
                f"({view.learning_rate(name):g}) or the updates per step ({learning.updates})",
            )
    for name, agent in view.agents.items():
        distance = agent.learning.reference_kl
        if distance is not None and not distance <= REFERENCE_KL:
            yield Symptom(
                name,
                f"the policy of {name} is {distance:.2g} nats per token away from its reference (healthy: "
                f"below {REFERENCE_KL:g}): it writes another kind of text. Raise method.kl_coefficient "
                f"({view.config.method.choices.kl_coefficient:g}) or lower learning.lr "
                f"({view.learning_rate(name):g})",
                partner="reference",
            )


CHECKS = (
    Check("sampler_gap", sampler_gap),
    Check("entropy_collapse", entropy_collapse, ENTROPY_STEPS),
    Check("kl_explosion", kl_explosion),
)
