"""A rank of a sharded agent that does what rank 0 announces, from loading the agent to the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hacrl.config.load import build_config
from hacrl.config.schema import RunConfig
from hacrl.executors.learners import load_shards, make_learner
from hacrl.models.logprobs import checking_pass, plain_logprobs, response_logprobs
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.models.sharding import weight_groups
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Sampling


class RankFollower:
    """One rank's agent and learner. Every call is one that rank 0 makes as well, at the same time."""

    def __init__(self, group: RankGroup, device: str) -> None:
        self._group, self._device = group, device
        self._agent: ShardedAgent | None = None
        self._learner: Learner | None = None
        self._config: RunConfig | None = None
        self._calls: dict[str, Callable[..., object]] = {
            "load_shards": self._load_shards,
            "make_learner": self._make_learner,
            "learn": self._learn,
            "load_learner_state": lambda state: self.learner.load_state_dict(state),
            "optimizer_tensors": lambda: self.learner.optimizer.tensors(),
            "load_optimizer_tensors": lambda: self.learner.optimizer.load_tensors({}),
            "gather_weights": self._gather_weights,
            "checking_pass": self._checking_pass,
        }

    @property
    def agent(self) -> ShardedAgent:
        """This rank of the agent."""
        assert self._agent is not None, "rank 0 announces load_shards first"
        return self._agent

    @property
    def learner(self) -> Learner:
        """This rank of the learner."""
        assert self._learner is not None, "rank 0 announces make_learner before it learns"
        return self._learner

    def follow(self) -> None:
        """Make every call that rank 0 announces, until it announces the end."""
        while True:
            verb, arguments = self._group.next_command()
            if verb == "end":
                return
            try:
                self._calls[verb](**arguments)
            except BaseException as error:
                self._group.report_failure(error)
                raise

    def _load_shards(self, config: dict[str, Any]) -> None:
        self._config = run = build_config(config, "rank 0's config")
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        self._agent = load_shards(run, self._device, self._group)

    def _make_learner(
        self, max_reward: float | None, micro_batch_tokens: int | None, exact_sampler: bool
    ) -> None:
        assert self._config is not None
        (settings,) = [agent for agent in self._config.agents if agent.name == self.agent.name]
        self._learner = make_learner(
            self._config,
            settings,
            self.agent,
            max_reward,
            micro_batch_tokens=micro_batch_tokens,
            exact_sampler=exact_sampler,
        )

    def _learn(self, samples: Sequence[dict[str, Any]], **arguments: Any) -> None:
        self.learner.learn(list(map(_sample, samples)), **arguments)

    def _gather_weights(self) -> None:
        for _ in weight_groups(self.agent.model):
            pass

    def _checking_pass(self, pairs: Sequence[Any], sampling: dict[str, Any], plain: bool) -> None:
        model, wanted = self.agent.model, Sampling(**{**sampling, "stop": tuple(sampling["stop"])})
        with checking_pass(model, pairs, wanted, plain=plain):
            (plain_logprobs if plain else response_logprobs)(model, pairs, wanted, self.agent.device)


def _sample(data: dict[str, Any]) -> LearnerSample:
    """Return a sample from plain JSON values, which know lists alone."""
    tuples: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
    }
    return LearnerSample(**tuples)
