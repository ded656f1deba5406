"""What is done of a step that is not finished: enough to go on with it, in this process or in a later one.

What of a training run lasts from step to step, and how it is written down and read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import Tensor

from hacrl.algorithms.capability import CapabilityTracker
from hacrl.errors import CheckpointError
from hacrl.rollouts.log import RolloutLog
from hacrl.tasks.splits import ProblemStream
from hacrl.training.health import CollapseDetector
from hacrl.training.metrics import LearnReport, RetokeniseReport, SourceReport
from hacrl.training.worker import Participant
from hacrl.types import Problem, VerifiedRollout


@dataclass
class StepUnderWay:
    """Rollouts of the agents that have answered, reports of those that have learnt."""

    step: int
    rollouts: dict[str, list[VerifiedRollout]] = field(default_factory=dict)
    learnt: dict[str, LearnReport] = field(default_factory=dict)

    @property
    def phases(self) -> int:
        """How many agents' phases are done."""
        return len(self.rollouts) + len(self.learnt)

    def as_json(self) -> dict[str, Any]:
        """Return plain values. Rollouts are in the log; only who has answered is said here."""
        return {
            "step": self.step,
            "answered": list(self.rollouts),
            "learnt": {agent: asdict(report) for agent, report in self.learnt.items()},
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], problems: Sequence[Problem], log: RolloutLog | None
    ) -> StepUnderWay:
        """Rebuild what :meth:`as_json` described; ``problems`` are the step's, ``log`` holds its rollouts."""
        step = int(data["step"])
        rollouts = {}
        for agent in data["answered"]:
            if log is None or not log.has(step, agent):
                raise CheckpointError(
                    f"the rollouts of {agent} in step {step} are missing from the run's rollouts folder: the "
                    "checkpoint was taken in the middle of that step and needs them"
                )
            rollouts[agent] = log.load(step, agent, problems)
        return cls(step, rollouts, {agent: _report(one) for agent, one in data["learnt"].items()})


def _report(data: Mapping[str, Any]) -> LearnReport:
    """A learner's report from plain values; its parts are records again."""
    values = {one.name: data[one.name] for one in fields(LearnReport) if one.name in data}
    values["sources"] = {name: SourceReport(**one) for name, one in data["sources"].items()}
    values["retokenised"] = {name: RetokeniseReport(**one) for name, one in data["retokenised"].items()}
    return LearnReport(**values)


class TrainerState:
    """How far a run has come. Random draws are derived from names and steps: no random state is kept."""

    def __init__(
        self, participants: Sequence[Participant], capabilities: CapabilityTracker, collapse: CollapseDetector
    ) -> None:
        self.steps_done = 0
        self.evaluated = -1  # the last step that was
        self.noted: set[str] = set()  # agents a user was told about
        self.under_way: StepUnderWay | None = None
        self._participants = participants
        self._capabilities = capabilities
        self._collapse = collapse
        self._capabilities_before = capabilities.state_dict()  # before the step under way

    def begin(self, step: int) -> StepUnderWay:
        """A fresh step, or what an interrupted run had done of it."""
        self._capabilities_before = self._capabilities.state_dict()
        if self.under_way is None:
            self.under_way = StepUnderWay(step)
        assert self.under_way.step == step, f"step {self.under_way.step} is under way, not {step}"
        return self.under_way

    def end(self) -> None:
        """The step under way is done."""
        assert self.under_way is not None
        self.steps_done = self.under_way.step
        self.under_way = None

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on, but for tensors; JSON-ready."""
        agents = {
            one.name: {
                "policy_version": one.agent.policy_version,
                "learner": one.learner.state_dict(),
                "engine": one.engine.state_dict(),
            }
            for one in self._participants
        }
        under_way = self.under_way
        return {
            "steps_done": self.steps_done,
            "evaluated": self.evaluated,
            "capabilities": self._capabilities_before if under_way else self._capabilities.state_dict(),
            "noted": sorted(self.noted),
            "collapse": self._collapse.state_dict(),
            "agents": agents,
            "under_way": under_way.as_json() if under_way else None,
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Agent -> weights that are trained and the optimizer's moments, wherever they are; not copied."""
        return {one.name: one.learner.optimizer.tensors() for one in self._participants}

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        tensors: Mapping[str, Mapping[str, Tensor]],
        stream: ProblemStream,
        log: RolloutLog | None,
    ) -> None:
        """Go on where :meth:`state_dict` was taken.

        ``stream`` gives the problems of a step under way, ``log`` the rollouts of it.
        """
        self.steps_done, self.evaluated = state["steps_done"], state["evaluated"]
        self._capabilities.load_state_dict(state["capabilities"])
        self.noted = set(state["noted"])
        self._collapse.load_state_dict(state["collapse"])
        for one in self._participants:
            one.agent.policy_version = state["agents"][one.name]["policy_version"]
            one.learner.load_state_dict(state["agents"][one.name]["learner"])
            one.engine.load_state_dict(state["agents"][one.name]["engine"])
            one.learner.optimizer.load_tensors(tensors[one.name])
        if state["under_way"] is not None:
            problems = stream.batch(self.steps_done)
            self.under_way = StepUnderWay.from_json(state["under_way"], problems, log)
