"""Check settings that depend on each other, before any model loads. Messages name keys, values and fix."""

from __future__ import annotations

from collections import Counter

from hacrl.config.method import methods_without_logprobs
from hacrl.config.schema import PluginMethodSettings, RunConfig
from hacrl.errors import ConfigError

_MOST_UPDATES = 100_000  # of one agent in one step


def check_config(config: RunConfig) -> None:
    """Raise ConfigError for settings that are valid one by one but cannot work together.

    The code of a plug-in method is not imported: :func:`check_plugin_method` follows before a run begins.
    """
    _check_agent_names(config)
    _check_frozen_agents(config)
    _check_overlong_buffer(config)
    _check_asynchronous(config)
    if not isinstance(config.method, PluginMethodSettings):
        _check_method(config)


def check_plugin_method(config: RunConfig) -> None:
    """Raise ConfigError if a plug-in method cannot be used, or not with the run's other settings."""
    if isinstance(config.method, PluginMethodSettings):
        _check_method(config)


def _check_method(config: RunConfig) -> None:
    _check_method_agents(config)
    _check_source_logprobs(config)
    _check_offloaded_gradients(config)
    _check_group_sizes(config)
    _check_number_of_updates(config)
    _check_clip_schedule(config)


def updates_per_step(config: RunConfig) -> int:
    """Return the number of parameter updates of each learner in a step."""
    return config.learning.updates(config.method.sources(len(config.agents)))


def _check_agent_names(config: RunConfig) -> None:
    counts = Counter(agent.name.casefold() for agent in config.agents)
    for name, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"agents: {count} agents are called {name!r} (case aside); give each its own name, "
                "it keys their rollouts, metrics and folders"
            )


def _check_frozen_agents(config: RunConfig) -> None:
    """Refuse a run in which nobody learns."""
    if not config.learners:
        names = ", ".join(agent.name for agent in config.agents)
        raise ConfigError(
            f"agents: all agents are frozen ({names}), so nobody would learn; train at least one agent"
        )


def _check_source_logprobs(config: RunConfig) -> None:
    """Refuse an endpoint without log-probabilities if the method weighs responses by them."""
    for agent in config.agents:
        if agent.endpoint is None:
            continue
        if agent.endpoint.logprobs is False and config.method.needs_source_logprobs:
            raise ConfigError(without_logprobs(config, agent.name, "logprobs=false"))


def without_logprobs(config: RunConfig, agent: str, why: str) -> str:
    """Return the message for a method that cannot learn from an agent without log-probabilities."""
    return (
        f"agents.{agent}.endpoint.{why}, but method.name={config.method.name!r} compares the probability of "
        "another agent's response with the one that its source gave it. Methods that need no "
        f"log-probabilities of the source: {', '.join(methods_without_logprobs())}"
    )


def _check_overlong_buffer(config: RunConfig) -> None:
    buffer, longest = config.learning.overlong_buffer, config.rollout.max_new_tokens
    if buffer > longest:
        raise ConfigError(
            f"learning.overlong_buffer={buffer} is more than rollout.max_new_tokens={longest}, the longest "
            f"response; a fifth of that is usual, {max(1, longest // 5)}"
        )


def _check_asynchronous(config: RunConfig) -> None:
    """Refuse what needs an agent to sample and learn in turns."""
    staleness = config.asynchronous.max_staleness
    if not staleness:
        return
    if config.learning.offload not in ("auto", "never"):
        raise ConfigError(
            f"learning.offload={config.learning.offload} moves agents off their device while others are at "
            f"work, but with asynchronous.max_staleness={staleness} all are at work at once: set "
            "learning.offload=never, and give agents devices of their own (agents[].device)"
        )
    if config.rollout.resample:
        raise ConfigError(
            f"rollout.resample={config.rollout.resample} asks further prompts once all agents have answered "
            f"a step's, but with asynchronous.max_staleness={staleness} they are at different steps: set "
            "rollout.resample=0"
        )


def _check_method_agents(config: RunConfig) -> None:
    try:
        config.method.check_agents([agent.name for agent in config.agents])
    except ValueError as error:
        raise ConfigError(f"method.{error}") from error


def _check_offloaded_gradients(config: RunConfig) -> None:
    """Refuse to compare gradients that are offloaded between passes."""
    if config.method.trust_window is not None and config.learning.offload == "all":
        raise ConfigError(
            f"learning.offload=all keeps gradients off the device, and method.name={config.method.name!r} "
            "compares them there: use offload: weights, or another method"
        )


def _check_group_sizes(config: RunConfig) -> None:
    """Refuse groups of one: an advantage compares responses to one prompt."""
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


def _check_number_of_updates(config: RunConfig) -> None:
    """Refuse a mistyped number of updates: each is a backward pass, and the run would seem to hang."""
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


def _check_clip_schedule(config: RunConfig) -> None:
    if len(config.agents) == 1:
        return  # no cross-agent response to clip: one agent is exactly GSPO
    updates = updates_per_step(config)
    try:
        config.method.check_updates(updates)
    except ValueError as error:
        raise ConfigError(
            f"method: {error}. The {updates} updates come from {_where_updates_come_from(config)}"
        ) from error
