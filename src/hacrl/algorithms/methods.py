"""Training methods by name. A method is an advantage function and a loss function, bound to their settings.

No code outside this module branches on a method's name. A recipe can also name a method of the user's own
(:class:`OwnMethod`, docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

from hacrl.algorithms.advantage import (
    Advantages,
    CapabilityRatio,
    Normaliser,
    PromptRewards,
    capability_aware_baseline,
    equal_capability,
    group_relative,
    is_uniform,
    joint_mean,
    joint_std,
    normalised_advantages,
    zero_advantages,
)
from hacrl.algorithms.aggregation import weighed_by_length
from hacrl.algorithms.context import StepContext
from hacrl.algorithms.discrepancy import scaled_by_discrepancy
from hacrl.algorithms.kl import k3_divergence
from hacrl.algorithms.losses.grpo import grpo_loss
from hacrl.algorithms.losses.gspo import gspo_loss
from hacrl.algorithms.losses.hacpo import hacpo_loss
from hacrl.algorithms.losses.naive import naive_loss
from hacrl.algorithms.rules import aligned, ftis, s2l_po, sapo, success_gated, xgrpo
from hacrl.config.schema import (
    HacpoSettings,
    MethodSettings,
    PluginMethodSettings,
    SingleAgentSettings,
    SuccessGatedSettings,
)
from hacrl.errors import TrainingError
from hacrl.types import LossBatch, LossTerms

AdvantageFunction = Callable[[PromptRewards, str, CapabilityRatio], Advantages]
BaselineFunction = Callable[[PromptRewards, str, CapabilityRatio], float]
LossFunction = Callable[[LossBatch], LossTerms]


@dataclass(frozen=True)
class Method:
    """How one learner turns verified rollouts into a loss."""

    name: str
    advantages: AdvantageFunction  # (rewards of one prompt, learner, omega) -> advantages per source
    loss: LossFunction
    settings: MethodSettings
    # mu_k that the learner's own responses to a prompt are compared with; None: it does not say
    baseline: BaselineFunction | None = None
    # Whether advantages and baseline also take the keyword ``context`` (:meth:`at`).
    takes_context: bool = False

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of a frozen reference policy."""
        return self.settings.choices.kl_coefficient > 0

    def at(self, context: StepContext) -> Method:
        """Return the method as it is in one learner's step."""
        if not self.takes_context:
            return self
        advantages: Callable[..., Advantages] = self.advantages
        baseline: Callable[..., float] | None = self.baseline
        return replace(
            self,
            advantages=partial(advantages, context=context),
            baseline=None if baseline is None else partial(baseline, context=context),
        )


class OwnMethod(Protocol):
    """A method of the user's own. The object is made from ``method.options``.

    If its class takes ``settings``, hacrl hands in the method's shared settings. An optional method
    ``baseline`` takes the arguments of ``advantages`` and returns mu of the learner's own responses to the
    prompt, for the metrics. An optional attribute ``needs_source_logprobs``, False, says that the loss uses
    nothing of the probability that another agent's response had at its source.
    """

    shares_rollouts: bool  # whether an agent learns from other agents' responses

    def advantages(
        self, rewards: PromptRewards, learner: str, capability_ratio: CapabilityRatio, /
    ) -> Advantages:
        """Return the learner's advantage of every response to one prompt that it trains on, by source."""
        ...

    def loss(self, batch: LossBatch, /) -> LossTerms:
        """Return the loss of every response; ``kl_coefficient`` adds its penalty afterwards."""
        ...


def own_advantages(
    settings: SingleAgentSettings,
    normaliser: Normaliser,
    rewards: PromptRewards,
    learner: str,
    _: CapabilityRatio,
) -> Advantages:
    """Return group-relative advantages of the learner's own responses only (GRPO, GSPO)."""
    scale = normaliser if settings.divide_by_std else None
    return group_relative({learner: rewards[learner]}, learner, scale, settings.baseline_scale)


def own_baseline(settings: MethodSettings, rewards: PromptRewards, learner: str, _: CapabilityRatio) -> float:
    """Return the mean reward of the learner's own responses, scaled as the method's settings say."""
    return settings.baseline_scale * joint_mean({learner: rewards[learner]}, learner)


def joint_baseline(_: MethodSettings, rewards: PromptRewards, learner: str, __: CapabilityRatio) -> float:
    """Return the mean of all agents' mean rewards."""
    return joint_mean(rewards, learner)


def hacpo_baseline(
    settings: HacpoSettings, rewards: PromptRewards, learner: str, capability_ratio: CapabilityRatio
) -> float:
    """Return mu_k (eq. 6) of an agent, a learner or a source."""
    ratio = capability_ratio if settings.capability_baseline else equal_capability
    return capability_aware_baseline(
        rewards, learner, ratio, settings.baseline_overshoot, settings.max_reward
    )


def joint_advantages(
    _: MethodSettings,
    normaliser: Normaliser,
    rewards: PromptRewards,
    learner: str,
    __: CapabilityRatio,
) -> Advantages:
    """Return advantages of all responses against the mean of all agents' mean rewards (naive sharing)."""
    return group_relative(rewards, learner, normaliser)


def hacpo_advantages(
    settings: HacpoSettings,
    normaliser: Normaliser,
    rewards: PromptRewards,
    learner: str,
    capability_ratio: CapabilityRatio,
) -> Advantages:
    """Return capability-aware advantages (eq. 6, 7); those of other agents are scaled by eq. 10."""
    if is_uniform(rewards):
        return zero_advantages(rewards)
    discrepancy_ratio = capability_ratio if settings.discrepancy else equal_capability
    std = joint_std(rewards, normaliser.unbiased)
    advantages: dict[str, tuple[float, ...]] = {}
    for source, values in rewards.items():
        baseline_agent = source if settings.choices.cross_baseline == "source" else learner
        baseline = hacpo_baseline(settings, rewards, baseline_agent, capability_ratio)
        raw = normalised_advantages(values, baseline, std, normaliser.epsilon)
        advantages[source] = scaled_by_discrepancy(raw, learner, source, discrepancy_ratio)
    return advantages


def with_kl_penalty(
    loss: Callable[[LossBatch, Any], LossTerms], batch: LossBatch, settings: MethodSettings
) -> LossTerms:
    """Return the method's loss terms, with the k3 penalty on own responses added if a coefficient is set."""
    terms = loss(batch, settings)
    kl_coefficient = settings.choices.kl_coefficient
    if kl_coefficient == 0:
        return terms
    assert batch.reference_logprobs_BT is not None, "a KL term needs reference log-probabilities"
    own_BT = batch.mask_BT & batch.is_own_B.unsqueeze(-1)  # masked first, because 0 * inf is NaN
    kl_B = k3_divergence(batch.logprobs_BT, batch.reference_logprobs_BT, own_BT)
    kl_B = weighed_by_length(kl_B, batch, settings.aggregation)
    return replace(terms, loss_B=terms.loss_B + kl_coefficient * kl_B)


def plugin_advantages(
    method: OwnMethod,
    settings: PluginMethodSettings,
    rewards: PromptRewards,
    learner: str,
    capability_ratio: CapabilityRatio,
) -> Advantages:
    """Return the method's advantages. Raise TrainingError if they do not fit the responses."""
    advantages = dict(method.advantages(rewards, learner, capability_ratio))
    expected = {source: len(rewards[source]) for source in advantages if source in rewards}
    found = {source: len(values) for source, values in advantages.items()}
    if found != expected or not (method.shares_rollouts or set(found) <= {learner}):
        responses = {source: len(values) for source, values in rewards.items()}
        raise TrainingError(
            f"method.name: {settings.name!r} gave advantages of {found} responses by agent to {learner!r}; "
            f"there are {responses}, and shares_rollouts is {bool(method.shares_rollouts)}"
        )
    return advantages


def plugin_loss(method: OwnMethod, batch: LossBatch, settings: MethodSettings) -> LossTerms:
    """Return the method's loss terms. Raise TrainingError if they are not tensors of shape (B,)."""
    terms = method.loss(batch)
    for field in fields(LossTerms):
        shape = getattr(getattr(terms, field.name, None), "shape", None)
        if shape != batch.advantages_B.shape:
            raise TrainingError(
                f"method.name: the loss of {settings.name!r} must return hacrl.types.LossTerms with tensors "
                f"of one value per response: {field.name} should have the shape "
                f"{tuple(batch.advantages_B.shape)}, not {None if shape is None else tuple(shape)}"
            )
    return terms


# name -> (advantage function, baseline function, loss function)
_METHODS: dict[str, tuple[Callable[..., Advantages], Callable[..., float], Callable[..., LossTerms]]] = {
    "grpo": (own_advantages, own_baseline, grpo_loss),
    "gspo": (own_advantages, own_baseline, gspo_loss),
    "naive": (joint_advantages, joint_baseline, naive_loss),
    "hacpo": (hacpo_advantages, hacpo_baseline, hacpo_loss),
    "success_gated": (success_gated.advantages, own_baseline, success_gated.loss),
    "xgrpo": (xgrpo.advantages, joint_baseline, gspo_loss),
    "ftis": (ftis.advantages, own_baseline, ftis.loss),
    "sapo": (sapo.advantages, own_baseline, sapo.loss),
    "s2l_po": (s2l_po.advantages, s2l_po.baseline, naive_loss),
    "aligned": (aligned.advantages, aligned.baseline, aligned.loss),
}
_TAKE_CONTEXT = {"s2l_po", "aligned"}


def make_method(
    settings: MethodSettings,
    max_reward: float | None = 1.0,
    normaliser: Normaliser = Normaliser(),  # noqa: B008 - immutable
) -> Method:
    """Bind a method's functions to its settings.

    ``max_reward`` is the task's largest reward; it is used if the settings name none.
    """
    uses_range = isinstance(settings, HacpoSettings | SuccessGatedSettings | PluginMethodSettings)
    if uses_range and settings.max_reward is None and max_reward is not None:
        settings = replace(settings, reward_range=(settings.min_reward, max_reward))
    if isinstance(settings, PluginMethodSettings):
        own: OwnMethod = settings.make()
        return Method(
            name=settings.name,
            advantages=partial(plugin_advantages, own, settings),
            loss=lambda batch: with_kl_penalty(partial(plugin_loss, own), batch, settings),
            settings=settings,
            baseline=getattr(own, "baseline", None),
        )
    advantages, baseline, loss = _METHODS[settings.name]
    return Method(
        name=settings.name,
        advantages=partial(advantages, settings, normaliser),
        loss=lambda batch: with_kl_penalty(loss, batch, settings),
        settings=settings,
        baseline=partial(baseline, settings),
        takes_context=settings.name in _TAKE_CONTEXT,
    )
