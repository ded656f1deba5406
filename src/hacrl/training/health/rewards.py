"""Rewards that teach nothing: none at all, none for one agent, or the same for all responses to a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from hacrl.training.health.symptoms import Check, StepView, Symptom
from hacrl.training.metrics import AgentReport

# A weak model may earn nothing in one small step; not in three.
STEPS = 3
# Share of prompts without a signal. The best that a step can be is .5 or less (prompts that a model solves
# half the time); late in training many prompts are solved, and .8 leaves a fifth of a step's rollouts.
SILENT_SHARE = 0.8
# Share of responses without an answer that could be read, above which the format is the likely cause.
UNREADABLE_SHARE = 0.5
DEMONSTRATIONS = "show the format with task.options.demonstrations or a system prompt"


def no_reward(view: StepView) -> Iterator[Symptom]:
    """Find a step in which no agent earned a reward."""
    if any(_earns(agent) for agent in view.agents.values()):
        return
    names = ", ".join(view.agents)
    responses = sum(agent.rollout.rollouts for agent in view.agents.values())
    unreadable = sum(agent.rollout.verdicts.get("unparsable", 0) for agent in view.agents.values())
    yield Symptom(
        "",
        f"no reward anywhere: none of the {responses} responses of {names} earned one, "
        f"so nothing is learnt. {_cause(unreadable / max(1, responses))}",
    )


def never_succeeds(view: StepView) -> Iterator[Symptom]:
    """Find an agent without a reward beside others that earn some."""
    earning = [name for name, agent in view.agents.items() if _earns(agent)]
    if not earning:
        return  # said for all agents together
    for name, agent in view.agents.items():
        if name in earning:
            continue
        rollout = agent.rollout
        effect = (
            f"its partners' baselines count it with a capability of {agent.capability:.2g}, and learn only "
            "mistakes from it; train without it if this lasts. "
            if view.config.method.shares_rollouts
            else ""
        )
        yield Symptom(
            name,
            f"agent {name} never succeeds: none of its {rollout.rollouts} responses earned a reward"
            f", while {', '.join(earning)} did. {effect}"
            f"{_cause(rollout.verdicts.get('unparsable', 0) / max(1, rollout.rollouts))}",
        )


def no_variance(view: StepView) -> Iterator[Symptom]:
    """Find an agent that most prompts teach nothing, because all responses earned the same."""
    if not any(_earns(agent) for agent in view.agents.values()):
        return  # said already
    for name, agent in view.agents.items():
        share, rollout = agent.learning.without_signal, agent.rollout
        if share < SILENT_SHARE or not _earns(agent):  # an agent without any reward has its own note
            continue
        if rollout.all_wrong > rollout.all_right:
            fix = (
                "The problems are too hard for it: take easier ones, raise rollout.rollouts_per_prompt, "
                f"{_more_prompts(view)}or {DEMONSTRATIONS}"
            )
        else:
            fix = f"The problems are too easy for it: take harder ones, {_more_prompts(view)}or stop here"
        yield Symptom(
            name,
            f"agent {name} learns nothing from {share:.0%} of the prompts: all "
            f"responses compared earned the same reward. Its own were all right for "
            f"{rollout.all_right:.0%} of the prompts and all wrong for {rollout.all_wrong:.0%}. {fix}",
        )


def _more_prompts(view: StepView) -> str:
    """Return the advice to ask further prompts, unless the run does so."""
    return "" if view.config.rollout.resample else "replace such prompts (rollout.resample=3), "


def below_range(view: StepView) -> Iterator[Symptom]:
    """Find an agent whose mean reward is below the reward that counts as no capability."""
    method = view.config.method
    if not method.shares_rollouts or method.choices.capability_measure != "mean_reward":
        return
    for name, agent in view.agents.items():
        if agent.rollout.reward < method.min_reward:
            yield Symptom(
                name,
                f"the mean reward of {name} is {agent.rollout.reward:.3g}, below the lowest reward of "
                f"{method.min_reward:g}: its capability counts as nothing. If rewards can be negative, set "
                "method.reward_range to the lowest and the highest one",
            )


def _earns(agent: AgentReport) -> bool:
    """Return whether some response earned more than the lowest reward."""
    return agent.rollout.all_wrong < 1


def _cause(unreadable: float) -> str:
    if unreadable > UNREADABLE_SHARE:
        return (
            f"{unreadable:.0%} of them have no answer that could be read: {DEMONSTRATIONS}, or raise "
            "rollout.max_new_tokens if they are cut"
        )
    return (
        "Read some with `hacrl rollouts`: if they answer the question in another form, "
        f"{DEMONSTRATIONS}; if they are wrong, take easier problems or a stronger model"
    )


CHECKS = (
    Check("no_reward", no_reward, STEPS),
    Check("never_succeeds", never_succeeds, STEPS),
    Check("no_variance", no_variance, STEPS),
    Check("below_range", below_range),
)
