"""What is done of a step that is not finished: enough to go on with it, in this process or in a later one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hacrl.errors import CheckpointError
from hacrl.learning.reports import LearnReport, RetokeniseReport, SourceReport
from hacrl.rollouts.log import RolloutLog
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
