"""Play one episode with an environment: calls come as plain JSON, replies go as plain JSON.

The player runs where the environment runs: in the episode's own process, or in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import random
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, get_origin, get_type_hints

from hacrl.environments.schemas import tool_of
from hacrl.plain_text import printable

LONGEST_FAILURE = 500  # characters
_NOT_TOOLS = ("reset", "get_reward")
_UNSAFE = re.compile("[\0\ud800-\udfff]")  # tokenizers and UTF-8 cannot hold lone surrogates


class BadEnvironmentError(Exception):
    """The environment does not keep to the interface; the message says in what."""


class Player:
    """One episode. No call raises: a reply with the key ``failure`` says what went wrong."""

    def __init__(
        self,
        factory: Callable[..., Any],
        options: Mapping[str, Any],
        longest: int,
        *,
        seeds_global_generators: bool,
    ) -> None:
        """``longest``: the limit ``observation_characters``."""
        self._factory, self._options, self._longest = factory, options, longest
        self._seeds_global_generators = seeds_global_generators
        self._environment: Any = None
        self._is_text = False
        self._tools: dict[str, Callable[..., Any]] = {}
        self._runner: asyncio.Runner | None = None

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one call: ``describe``, ``start``, ``act`` or ``finish``."""
        calls: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "describe": self._describe,
            "start": self._start,
            "act": self._act,
            "finish": self._finish,
        }
        try:
            return calls[message["call"]](message)
        except BadEnvironmentError as error:
            return _failure(str(error))
        except MemoryError:
            return _failure("ran out of memory (the limit is memory)")
        except BaseException as error:  # SystemExit too: an environment may raise anything
            return _failure(_description(error))

    def close(self) -> None:
        """Close the event loop, if there is one."""
        if self._runner is not None:
            self._runner.close()

    def _describe(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._make()
        tools = []
        for name, method in self._tools.items():
            try:
                tools.append(asdict(tool_of(method, name)))
            except Exception as error:  # type hints are the user's code, too
                raise BadEnvironmentError(f"cannot describe its tools: {error}") from error
        reset = getattr(self._environment, "reset", None)
        kinds = inspect.Parameter
        parameters = [] if reset is None else inspect.signature(reset).parameters.values()
        return {
            "tools": tools,
            "is_text": self._is_text,
            "has_reward": callable(getattr(self._environment, "get_reward", None)),
            "required_columns": [
                parameter.name
                for parameter in parameters
                if parameter.default is kinds.empty
                and parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
            ],
        }

    def _make(self) -> None:
        """Make the environment, and find out which form it has."""
        environment = self._environment = self._await(self._factory(**self._options))
        methods = dict(inspect.getmembers(type(environment), inspect.isfunction))
        self._is_text = "step" in methods and ("observe" in methods or _returns_tuple(methods["step"]))
        if not self._is_text and "reset" not in methods:
            raise BadEnvironmentError(
                f"of type {type(environment).__name__} has no method reset, which begins an episode; and it "
                "is no text environment with step and observe either"
            )
        if not self._is_text:
            self._tools = {
                name: getattr(environment, name)
                for name in methods
                if name not in _NOT_TOOLS and not name.startswith("_")
            }

    def _start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._seeds_global_generators:
            _seed_global_generators(message["seed"])
        self._make()
        opening = None
        reset = getattr(self._environment, "reset", None)
        if reset is not None:
            opening = self._await(reset(**_accepted(reset, message["row"])))
        if opening is None and self._is_text and hasattr(self._environment, "observe"):
            opening = self._await(self._environment.observe())
        if opening is not None and not isinstance(opening, str):
            raise BadEnvironmentError(
                f"began with an observation of type {type(opening).__name__}; hacrl reads text only"
            )
        return {"opening": self._cut(opening or "")}

    def _act(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_text:
            return self._step(message["content"])
        results, errors = [], 0
        for name, arguments in message["tool_calls"]:
            text, is_error = self._call_tool(name, arguments)
            results.append(["tool", self._cut(text), name])
            errors += is_error
        done = getattr(self._environment, "done", False) is True
        return {"turns": results, "done": done, "tool_errors": errors}

    def _call_tool(self, name: str, arguments: str) -> tuple[str, bool]:
        """Return the result of one call as text, and whether it is an error. Texts are as in TRL."""
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            return str(self._await(self._tools[name](**json.loads(arguments)))), False
        except MemoryError:
            raise  # not the agent's mistake, and the environment's state is unreliable
        except Exception as error:  # the agent may call a tool with anything
            return str({"error": _text_of(error)}), True

    def _step(self, text: str) -> dict[str, Any]:
        result = self._await(self._environment.step(text))
        if not isinstance(result, tuple) or len(result) not in (3, 4, 5):
            raise BadEnvironmentError("step must return (observation, reward, done)")
        # Gym returns a dictionary of facts as well; Gymnasium also tells "terminated" from "truncated".
        observation, reward = result[:2]
        done = bool(result[2] or (len(result) == 5 and result[3]))
        if observation is None:
            observation = ""
        if not isinstance(observation, str):
            raise BadEnvironmentError(
                f"step returned an observation of type {type(observation).__name__}; hacrl reads text only"
            )
        return {
            "turns": [["user", self._cut(observation), ""]],
            "reward": _number("step", reward),
            "done": done,
        }

    def _finish(self, message: Mapping[str, Any]) -> dict[str, Any]:
        get_reward = getattr(self._environment, "get_reward", None)
        if get_reward is None:
            return {"reward": None}
        return {"reward": _number("get_reward", self._await(get_reward()))}

    def _await(self, result: Any) -> Any:
        """Return the result, of a coroutine once it is done. All run in one event loop."""
        if not inspect.isawaitable(result):
            return result
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await result

        return self._runner.run(wait())

    def _cut(self, text: str) -> str:
        """Return the text without what tokenizers cannot hold, at most as long as the limit."""
        if len(text) > self._longest:
            text = f"{text[: self._longest]}\n[cut: {len(text)} characters in all]"
        return _UNSAFE.sub("\ufffd", text)


def _returns_tuple(method: Callable[..., Any]) -> bool:
    try:
        returned = get_type_hints(method).get("return")
    except Exception:  # annotations are the user's code
        returned = method.__annotations__.get("return")
    return returned is tuple or get_origin(returned) is tuple or str(returned).lower().startswith("tuple")


def _accepted(method: Callable[..., Any], row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of the row that a method has parameters for."""
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return row
    return {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}


def _seed_global_generators(seed: int) -> None:
    """Seed the generators that environments draw from without saying so."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def _number(method: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadEnvironmentError(f"{method} gave {value!r:.100} as the reward, which is no number") from None
    if not math.isfinite(number):
        raise BadEnvironmentError(f"{method} gave {number} as the reward, which is not finite")
    return number


def _description(error: BaseException) -> str:
    """Return what was raised and where, e.g. ``raised ValueError: no level (game.py, line 12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}, line {frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {_text_of(error)[: LONGEST_FAILURE // 2]}{place}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # a method of the user's own class
        return "an error without a text"


def _failure(text: str) -> dict[str, Any]:
    return {"failure": printable(text)[:LONGEST_FAILURE]}
