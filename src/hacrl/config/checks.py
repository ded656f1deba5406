"""Checks across sections, before any model loads. Each message names the keys, their values and the fix."""

from __future__ import annotations

from collections import Counter

from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError

_MOST_UPDATES = 100_000  # of one agent in one step


def check_config(config: RunConfig) -> None:
    """Refuse what is valid key by key but cannot work together."""
    _agent_names_differ(config)
    _something_to_compare(config)
    _updates_have_an_end(config)
    _clip_schedule_stays_open(config)


def updates_per_step(config: RunConfig) -> int:
    """Parameter updates each learner makes in a step."""
    sources = len(config.agents) if config.method.shares_rollouts else 1
    return config.learning.updates(sources)


def _agent_names_differ(config: RunConfig) -> None:
    counts = Counter(agent.name.casefold() for agent in config.agents)
    for name, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"agents: {count} agents are called {name!r} (case aside); give each its own name, "
                "it keys their rollouts, metrics and folders"
            )


def _something_to_compare(config: RunConfig) -> None:
    """An advantage compares responses to one prompt: a lone response never teaches anything."""
    shared = config.method.shares_rollouts
    group = {agent.name: config.rollouts_per_prompt(agent) for agent in config.agents}
    if shared and len(group) > 1:
        return
    for name, size in group.items():
        if size == 1:
            raise ConfigError(
                f"rollout.rollouts_per_prompt is 1 for agent {name!r} and method.name is "
                f"{config.method.name!r}: a single response has nothing to be compared with and "
                "teaches nothing; use at least 2"
            )


def _updates_have_an_end(config: RunConfig) -> None:
    """Each is a backward pass: a number with a slip in it would seem to hang."""
    updates = updates_per_step(config)
    if updates > _MOST_UPDATES:
        raise ConfigError(
            f"learning: {updates:,} updates in one step, from {_where_updates_come_from(config)}; "
            f"at most {_MOST_UPDATES:,} are possible"
        )


def _where_updates_come_from(config: RunConfig) -> str:
    learning = config.learning
    return (
        f"learning.updates_per_step={learning.updates_per_step}, "
        f"updates_per_source={learning.updates_per_source}, epochs={learning.epochs} "
        f"and {len(config.agents)} agents"
    )


def _clip_schedule_stays_open(config: RunConfig) -> None:
    if len(config.agents) == 1:
        return  # no cross-agent response to clip: one agent is exactly GSPO
    updates = updates_per_step(config)
    try:
        config.method.check_updates(updates)
    except ValueError as error:
        raise ConfigError(
            f"method: {error}. The {updates} updates come from {_where_updates_come_from(config)}"
        ) from error
