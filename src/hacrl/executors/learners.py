"""Load a sharded agent, and make an agent's learner, in its worker's process and in those of other ranks."""

from __future__ import annotations

from dataclasses import asdict, replace

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.models.agent import Agent
from hacrl.models.own_policy import rollout_limit
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.models.sharding import sharding_of
from hacrl.seeding import derive_seed
from hacrl.training.learner import Learner
from hacrl.training.offload import Transfers


def make_learner(
    config: RunConfig,
    settings: AgentSettings,
    agent: Agent,
    max_reward: float | None,
    *,
    micro_batch_tokens: int | None,
    exact_sampler: bool,
    transfers: Transfers | None = None,
) -> Learner:
    """Return one agent's learner. The ranks of a sharded agent make theirs at the same time."""
    sharding = sharding_of(agent.model)
    if sharding is not None:
        sharding.group.announce(
            "make_learner",
            lambda: {
                "max_reward": max_reward,
                "micro_batch_tokens": micro_batch_tokens,
                "exact_sampler": exact_sampler,
            },
        )
    learning = config.learning
    return Learner(
        agent,
        make_method(config.method, max_reward),
        replace(learning, micro_batch_tokens=micro_batch_tokens or learning.micro_batch_tokens),
        config.rollout.sampling,
        settings.lr,
        exact_sampler=exact_sampler,
        offload_to=transfers,
        max_policy_gap=rollout_limit(settings.vllm.max_logprob_gap),
    )


def load_shards(config: RunConfig, device: str, group: RankGroup) -> ShardedAgent:
    """Load this rank of an agent of the run. Rank 0 announces it to the other ranks."""
    group.announce("load_shards", lambda: {"config": asdict(config)})
    (settings,) = [agent for agent in config.agents if agent.name == group.agent]
    return ShardedAgent.load_shards(settings, device, group, derive_seed(config.seed, settings.name))
