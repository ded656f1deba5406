"""Environments of OpenEnv in hacrl's text form, in process (``pip install 'hacrl[openenv]'``).

No server runs: the environment's class is imported and its ``reset`` and ``step`` are called. Actions and
observations of OpenEnv are pydantic models; the agent writes an action as text or as a JSON object.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hacrl.errors import TaskError
from hacrl.plugins import load_reference, optional_module

with suppress(ImportError):  # imported with this module, so that the processes of episodes share it
    importlib.import_module("openenv.core")
_OWN_FIELDS = ("done", "reward", "metadata")  # of every observation of OpenEnv


class OpenEnv:
    """One environment class of OpenEnv, with the class of its actions.

    ``environment`` and ``action`` are ``module:Class``; ``options`` are the environment's keyword arguments.
    An action with a single required field takes the agent's whole text, unless the text is a JSON object
    with the action's fields. ``action_field`` names the field otherwise. ``observation_field`` names the one
    field that the agent sees; by default it sees all: the text of a single one, else JSON.
    """

    def __init__(
        self,
        environment: str,
        action: str,
        options: Mapping[str, Any] | None = None,
        action_field: str | None = None,
        observation_field: str | None = None,
    ) -> None:
        optional_module("openenv.core", extra="openenv", needed_for=f"environment {environment!r} of OpenEnv")
        self._environment = load_reference(environment, "environment", TaskError)(**dict(options or {}))
        self._action = load_reference(action, "action", TaskError)
        self._action_field = _text_field(self._action, action_field)
        self._observation_field = observation_field

    def reset(self, **row: Any) -> str:
        """Reset the environment with the row's columns that its ``reset`` takes, such as ``seed``."""
        taken = inspect.signature(self._environment.reset).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
        arguments = row if takes_any else {name: value for name, value in row.items() if name in taken}
        return self._text(self._environment.reset(**arguments))

    def step(self, text: str) -> tuple[str, float, bool]:
        """Make an action of the agent's text; a text that is none is answered with what is wrong."""
        try:
            action = self._parse(text)
        except ValueError as error:  # also pydantic's ValidationError
            return f"Error: {_brief(error)}", 0.0, False
        observation = self._environment.step(action)
        return self._text(observation), float(observation.reward or 0.0), bool(observation.done)

    def _parse(self, text: str) -> Any:
        """Return the action; raise ValueError if the text is none."""
        given = _json_object(text)
        if given is not None and (self._action_field is None or set(given) <= set(self._action.model_fields)):
            return self._action.model_validate(given)
        if self._action_field is None:
            needed = ", ".join(
                name for name, field in self._action.model_fields.items() if field.is_required()
            )
            raise ValueError(f"the action must be a JSON object with the fields {needed}")
        # pydantic turns the text into a number where the field is one
        return self._action.model_validate({self._action_field: text.strip()})

    def _text(self, observation: Any) -> str:
        """Return what the agent sees of an observation."""
        shown = {
            name: value
            for name, value in observation.model_dump(mode="json").items()
            if name not in _OWN_FIELDS
        }
        if self._observation_field is not None:
            shown = {self._observation_field: shown[self._observation_field]}
        if len(shown) == 1:
            (value,) = shown.values()
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return json.dumps(shown, ensure_ascii=False)


def _text_field(action: Any, given: str | None) -> str | None:
    """Return the field that takes the agent's text; None if an action must be written as JSON."""
    fields = action.model_fields
    if given is not None:
        if given not in fields:
            raise TaskError(f"action_field={given!r}: the action has the fields {', '.join(fields)}")
        return given
    required = [name for name, field in fields.items() if field.is_required()]
    return required[0] if len(required) == 1 and fields[required[0]].annotation in (str, int, float) else None


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _brief(error: ValueError) -> str:
    """Return pydantic's errors in one line, without links to its pages; the message of any other error."""
    listed = getattr(error, "errors", None)
    if listed is None:
        return str(error)
    parts = [f"{'.'.join(map(str, one['loc'])) or 'action'}: {one['msg']}" for one in listed()]
    return "; ".join(parts)
