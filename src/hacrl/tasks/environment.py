"""The ``environment`` task: prompts whose responses are episodes with an environment, and its rewards."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from hacrl.environments.interface import (
    EnvironmentDescription,
    EnvironmentLimits,
    EnvironmentSource,
    Factory,
    Outcome,
)
from hacrl.environments.pool import EnvironmentPool
from hacrl.errors import TaskError
from hacrl.json_values import is_plain_json
from hacrl.tasks.columns import check_columns
from hacrl.tasks.data import DataOption, Table, load_table
from hacrl.tasks.episodes import EpisodeLimits
from hacrl.tasks.prompt_rows import PURPOSES, PromptReader
from hacrl.tasks.reward_functions import RewardFunction
from hacrl.tasks.reward_scores import RewardScorer
from hacrl.tasks.splits import Candidate, check_count, check_test_share, make_splits
from hacrl.types import Problem, Rollout, Turn, Verdict

NAMED = "environment"  # the column that names each row's environment, if there are several
ENVIRONMENT_REWARD = "environment"  # the name of its reward in verdicts
# An environment as a recipe or Python gives it: a class, a reference to one, or a mapping of
# ``factory`` and ``options`` (keyword arguments).
GivenEnvironment = Factory | str | Mapping[str, Any] | EnvironmentSource


class EnvironmentTask:
    """Rows of prompts, and one or several kinds of environment (docs/environments.md).

    ``environment``: one environment, or a mapping from the names in the column ``environment`` to several.
    ``functions``: further rewards, as of the ``reward`` task; they see whole conversations. A failed episode
    has reward 0. ``limits``: of calls to an environment (:class:`EnvironmentLimits`).
    """

    def __init__(
        self,
        *,
        environment: GivenEnvironment | Mapping[str, GivenEnvironment],
        train: DataOption,
        test: DataOption | None = None,
        test_share: float | None = None,
        columns: Mapping[str, str] | None = None,
        system: str | None = None,
        functions: str | RewardFunction | Sequence[str | RewardFunction] = (),
        weights: Sequence[float] | None = None,
        reward_range: Sequence[float] | None = None,
        max_turns: int = 8,
        max_turn_tokens: int | None = None,
        max_seconds: float | None = None,
        limits: Mapping[str, Any] | EnvironmentLimits | None = None,
        limit: int | None = None,
        name: str = "environment",
    ) -> None:
        self.name = name
        self.trainer_state: Any = None  # a run sets its own
        self.episode_limits = _episode_limits(max_turns, max_turn_tokens, max_seconds)
        self._limits = _environment_limits(limits)
        self._sources = _sources(environment)
        self._is_named = isinstance(self._sources, Mapping)
        share = check_test_share(test_share, test, default=0.0)
        check_count("limit", limit)
        reader = PromptReader(check_columns(columns, PURPOSES), needs_prompt=False)
        train_rows = _with_named(load_table("train", train), self._sources)
        test_rows = None if test is None else _with_named(load_table("test", test), self._sources)
        self._descriptions = self._describe()
        listed = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        has_reward = [one.name for one in self._descriptions.values() if one.has_reward or one.is_text]
        _check_rewards(self._descriptions.values(), has_reward, bool(listed))
        own = [ENVIRONMENT_REWARD] if has_reward else []
        self._scorer = RewardScorer(listed, weights, reward_range, own)
        self._has_own_reward = bool(own)
        self.max_reward: float | None = self._scorer.max_reward
        candidates = self._candidates(reader, train_rows, system)
        held_out = None if test_rows is None else self._candidates(reader, test_rows, system)
        self._python_columns = reader.python_columns
        splits = make_splits(candidates, held_out, test_share=share, limit=limit)
        self._train, self._test = splits.train, splits.test
        self.notes = (*splits.notes, *_notes_on_columns(reader.python_columns.values()))

    @property
    def train(self) -> Sequence[Problem]:
        """Problems to train on, in a fixed shuffled order."""
        return self._train

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order; empty without ``test`` or ``test_share``."""
        return self._test

    def open_environments(self) -> EnvironmentPool:
        """Return a new pool of the task's environments; nothing starts before its first use."""
        return EnvironmentPool(self._sources, self._limits)

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return the verdict of every episode; of a failed one, reward 0 and what failed."""
        verdicts = [_failed(rollout) for rollout in rollouts]
        whole = [rollout for rollout in rollouts if not rollout.has_failed]
        scored = iter(self._scored(whole) if whole else ())
        return [next(scored) if verdict is None else verdict for verdict in verdicts]

    def self_test(self) -> None:
        """Play the beginning and the end of one episode in each environment; raise TaskError if one fails."""
        first = {problem.environment: problem for problem in reversed((*self._train, *self._test))}
        with self.open_environments() as pool:
            pool.check()
            for key, problem in enumerate(first.values()):
                pool.start(key, problem)
            opened = _outcomes(pool, len(first))
            self._check_outcomes(first, opened, "reset")
            for key in opened:
                pool.finish(key)
            ended = _outcomes(pool, len(first))
            self._check_outcomes(first, ended, "get_reward")
            for key, environment in enumerate(first):
                if self._descriptions[environment].has_reward and ended[key].reward is None:
                    raise self._error(environment, "get_reward gave no number")

    def close(self) -> None:
        """End the thread that awaits ``async`` reward functions, if there is one."""
        self._scorer.close()

    def _describe(self) -> dict[str, EnvironmentDescription]:
        with self.open_environments() as pool:
            return {name: pool.describe(name) for name in pool.names}

    def _candidates(self, reader: PromptReader, table: Table, system: str | None) -> list[Candidate]:
        """Return every row as a candidate with the tools of its environment."""
        found = []
        for candidate in reader.candidates(table):
            problem = candidate.problem
            columns = dict(problem.fields)
            environment = columns.pop(NAMED) if self._is_named else ""
            self._check_columns(table, environment, {*columns, "prompt"})
            context = problem.context
            if system is not None:
                context = (Turn("system", system), *context)
            problem = replace(
                problem,
                fields=columns,
                context=context,
                environment=environment,
                tools=self._descriptions[environment].tools,
            )
            question = self._question(candidate.question, environment, columns)
            found.append(replace(candidate, question=question, problem=problem))
        return found

    def _question(self, prompt: str, environment: str, columns: Mapping[str, Any]) -> str:
        """Return what tells training and held-out episodes apart: the prompt and what reset makes of the row.

        Rows may all have one prompt, or none. Of a reset that names columns, only these count, so that e.g.
        a row's number does not make a repeated question a new one.
        """
        named = [name for name in self._descriptions[environment].required_columns if name in columns]
        return json.dumps(
            [environment, prompt, {name: columns[name] for name in named or columns}], sort_keys=True
        )

    def _check_columns(self, table: Table, environment: str, columns: Collection[str]) -> None:
        missing = [name for name in self._descriptions[environment].required_columns if name not in columns]
        if missing:
            raise table.error(
                f"has no column {missing[0]!r}, which reset of {_key(environment)} needs; add it, or give "
                "the parameter a default"
            )

    def _scored(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        problems = [rollout.problem for rollout in rollouts]
        rows = [self._python_columns.get(problem.id, problem.fields) for problem in problems]
        columns = dict.fromkeys(key for row in rows for key in row)
        token_ids = [list(rollout.token_ids) for rollout in rollouts]
        arguments = {
            "prompts": [_prompt(rollout) for rollout in rollouts],
            "completions": [_completion(rollout) for rollout in rollouts],
            "completion_ids": token_ids,
            **{key: [row.get(key) for row in rows] for key in columns},
            "trainer_state": self.trainer_state,
        }
        own = [[_reward(rollout) for rollout in rollouts]] if self._has_own_reward else []
        return self._scorer.verdicts(problems, arguments, token_ids, own)

    def _check_outcomes(
        self, environments: Mapping[str, Problem], outcomes: Mapping[int, Outcome], method: str
    ) -> None:
        for key, (environment, problem) in enumerate(environments.items()):
            if outcomes[key].failure:
                raise self._error(
                    environment, f"{method} failed with problem {problem.id!r}: it {outcomes[key].failure}"
                )

    def _error(self, environment: str, message: str) -> TaskError:
        return TaskError(f"{_key(environment)}: {message}; correct the environment or the data")


def _key(environment: str) -> str:
    return f"environment.{environment}" if environment else "environment"


def _outcomes(pool: EnvironmentPool, count: int) -> dict[int, Outcome]:
    """Wait for the outcomes of so many calls."""
    found: dict[int, Outcome] = {}
    while len(found) < count:
        found.update(pool.wait())
    return found


def _reward(rollout: Rollout) -> float | None:
    assert rollout.episode is not None, "the rollout is an episode"
    return rollout.episode.reward


def _failed(rollout: Rollout) -> Verdict | None:
    """Return the verdict of a failed episode; None for any other."""
    episode = rollout.episode
    if episode is None or episode.end != "failed":
        return None
    return Verdict(0.0, "timeout" if episode.failure_kind == "timeout" else "crash")


def _prompt(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the prompt as messages, with what the environment's reset added."""
    problem, episode = rollout.problem, rollout.episode
    opening = "" if episode is None else episode.opening
    turns = (*problem.context, Turn("user", problem.prompt + opening))
    return [turn.as_message() for turn in turns]


def _completion(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the agent's turns and the environment's answers as messages."""
    return [turn.as_message() for segment in rollout.segments for turn in segment.turns]


def _sources(
    given: GivenEnvironment | Mapping[str, GivenEnvironment],
) -> Factory | str | EnvironmentSource | dict[str, Factory | str | EnvironmentSource]:
    """Return what the pool takes: one environment, or several by name."""
    if isinstance(given, Mapping) and "factory" not in given:
        if not given:
            raise TaskError("environment: is empty; name at least one environment")
        return {str(name): _source(f"environment.{name}", one) for name, one in given.items()}
    return _source("environment", given)


def _source(key: str, given: Any) -> Factory | str | EnvironmentSource:
    if isinstance(given, EnvironmentSource | str):
        return given
    if callable(given):
        factory: Factory = given
        return factory
    if not isinstance(given, Mapping):
        raise TaskError(f"{key}: must be a class or a reference such as package.module:Class, not {given!r}")
    for part in given:
        if part not in ("factory", "options"):
            raise TaskError(f"{key}.{part}: unknown key; it takes factory, options")
    made_by, options = given.get("factory"), given.get("options") or {}
    if not isinstance(made_by, str) and not callable(made_by):
        raise TaskError(f"{key}.factory: must be a class or a reference to one, not {made_by!r}")
    if not isinstance(options, Mapping):
        raise TaskError(f"{key}.options: must map keyword arguments to values, not {options!r}")
    return EnvironmentSource(made_by, dict(options))


def _with_named(table: Table, sources: Any) -> Table:
    """Return the table; raise TaskError for a row that names none of several environments."""
    if not isinstance(sources, Mapping):
        return table
    for row in table.rows:
        named = row.values.get(NAMED)
        if named not in sources:
            near = get_close_matches(str(named), list(sources), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"name one of {', '.join(sources)}"
            raise table.error(f"column {NAMED!r} is {named!r}; {hint}", row)
    return table


def _check_rewards(
    described: Iterable[EnvironmentDescription], with_reward: Sequence[str], has_functions: bool
) -> None:
    """Raise TaskError if an episode would have no reward at all."""
    without = [one.name for one in described if one.name not in with_reward]
    if without and not has_functions:
        raise TaskError(
            f"{_key(without[0])}: has no get_reward, so its episodes have no reward; give it a method "
            "get_reward(self) -> float, or give functions"
        )


def _notes_on_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a note on columns that environments do not get, because their values are not plain JSON."""
    names = {name for row in rows for name, value in row.items() if not is_plain_json(value)}
    if not names:
        return []
    columns = f"column{'s' * (len(names) > 1)} {', '.join(sorted(names))}"
    return [f"reset does not get the {columns}: some of the values are not plain JSON"]


def _episode_limits(turns: int, turn_tokens: int | None, seconds: float | None) -> EpisodeLimits:
    try:
        return EpisodeLimits(turns, turn_tokens, seconds)
    except (TypeError, ValueError) as error:
        raise TaskError(str(error)) from error


def _environment_limits(given: Mapping[str, Any] | EnvironmentLimits | None) -> EnvironmentLimits:
    if given is None or isinstance(given, EnvironmentLimits):
        return given or EnvironmentLimits()
    if not isinstance(given, Mapping):
        raise TaskError(f"limits: must be a mapping of keys to values, not {given!r}")
    known = [entry.name for entry in fields(EnvironmentLimits)]
    for key in given:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise TaskError(f"limits.{key}: unknown key; {hint}")
    try:
        return EnvironmentLimits(**given)
    except (TypeError, ValueError) as error:
        raise TaskError(f"limits: {error}") from error
