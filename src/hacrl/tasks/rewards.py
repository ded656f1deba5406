"""The ``reward`` task: any prompts, judged by Python reward functions with TRL's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.errors import TaskError
from hacrl.tasks.columns import check_columns
from hacrl.tasks.data import DataOption, load_table
from hacrl.tasks.prompt_rows import PURPOSES, PromptReader
from hacrl.tasks.reward_functions import RewardFunction
from hacrl.tasks.reward_scores import RewardScorer
from hacrl.tasks.splits import check_count, check_test_share, make_splits
from hacrl.types import Problem, Rollout, Turn, Verdict

_SELF_TEST_RESPONSES = (r"The answer is \boxed{0}.", "")


class RewardTask:
    """Prompts from a data set, and functions that give each response a number.

    A function is called as ``f(prompts=..., completions=..., completion_ids=..., **columns)`` with one entry
    per response. It returns one number per response, or None where it does not apply. The reward is the
    weighted sum over the functions. A reward outside ``reward_range`` is an error.
    """

    def __init__(
        self,
        *,
        functions: str | RewardFunction | Sequence[str | RewardFunction],
        train: DataOption,
        test: DataOption | None = None,
        test_share: float | None = None,
        weights: Sequence[float] | None = None,
        columns: Mapping[str, str] | None = None,
        reward_range: Sequence[float] | None = None,
        limit: int | None = None,
        name: str = "reward",
    ) -> None:
        self.name = name
        self.trainer_state: Any = None  # a run sets its own
        listed = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        if not listed:
            raise TaskError("functions: give at least one")
        self._scorer = RewardScorer(listed, weights, reward_range)
        self.max_reward: float | None = self._scorer.max_reward
        share = check_test_share(test_share, test, default=0.0)
        check_count("limit", limit)
        reader = PromptReader(check_columns(columns, PURPOSES))
        candidates = reader.candidates(load_table("train", train))
        held_out = None if test is None else reader.candidates(load_table("test", test))
        self._conversational = bool(reader.conversational)
        self._python_columns = reader.python_columns
        splits = make_splits(candidates, held_out, test_share=share, limit=limit)
        self._train, self._test, self.notes = splits.train, splits.test, splits.notes

    @property
    def train(self) -> Sequence[Problem]:
        """Problems to train on, in a fixed shuffled order."""
        return self._train

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order; empty without ``test`` or ``test_share``."""
        return self._test

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return the reward of every response. Raise TaskError only if a reward function fails."""
        if not rollouts:
            return []
        problems = [rollout.problem for rollout in rollouts]
        return self._verdicts(
            problems,
            [rollout.text for rollout in rollouts],
            [list(rollout.token_ids) for rollout in rollouts],
        )

    def self_test(self) -> None:
        """Call every function once with two made-up completions, to find a broken one before models load."""
        problems = [self._train[0], self._train[min(1, len(self._train) - 1)]]
        self._verdicts(problems, list(_SELF_TEST_RESPONSES), [[0, 1, 2], []])

    def close(self) -> None:
        """End the thread that awaits ``async`` functions, if there is one."""
        self._scorer.close()

    def _verdicts(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[Verdict]:
        return self._scorer.verdicts(problems, self._arguments(problems, texts, token_ids), token_ids)

    def _arguments(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        rows = [self._python_columns.get(problem.id, problem.fields) for problem in problems]
        columns = dict.fromkeys(key for row in rows for key in row)
        return {
            "prompts": [self._prompt(problem) for problem in problems],
            "completions": [self._completion(text) for text in texts],
            "completion_ids": token_ids,
            **{key: [row.get(key) for row in rows] for key in columns},
            "trainer_state": self.trainer_state,
        }

    def _prompt(self, problem: Problem) -> str | list[dict[str, str]]:
        if not self._conversational:
            return problem.prompt
        turns = (*problem.context, Turn("user", problem.prompt))
        return [{"role": turn.role, "content": turn.content} for turn in turns]

    def _completion(self, text: str) -> str | list[dict[str, str]]:
        return [{"role": "assistant", "content": text}] if self._conversational else text
