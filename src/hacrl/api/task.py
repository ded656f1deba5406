"""The task of a Python user: reward functions with data, the name of a task, or a task object."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hacrl.api.config import HACRLConfig, plain_section
from hacrl.config.schema import TaskSettings
from hacrl.errors import ConfigError, TaskError
from hacrl.tasks.base import REQUIRED_MEMBERS, Task

# option of the reward task -> its name in the Python interface
_API_NAMES = {
    "functions": "reward_funcs",
    "environment": "environment_factory",
    "train": "train_dataset",
    "test": "eval_dataset",
    "weights": "reward_weights",
    "test_share": "eval_share",
}


@dataclass(frozen=True)
class TaskChoice:
    """A task as a section of the config, and the task object if there is one."""

    section: Mapping[str, Any]
    task: Task | None = None

    @property
    def held_out(self) -> int | None:
        """Number of held-out problems; None if it is not known yet."""
        return None if self.task is None else len(self.task.test)


def choose_task(
    task: Any,
    reward_funcs: Any,
    train_dataset: Any,
    eval_dataset: Any,
    args: HACRLConfig,
    environment_factory: Any = None,
) -> TaskChoice:
    """Return the chosen task; refuse arguments that contradict each other."""
    if task is not None:
        _refuse_with_task(reward_funcs, train_dataset, eval_dataset, environment_factory, args)
        return _given_task(task)
    if environment_factory is not None:
        return _environment_task(environment_factory, reward_funcs, train_dataset, eval_dataset, args)
    if args.episodes:
        raise ConfigError("episodes: there are no episodes without environment_factory; leave it out")
    if reward_funcs is None or train_dataset is None:
        raise ConfigError(
            "give reward_funcs and train_dataset, or give task: the name of a task such as 'gsm8k', or a "
            "task object"
        )
    return _reward_task(reward_funcs, train_dataset, eval_dataset, args)


def _given_task(task: Any) -> TaskChoice:
    if isinstance(task, str):
        return TaskChoice({"name": task})
    if isinstance(task, TaskSettings | Mapping):
        return TaskChoice(plain_section(task))
    lacking = [part for part in REQUIRED_MEMBERS if not hasattr(task, part)]
    if lacking or isinstance(task, type):
        given = f"the class {task.__name__}" if isinstance(task, type) else type(task).__name__
        without = f" without {', '.join(lacking)}" if lacking and not isinstance(task, type) else ""
        raise ConfigError(
            f"task: {given}{without} is not a task; give a name, TaskSettings, or an object with the "
            "attributes of hacrl.tasks.base.Task"
        )
    return TaskChoice({"name": f"object:{qualified_name(type(task))}"}, task)


def _refuse_with_task(*given: Any) -> None:
    *data, args = given
    options = [args.reward_weights, args.reward_range, args.eval_share, args.episodes or None]
    names = ["reward_funcs", "train_dataset", "eval_dataset", "environment_factory"]
    names += ["reward_weights", "reward_range", "eval_share", "episodes"]
    for name, value in zip(names, [*data, *options], strict=True):
        if value is not None:
            raise ConfigError(f"{name}: a task has its own data and rewards; leave out {name} or task")


def _reward_task(reward_funcs: Any, train: Any, test: Any, args: HACRLConfig) -> TaskChoice:
    from hacrl.tasks.rewards import RewardTask

    functions, given = _listed_functions(reward_funcs), _reward_options(args)
    try:
        task = RewardTask(functions=functions, train=train, test=test, **given)
    except TaskError as error:
        raise TaskError(_with_api_names(str(error))) from error
    recorded = {"functions": [_reference(function) for function in functions]}
    return _recorded("reward", recorded, train, test, given, task)


def _environment_task(
    environment_factory: Any, reward_funcs: Any, train: Any, test: Any, args: HACRLConfig
) -> TaskChoice:
    from hacrl.tasks.environment import EnvironmentTask

    if train is None:
        raise ConfigError(
            "train_dataset: missing; environment_factory needs rows, one per problem. An environment that "
            'makes its own problems gets e.g. train_dataset=[{"seed": 0}, {"seed": 1}, ...]'
        )
    functions = [] if reward_funcs is None else _listed_functions(reward_funcs)
    given = {**_reward_options(args), **_episode_options(args)}
    try:
        task = EnvironmentTask(
            environment=environment_factory, functions=functions, train=train, test=test, **given
        )
    except TaskError as error:
        raise TaskError(_with_api_names(str(error))) from error
    is_named = isinstance(environment_factory, Mapping)
    recorded: dict[str, Any] = {
        "environment": {str(name): _described_factory(one) for name, one in environment_factory.items()}
        if is_named
        else _described_factory(environment_factory)
    }
    if functions:
        recorded["functions"] = [_reference(function) for function in functions]
    return _recorded("environment", recorded, train, test, given, task)


def _episode_options(args: HACRLConfig) -> dict[str, Any]:
    """Return the options of episodes; raise ConfigError for unknown ones."""
    known = ("max_turns", "max_turn_tokens", "max_seconds", "limits", "system")
    for key in args.episodes:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise ConfigError(f"HACRLConfig: episodes.{key}: unknown key; {hint}")
    return dict(plain_section(args.episodes))


def _described_factory(factory: Any) -> Any:
    return plain_section(factory) if isinstance(factory, str | Mapping) else _reference(factory)


def _listed_functions(reward_funcs: Any) -> list[Any]:
    is_one = isinstance(reward_funcs, str) or callable(reward_funcs)
    if not is_one and not isinstance(reward_funcs, Iterable):
        raise ConfigError(
            f"reward_funcs: must be a function or a list of functions, not {type(reward_funcs).__name__}"
        )
    return [reward_funcs] if is_one else list(reward_funcs)


def _reward_options(args: HACRLConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "weights": _plain(args.reward_weights),
        "reward_range": _plain(args.reward_range),
        "test_share": args.eval_share,
    }
    return {key: value for key, value in options.items() if value is not None}


def _recorded(
    name: str, options: dict[str, Any], train: Any, test: Any, given: Mapping[str, Any], task: Task
) -> TaskChoice:
    """Return the task, with its options as ``config.yaml`` records them."""
    data = {"train": _described(train)}
    if test is not None:
        data["test"] = _described(test)
    plain = {
        key: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in given.items()
    }
    return TaskChoice({"name": name, "options": {**options, **data, **plain}}, task)


def _plain(numbers: Any) -> Any:
    """Return an array or tensor as a list."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers


def _with_api_names(message: str) -> str:
    first_word = re.match(r"\w+", message)
    name = _API_NAMES.get(first_word.group()) if first_word else None
    return name + message[len(first_word.group()) :] if first_word and name else message


def _reference(function: str | Callable[..., Any]) -> str:
    """Describe a function in config.yaml as ``module:name``, which works there if it can be imported."""
    return function if isinstance(function, str) else qualified_name(function, separator=":")


def qualified_name(thing: Any, separator: str = ".") -> str:
    """Return ``package.module.Name`` of a thing, of the function of a partial, or of an object's class."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}{separator}{named.__qualname__}"


def _described(data: Any) -> Any:
    """Describe data in config.yaml: its location, or that it was given as an object."""
    if isinstance(data, str | Mapping):
        return plain_section(data)
    if isinstance(data, Path):
        return str(data)
    rows = f" of {len(data)} rows" if hasattr(data, "__len__") else ""
    return f"object:{type(data).__name__}{rows}"
