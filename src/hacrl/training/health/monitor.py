"""Runs all checks after every step, and says each symptom once per occurrence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hacrl.config.schema import RunConfig
from hacrl.training.health import episodes, policy, responses, rewards, sharing, step_size, tokenizers
from hacrl.training.health.symptoms import StepView
from hacrl.training.metrics import StepReport

CHECKS = (
    *rewards.CHECKS,
    *responses.CHECKS,
    *episodes.CHECKS,
    *sharing.CHECKS,
    *tokenizers.CHECKS,
    *policy.CHECKS,
    *step_size.CHECKS,
)
# A symptom that was noted and is gone for so many steps is noted again if it returns: a number that moves
# around its threshold gives one note, not one every other step.
QUIET_STEPS = 5


@dataclass
class Occurrence:
    """A symptom that lasts."""

    seen: int = 0  # steps with the symptom, in a row until it was noted
    missed: int = 0  # steps without it since it was seen last
    noted: bool = False


class HealthMonitor:
    """Follows the symptoms of all agents. Equal reports give equal notes, wherever a run was resumed."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._occurrences: dict[str, Occurrence] = {}  # by "check/agent/partner"
        self._first_entropy: dict[str, float] = {}

    def update(self, report: StepReport) -> list[str]:
        """Check one step's report; return a note for each symptom that has now lasted long enough."""
        for name, agent in report.agents.items():
            if agent.rollout.entropy is not None:
                self._first_entropy.setdefault(name, agent.rollout.entropy)
        view = StepView(report, self._config, self._first_entropy)
        notes = []
        present = set()
        for check in CHECKS:
            for symptom in check.find(view):
                key = f"{check.name}/{symptom.agent}/{symptom.partner}"
                present.add(key)
                occurrence = self._occurrences.setdefault(key, Occurrence())
                occurrence.seen, occurrence.missed = occurrence.seen + 1, 0
                if occurrence.seen >= check.steps and not occurrence.noted:
                    occurrence.noted = True
                    lasting = f". Seen in {check.steps} steps in a row" if check.steps > 1 else ""
                    notes.append(f"{symptom.note}{lasting}")
        self._end_occurrences(present)
        return notes

    def _end_occurrences(self, present: set[str]) -> None:
        for key in self._occurrences.keys() - present:
            occurrence = self._occurrences[key]
            occurrence.missed += 1
            if not occurrence.noted or occurrence.missed >= QUIET_STEPS:
                del self._occurrences[key]

    def state_dict(self) -> dict[str, Any]:
        """Return the symptoms as JSON values, for exact resume."""
        symptoms = {key: asdict(self._occurrences[key]) for key in sorted(self._occurrences)}
        return {"symptoms": symptoms, "first_entropy": dict(self._first_entropy)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._occurrences = {key: Occurrence(**occurrence) for key, occurrence in state["symptoms"].items()}
        self._first_entropy = dict(state["first_entropy"])
