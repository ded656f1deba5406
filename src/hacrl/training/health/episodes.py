"""Episodes that teach nothing: their environments fail, limits cut them, tool calls cannot be read."""

from __future__ import annotations

from collections.abc import Iterator

from hacrl.training.episode_metrics import EpisodesReport
from hacrl.training.health.symptoms import Check, StepView, Symptom

# Of an agent's episodes. A failed episode is lost: at one in a hundred nobody minds, at one in twenty the
# environment has a defect or too little time.
FAILED_SHARE = 0.05
# An episode that a limit ends has often not done what earns the reward. Up to a third is common with games.
CUT_SHARE = 1 / 3
UNREAD_SHARE = 0.2  # of the actions: tool calls in another form than the model's own
CALLLESS_STEPS = 3
STEPS = 2
LIMITS = {
    "max_turns": "task.options.max_turns",
    "max_tokens": "rollout.max_new_tokens",
    "max_seconds": "task.options.max_seconds",
}


def failing(view: StepView) -> Iterator[Symptom]:
    """Find an agent whose environments fail often."""
    for name, episodes, count in _episodes(view):
        if episodes.failed < FAILED_SHARE * count or not episodes.failed:
            continue
        reason = next(iter(episodes.failures), "")
        fix = (
            "Give calls more time (task.options.limits.call_seconds), or make the environment faster"
            if 2 * episodes.timeouts > episodes.failed
            else "Correct the environment; the class can be tried alone, as any Python class"
        )
        yield Symptom(
            name,
            f"the environments of {episodes.failed} of {count} episodes of {name} failed; most often, the "
            f"environment {reason}. These episodes are lost, the others count. {fix}",
        )


def cut_by_limit(view: StepView) -> Iterator[Symptom]:
    """Find an agent many of whose episodes a limit ends."""
    for name, episodes, count in _episodes(view):
        for end, setting in LIMITS.items():
            share = episodes.ends.get(end, 0) / count
            if share >= CUT_SHARE:
                yield Symptom(
                    name,
                    f"{share:.0%} of the episodes of {name} were ended by {setting}. Raise it if their "
                    "rewards come at the end, or let the prompt ask for fewer turns",
                    end,
                )


def unread_calls(view: StepView) -> Iterator[Symptom]:
    """Find an agent whose tool calls often cannot be read."""
    for name, episodes, count in _episodes(view):
        actions = episodes.turns * count
        if actions and episodes.unread_calls >= UNREAD_SHARE * actions:
            yield Symptom(
                name,
                f"{episodes.unread_calls} of {actions:.0f} turns of {name} hold a tool call that cannot be "
                "read, which ends the episode. `hacrl rollouts` shows them: a model without training for "
                "tools needs an example of a call in its prompt (task.options.system)",
            )


def no_calls(view: StepView) -> Iterator[Symptom]:
    """Find an agent that never calls a tool, though others do or though there is no other way to act."""
    found = list(_episodes(view))
    uses_tools = any(episodes.tool_calls for _, episodes, _ in found)
    for name, episodes, count in found:
        if uses_tools and not episodes.tool_calls and not episodes.unread_calls:
            yield Symptom(
                name,
                f"agent {name} called no tool in {count} episodes, while others did. Ask for it in the "
                "prompt, with an example of a call (task.options.system)",
            )


def _episodes(view: StepView) -> Iterator[tuple[str, EpisodesReport, int]]:
    """Yield every agent that plays episodes, with its report and the number of its episodes."""
    for name, agent in view.agents.items():
        if agent.rollout.episodes is not None:
            yield name, agent.rollout.episodes, agent.rollout.rollouts


CHECKS = (
    Check("failing_environments", failing),
    Check("cut_episodes", cut_by_limit, STEPS),
    Check("unread_calls", unread_calls, STEPS),
    Check("no_calls", no_calls, CALLLESS_STEPS),
)
