"""How far a run has come: whole steps, and what is done of the step under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hacrl.engines.base import SyncReport
from hacrl.errors import CheckpointError
from hacrl.rollouts.log import RolloutLog
from hacrl.training.metrics import LearnReport, RetokeniseReport, SourceReport
from hacrl.types import Problem, VerifiedRollout


@dataclass
class StepProgress:
    """What is done of a step: enough to finish it in this process or in a later one."""

    step: int
    rollouts: dict[str, list[VerifiedRollout]] = field(default_factory=dict)  # of agents that have answered
    syncs: dict[str, SyncReport | None] = field(default_factory=dict)  # of their engines' weights
    reports: dict[str, LearnReport] = field(default_factory=dict)  # of agents that have learnt

    @property
    def phases(self) -> int:
        """Number of agents' phases that are done."""
        return len(self.rollouts) + len(self.reports)

    def as_json(self) -> dict[str, Any]:
        """Return plain values. The rollouts themselves are in the rollout log."""
        return {
            "step": self.step,
            "answered": {agent: _sync_as_json(self.syncs.get(agent)) for agent in self.rollouts},
            "learnt": {agent: asdict(report) for agent, report in self.reports.items()},
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], problems: Sequence[Problem], log: RolloutLog | None
    ) -> StepProgress:
        """Rebuild what :meth:`as_json` returned. ``problems`` are the step's; ``log`` holds its rollouts."""
        step = int(data["step"])
        rollouts, syncs = {}, {}
        for agent, sync in data["answered"].items():
            if log is None or not log.has(step, agent):
                if not data["learnt"]:
                    continue  # no agent has learnt from the rollouts, so others may take their place
                raise CheckpointError(
                    f"the rollouts of {agent} in step {step} are missing from the run's rollouts folder: the "
                    "checkpoint was taken in the middle of that step and needs them"
                )
            rollouts[agent] = log.load(step, agent, problems)
            syncs[agent] = None if sync is None else SyncReport(**sync)
        reports = {agent: _report(report) for agent, report in data["learnt"].items()}
        return cls(step, rollouts, syncs, reports)


def _sync_as_json(sync: SyncReport | None) -> dict[str, Any] | None:
    return None if sync is None else asdict(sync)


def _report(data: Mapping[str, Any]) -> LearnReport:
    """Return a learner's report from plain values."""
    values = {key.name: data[key.name] for key in fields(LearnReport) if key.name in data}
    values["sources"] = {name: SourceReport(**source) for name, source in data["sources"].items()}
    values["retokenised"] = {name: RetokeniseReport(**source) for name, source in data["retokenised"].items()}
    return LearnReport(**values)
