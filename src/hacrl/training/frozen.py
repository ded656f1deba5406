"""The worker of a frozen agent: the agent is sampled, the others learn from it, and it never changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hacrl.engines.answering import Answers
from hacrl.engines.base import Sampler, SyncReport
from hacrl.errors import CheckpointError
from hacrl.models.agent import Agent
from hacrl.training.worker import SamplingWorker, WorkerSettings

NEVER_UPDATED = SyncReport(policy_version=0, weight_sync="none", logprob_gap=0.0, restarts=0)


class FrozenWorker(SamplingWorker):
    """Generates a frozen agent's verified rollouts.

    ``identity`` says which model it is, so that a resumed run does not go on with another one. ``agent``: the
    model, if it is in this process.
    """

    policy_version = 0  # no update is ever made

    def __init__(
        self,
        name: str,
        sampler: Sampler,
        answers: Answers,
        settings: WorkerSettings,
        identity: str,
        agent: Agent | None = None,
    ) -> None:
        super().__init__(name, sampler, answers, settings)
        self.identity = identity
        self.agent = agent

    @property
    def device(self) -> str:
        """The device of the model; an endpoint's is not known and counts as ``cpu``."""
        return "cpu" if self.agent is None else str(self.agent.device)

    def publish(self) -> SyncReport:
        """Send the weights to an engine that has its own, once; they never change."""
        if self._published is None:
            self._published = NEVER_UPDATED if self.sampler.shares_weights else super().publish()
        return self._published

    def state_dict(self) -> dict[str, Any]:
        """Return what lasts from step to step; JSON-ready."""
        return {"policy_version": 0, "model": self.identity, "engine": self.sampler.state_dict()}

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: a resumed run loads the model from where this run has it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned. Raise CheckpointError if the model is another one."""
        if state["model"] != self.identity:
            raise CheckpointError(
                f"agent {self.name!r} is frozen, and its model has changed since the run began: "
                f"{state['model']} then, {self.identity} now. Restore the model, or start a new run"
            )
        self.sampler.load_state_dict(state["engine"])
