"""Environments of skyrl-gym in hacrl's text form (``pip install 'hacrl[skyrl-gym]'``).

The row's columns are the environment's ``extras``, as in SkyRL's data sets: ``reward_spec``, ``max_turns``
and whatever else the environment reads. A row without ``reward_spec`` gets one that names its ``answer`` as
the ground truth.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hacrl.errors import TaskError
from hacrl.plugins import is_reference, load_reference, optional_module

with suppress(ImportError):  # imported with this module, so that the processes of episodes share it
    importlib.import_module("skyrl_gym")


class SkyRLGym:
    """One environment of skyrl-gym, by its registered name or as ``module:Class``.

    ``config`` is its ``env_config``; ``max_turns`` stands in the extras of rows that have none of their own.
    """

    def __init__(
        self, environment: str, config: Mapping[str, Any] | None = None, max_turns: int | None = None
    ) -> None:
        self._make = _maker(environment)
        self._config = dict(config or {})
        self._max_turns = max_turns
        self._environment: Any = None

    def reset(self, prompt: str = "", **row: Any) -> str:
        """Make and initialise the environment; return what its ``init`` adds to the prompt."""
        extras = extras_of(row, self._max_turns)
        self._environment = self._make(env_config=self._config, extras=extras)
        asked = [{"role": "user", "content": prompt}]
        answered, _ = self._environment.init([dict(message) for message in asked])
        return added_text(asked, answered)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Give the environment an action; return its messages as text, the reward, and whether it is over."""
        result = self._environment.step(text)
        changed = result.get("postprocessed_action")
        if changed is not None and changed != text:
            raise ValueError(
                "the environment changes the agent's text (postprocessed_action), which would no longer be "
                "what was sampled; end responses with rollout.stop instead"
            )
        messages = result["observations"] or []
        observation = "\n".join(str(message["content"]) for message in messages)
        return observation, float(result["reward"]), bool(result["done"])


def extras_of(row: Mapping[str, Any], max_turns: int | None) -> dict[str, Any]:
    """Return what skyrl-gym calls extras: the row's columns, with a ground truth and a number of turns."""
    extras = {"extra_info": {}, **row}
    extras.setdefault("reward_spec", {"method": "rule", "ground_truth": row.get("answer", "")})
    if max_turns is not None:
        extras.setdefault("max_turns", max_turns)
    return extras


def added_text(asked: Sequence[Mapping[str, str]], answered: Sequence[Mapping[str, str]]) -> str:
    """Return what ``init`` has added to the last message. Raise ValueError if it changed anything else."""
    before, after = asked[-1]["content"], answered[-1]["content"] if answered else ""
    if list(answered[:-1]) != list(asked[:-1]) or not after.startswith(before):
        raise ValueError(
            "the environment's init changes the conversation; only text added to the last message is possible"
        )
    return after[len(before) :]


def _maker(name: str) -> Any:
    gym = optional_module("skyrl_gym", extra="skyrl-gym", needed_for=f"environment {name!r} of skyrl-gym")
    if is_reference(name):
        return load_reference(name, "environment", TaskError)
    if name not in gym.registry:
        raise TaskError(
            f"environment: skyrl-gym has no {name!r}; it has {', '.join(sorted(gym.registry))}, or give "
            "package.module:Class"
        )

    def make(**options: Any) -> Any:
        return gym.make(name, **options)

    return make
