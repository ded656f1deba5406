"""Partners whose responses teach an agent nothing: all are dropped or clipped, or nobody trusts them."""

from __future__ import annotations

from collections.abc import Iterator

from hacrl.config.method_base import CrossRange
from hacrl.training.health.symptoms import Check, StepView, Symptom
from hacrl.training.metrics import AgentReport, SourceReport

# Of a partner's responses. Between partners that fit each other up to two thirds are clipped; at nine tenths
# the agent pays for a partner's rollouts and updates and learns from itself.
NEARLY_ALL = 0.9
STEPS = 2  # one step of few responses can be unlucky
UNTRUSTED_STEPS = 10  # two windows of measurements
# Keys are hacrl.models.retokenizing.DropReason.
FIXES: dict[str, str] = {
    "too_long": "they do not fit its context beside the prompt: lower rollout.max_new_tokens, or use a model "
    "with a longer context",
    "not_representable": "its tokenizer cannot write their text exactly: check that both tokenizers are "
    "those of the models",
    "non_finite": "they were sampled with log-probabilities that are not finite: check the partner's weights "
    "and precision",
    "empty": "they have no token to learn from: the partner ends its responses at once",
    "no_logprobs": "its endpoint gave no log-probabilities that belong to their text: use a method that "
    "needs none (success_gated, sapo), or another endpoint",
    "truncated": "rollout.max_new_tokens cut them and learning.mask_truncated leaves such responses out: "
    "raise rollout.max_new_tokens",
    "environment_failed": "its environments failed: `hacrl rollouts` shows why",
}


def all_dropped(view: StepView) -> Iterator[Symptom]:
    """Find a partner nearly all of whose responses cannot become an agent's samples."""
    for name, agent in view.agents.items():
        for partner in _partners(view, name):
            reasons = agent.learning.dropped.get(partner, {})
            left_out = agent.learning.left_out.get(partner, 0)
            tried = view.agents[partner].rollout.rollouts - left_out
            dropped = sum(reasons.values())
            if not dropped or dropped < NEARLY_ALL * tried:
                continue
            counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
            main = max(reasons, key=lambda reason: reasons[reason])
            yield Symptom(
                name,
                f"agent {name} learns nothing from {partner}: {dropped} of {tried} responses are dropped "
                f"({counts}); {FIXES[main]}",
                partner,
            )


def all_clipped(view: StepView) -> Iterator[Symptom]:
    """Find a partner nearly all of whose responses have a ratio outside of the clip interval."""
    interval = view.config.method.cross_range
    if interval is None:
        return
    for name, agent in view.agents.items():
        for partner in _partners(view, name):
            used = agent.learning.sources.get(partner)
            if used is not None and used.clipped >= NEARLY_ALL:
                yield Symptom(name, _clipped(name, partner, agent, used, interval), partner)


def _clipped(name: str, partner: str, agent: AgentReport, used: SourceReport, interval: CrossRange) -> str:
    lower, upper, lower_key, upper_key = interval
    found = (
        f"agent {name} learns nothing from {partner}: {used.clipped:.0%} of the responses are clipped "
        f"({used.clipped_below:.0%} below, {used.clipped_above:.0%} above); the mean ratio is "
        f"{used.ratio_mean:.3g} and the interval [{lower:.4g}, {upper:.4g}]"
    )
    if used.clipped_below >= used.clipped_above:
        return (
            f"{found}. It finds its partner's text too unlikely: the two are far apart. Widen the interval "
            f"with {lower_key}={_wider(1 - lower, 1 - used.ratio_mean):.2g}, teach both one style with "
            "demonstrations, or take closer models"
        )
    return (
        f"{found}. It finds its partner's text likelier than the partner does; raise {upper_key} to let such "
        f"responses teach, e.g. {upper_key}={_upper(interval, used.ratio_mean):.3g}"
    )


def _wider(width: float, needed: float) -> float:
    """Return a width below 1 that contains the mean ratio with some room."""
    return min(0.95, max(1.5 * width, 1.2 * needed))


def _upper(interval: CrossRange, mean: float) -> float:
    """Return an upper end a little above the mean ratio: a bound, or a distance from 1."""
    bound = max(interval.upper, mean) * 1.05
    return bound if interval.upper_key == "method.cross_upper" else bound - 1


def _partners(view: StepView, name: str) -> list[str]:
    if not view.config.method.shares_rollouts:
        return []
    return [other for other in view.agents if other != name]


def not_trusted(view: StepView) -> Iterator[Symptom]:
    """Find a partner that an agent has measured and does not trust, so that nothing is shared."""
    for name, agent in view.agents.items():
        for partner, trusted in agent.learning.trusted.items():
            if not trusted:
                yield Symptom(
                    name,
                    f"agent {name} does not trust {partner} and learns nothing from it: the cosine between "
                    f"their gradients is {agent.learning.alignment[partner]:.2f} in this step, and was not "
                    f"reliably above 0 for {UNTRUSTED_STEPS} steps. If that lasts, leave one of them out: "
                    f"measuring costs {agent.learning.probe_tokens} tokens a step, and no update is lost",
                    partner,
                )


CHECKS = (
    Check("all_dropped", all_dropped, STEPS),
    Check("all_clipped", all_clipped, STEPS),
    Check("not_trusted", not_trusted, UNTRUSTED_STEPS),
)
