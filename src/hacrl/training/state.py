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
    # of each round, the rollouts of the agents that have answered; the first round is always there
    rounds: list[dict[str, list[VerifiedRollout]]] = field(default_factory=lambda: [{}])
    syncs: dict[str, SyncReport | None] = field(default_factory=dict)  # of their engines' weights
    reports: dict[str, LearnReport] = field(default_factory=dict)  # of agents that have learnt

    @property
    def rollouts(self) -> dict[str, list[VerifiedRollout]]:
        """Agent -> its rollouts so far, of all rounds."""
        found: dict[str, list[VerifiedRollout]] = {}
        for answered in self.rounds:
            for agent, rollouts in answered.items():
                found.setdefault(agent, []).extend(rollouts)
        return found

    def round(self, number: int) -> dict[str, list[VerifiedRollout]]:
        """Return the rollouts of a round by agent, to be added to. Rounds begin one after the other."""
        if number == len(self.rounds):
            self.rounds.append({})
        return self.rounds[number]

    @property
    def phases(self) -> int:
        """Number of agents' phases that are done."""
        return sum(map(len, self.rounds)) + len(self.reports)

    def as_json(self) -> dict[str, Any]:
        """Return plain values. The rollouts themselves are in the rollout log."""
        return {
            "step": self.step,
            "answered": {agent: _sync_as_json(self.syncs.get(agent)) for agent in self.rounds[0]},
            "answered_later": [list(answered) for answered in self.rounds[1:]],
            "learnt": {agent: asdict(report) for agent, report in self.reports.items()},
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], problems: Sequence[Problem], log: RolloutLog | None
    ) -> StepProgress:
        """Rebuild what :meth:`as_json` returned. ``log`` holds the rollouts.

        ``problems`` are those that the step may have asked. Rounds after one with missing rollouts are left
        out: other rollouts may take the place of the missing ones, and call for other prompts.
        """
        step, has_learnt = int(data["step"]), bool(data["learnt"])
        rounds: list[dict[str, list[VerifiedRollout]]] = []
        for number, agents in enumerate([list(data["answered"]), *data["answered_later"]]):
            present = [agent for agent in agents if log is not None and log.has(step, agent, number)]
            if has_learnt and (missing := sorted(set(agents) - set(present))):
                raise CheckpointError(
                    f"the rollouts of {missing[0]} in step {step} are missing from the run's rollouts "
                    "folder: the checkpoint was taken in the middle of that step and needs them"
                )
            rounds.append({} if log is None else {k: log.load(step, k, problems, number) for k in present})
            if len(present) < len(agents):
                break
        syncs = {agent: _sync(data["answered"][agent]) for agent in rounds[0]}
        reports = {agent: _report(report) for agent, report in data["learnt"].items()}
        return cls(step, rounds, syncs, reports)


def _sync_as_json(sync: SyncReport | None) -> dict[str, Any] | None:
    return None if sync is None else asdict(sync)


def _sync(data: Mapping[str, Any] | None) -> SyncReport | None:
    return None if data is None else SyncReport(**data)


def _report(data: Mapping[str, Any]) -> LearnReport:
    """Return a learner's report from plain values."""
    values = {key.name: data[key.name] for key in fields(LearnReport) if key.name in data}
    values["sources"] = {name: SourceReport(**source) for name, source in data["sources"].items()}
    values["retokenised"] = {name: RetokeniseReport(**source) for name, source in data["retokenised"].items()}
    return LearnReport(**values)
