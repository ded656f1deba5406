"""Runs all checks after every step, and says each symptom once per episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hacrl.config.schema import RunConfig
from hacrl.training.health import policy, responses, rewards, sharing, step_size, tokenizers
from hacrl.training.health.symptoms import StepView
from hacrl.training.metrics import StepReport

CHECKS = (
    *rewards.CHECKS,
    *responses.CHECKS,
    *sharing.CHECKS,
    *tokenizers.CHECKS,
    *policy.CHECKS,
    *step_size.CHECKS,
)
# A symptom that was noted and is gone for so many steps is noted again if it returns: a number that moves
# around its threshold gives one note, not one every other step.
QUIET_STEPS = 5


@dataclass
class Episode:
    """A symptom that lasts."""

    seen: int = 0  # steps with the symptom, in a row until it was noted
    missed: int = 0  # steps without it since it was seen last
    noted: bool = False


class HealthMonitor:
    """Follows the symptoms of all agents. Equal reports give equal notes, wherever a run was resumed."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._episodes: dict[str, Episode] = {}  # by "check/agent/partner"
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
                episode = self._episodes.setdefault(key, Episode())
                episode.seen, episode.missed = episode.seen + 1, 0
                if episode.seen >= check.steps and not episode.noted:
                    episode.noted = True
                    lasting = f". Seen in {check.steps} steps in a row" if check.steps > 1 else ""
                    notes.append(f"{symptom.note}{lasting}")
        self._end_episodes(present)
        return notes

    def _end_episodes(self, present: set[str]) -> None:
        for key in self._episodes.keys() - present:
            episode = self._episodes[key]
            episode.missed += 1
            if not episode.noted or episode.missed >= QUIET_STEPS:
                del self._episodes[key]

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes as JSON values, for exact resume."""
        episodes = {key: asdict(self._episodes[key]) for key in sorted(self._episodes)}
        return {"episodes": episodes, "first_entropy": dict(self._first_entropy)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._episodes = {key: Episode(**episode) for key, episode in state["episodes"].items()}
        self._first_entropy = dict(state["first_entropy"])
