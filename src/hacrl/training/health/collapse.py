"""Detect that an agent's policy has collapsed: no reward, no text, or no response that stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hacrl.types import VerifiedRollout

_SYMPTOMS = {
    "no_reward": "has had no reward",
    "no_text": "has written no text",
    "no_stop": "has not ended a single response",
}


COLLAPSE_STEPS = 20  # in a row, with a symptom of a collapsed policy


class CollapseDetector:
    """Counts for each agent how many steps in a row it has shown each symptom."""

    def __init__(self, agents: Sequence[str], *, steps: int | None = None, pauses: bool = False) -> None:
        self._steps = COLLAPSE_STEPS if steps is None else steps
        self._pauses = pauses
        # agent -> symptom -> steps in a row
        self._counts: dict[str, dict[str, int]] = {agent: dict.fromkeys(_SYMPTOMS, 0) for agent in agents}
        self._reported: set[str] = set()
        self.paused: set[str] = set()

    def update(self, rollouts: Mapping[str, Sequence[VerifiedRollout]]) -> list[str]:
        """Count one step; return a note for each agent that has now collapsed."""
        notes = []
        for agent, verified in rollouts.items():
            self._count(agent, verified)
            found = [name for name, steps in self._counts[agent].items() if steps >= self._steps]
            if found and agent not in self._reported:
                self._reported.add(agent)
                notes.append(self._note(agent, found))
                if self._pauses:
                    self.paused.add(agent)
            elif not found:
                self._reported.discard(agent)
        return notes

    def _count(self, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        verified = [one for one in rollouts if not one.rollout.has_failed]
        if not verified:  # environments that fail say nothing about the policy
            return
        shown = {
            "no_reward": all(response.reward <= 0 for response in verified),
            "no_text": all(not response.rollout.text.strip() for response in verified),
            "no_stop": all(response.rollout.finish_reason == "length" for response in verified),
        }
        for symptom, is_shown in shown.items():
            self._counts[agent][symptom] = self._counts[agent][symptom] + 1 if is_shown else 0

    def _note(self, agent: str, symptoms: Sequence[str]) -> str:
        listed = " and ".join(_SYMPTOMS[symptom] for symptom in symptoms)
        action = (
            "The agent is paused; the other agents continue"
            if self._pauses
            else "Set pause_collapsed=true to pause such agents"
        )
        return f"agent {agent} {listed} for {self._steps} steps: its policy has collapsed. {action}"

    def state_dict(self) -> dict[str, object]:
        """Return the counts as JSON values, for exact resume."""
        counts = {agent: dict(symptoms) for agent, symptoms in self._counts.items()}
        return {"counts": counts, "reported": sorted(self._reported), "paused": sorted(self.paused)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        counts, reported, paused = state["counts"], state["reported"], state["paused"]
        assert isinstance(counts, dict)
        assert isinstance(reported, list)
        assert isinstance(paused, list)
        self._counts = {agent: dict(symptoms) for agent, symptoms in counts.items()}
        self._reported, self.paused = set(reported), set(paused)
