"""Noticing that an agent's policy has collapsed: it earns nothing, says nothing, or never ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hacrl.types import VerifiedRollout

Signs = dict[str, int]  # sign -> steps in a row it has been seen
_WORDS = {
    "no_reward": "has had no reward",
    "no_text": "has said nothing",
    "no_stop": "has not ended a single response",
}


COLLAPSE_STEPS = 20  # in a row


class CollapseWatch:
    """Counts, agent by agent, for how long each sign has been there."""

    def __init__(self, agents: Sequence[str], *, steps: int | None = None, pauses: bool = False) -> None:
        self._steps = COLLAPSE_STEPS if steps is None else steps
        self._pauses = pauses
        self._seen: dict[str, Signs] = {agent: dict.fromkeys(_WORDS, 0) for agent in agents}
        self._told: set[str] = set()
        self.paused: set[str] = set()

    def look(self, rollouts: Mapping[str, Sequence[VerifiedRollout]]) -> list[str]:
        """Take in one step; sentences about agents that have collapsed now."""
        notes = []
        for agent, verified in rollouts.items():
            self._count(agent, verified)
            bad = [sign for sign, steps in self._seen[agent].items() if steps >= self._steps]
            if bad and agent not in self._told:
                self._told.add(agent)
                notes.append(self._sentence(agent, bad))
                if self._pauses:
                    self.paused.add(agent)
            elif not bad:
                self._told.discard(agent)
        return notes

    def _count(self, agent: str, verified: Sequence[VerifiedRollout]) -> None:
        signs = {
            "no_reward": all(one.reward <= 0 for one in verified),
            "no_text": all(not one.rollout.text.strip() for one in verified),
            "no_stop": all(one.rollout.finish_reason != "stop" for one in verified),
        }
        for sign, is_there in signs.items():
            self._seen[agent][sign] = self._seen[agent][sign] + 1 if is_there else 0

    def _sentence(self, agent: str, signs: Sequence[str]) -> str:
        words = " and ".join(_WORDS[sign] for sign in signs)
        done = "It is paused; the others go on" if self._pauses else "pause_collapsed=true would leave it out"
        return f"agent {agent} {words} for {self._steps} steps: its policy has collapsed. {done}"

    def state_dict(self) -> dict[str, object]:
        """JSON-ready, for exact resume."""
        return {"seen": self._seen, "told": sorted(self._told), "paused": sorted(self.paused)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` gave."""
        seen, told, paused = state["seen"], state["told"], state["paused"]
        assert isinstance(seen, dict)
        assert isinstance(told, list)
        assert isinstance(paused, list)
        self._seen = {agent: dict(signs) for agent, signs in seen.items()}
        self._told, self.paused = set(told), set(paused)
