"""A rank of a sharded agent that does what rank 0 announces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hacrl.models.agent import Agent
from hacrl.models.logprobs import checking_pass, plain_logprobs, response_logprobs
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharding import weight_groups
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Sampling

END = "end"  # the announcement after which followers leave


class Follower:
    """One rank's agent and learner. Every method is a call that rank 0 makes as well."""

    def __init__(self, group: RankGroup, agent: Agent, learner: Learner) -> None:
        self._group, self._agent, self._learner = group, agent, learner
        self._calls: dict[str, Callable[..., object]] = {
            "learn": self._learn,
            "load_learner_state": learner.load_state_dict,
            "optimizer_tensors": learner.optimizer.tensors,
            "load_optimizer_tensors": lambda: learner.optimizer.load_tensors({}),
            "gather_weights": self._gather_weights,
            "checking_pass": self._checking_pass,
        }

    def follow(self) -> None:
        """Make every call that rank 0 announces, until it announces the end."""
        while True:
            verb, arguments = self._group.next_command()
            if verb == END:
                return
            try:
                self._calls[verb](**arguments)
            except BaseException as error:
                self._group.report_failure(error)
                raise

    def _learn(self, samples: Sequence[dict[str, Any]], **arguments: Any) -> None:
        self._learner.learn(list(map(_sample, samples)), **arguments)

    def _gather_weights(self) -> None:
        for _ in weight_groups(self._agent.model):
            pass

    def _checking_pass(self, pairs: Sequence[Any], sampling: dict[str, Any], plain: bool) -> None:
        model, wanted = self._agent.model, Sampling(**sampling)
        with checking_pass(model, pairs, wanted, plain=plain):
            (plain_logprobs if plain else response_logprobs)(model, pairs, wanted, self._agent.device)


def _sample(data: dict[str, Any]) -> LearnerSample:
    """Return a sample from plain JSON values, which know lists alone."""
    tuples: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
    }
    return LearnerSample(**tuples)
