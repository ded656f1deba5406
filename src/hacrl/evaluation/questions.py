"""A task of held-out questions only: nothing to learn from, and answers judged as mathematics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hacrl.tasks.columns import as_text, columns_of, find_column, need_column, value_of
from hacrl.tasks.files import Row
from hacrl.tasks.prompts import prompt_style
from hacrl.tasks.sources import Table
from hacrl.tasks.splits import question_hash, question_id, question_key
from hacrl.tasks.verification.settings import VerifierSettings
from hacrl.types import Problem, Rollout, Verdict

if TYPE_CHECKING:
    from hacrl.tasks.verification.pool import MathVerifier

_PROBLEM_COLUMNS = ("problem", "question", "prompt")
_ANSWER_COLUMNS = ("answer", "final_answer", "solution")


class QuestionTask:
    """Every row of a table as a problem of the test split, in a fixed shuffled order.

    Repeated questions stay: a benchmark is what it is.
    """

    def __init__(
        self,
        name: str,
        table: Table,
        columns: Mapping[str, str],
        extract: Callable[[str], str | None],
        prompt: str,
        verifier: VerifierSettings | None = None,
        sizes: tuple[int, ...] = (),
    ) -> None:
        self.name = name
        self.max_reward: float | None = 1.0
        self.source = table.label
        self.notes: tuple[str, ...] = ()
        self._verifier_settings = verifier or VerifierSettings()
        self._verifier: MathVerifier | None = None
        style = prompt_style(prompt, None, ())
        columns = columns_of(table, columns, ("problem", "answer", "id"))
        asked = need_column(table, "problem", columns, _PROBLEM_COLUMNS)
        answered = need_column(table, "answer", columns, _ANSWER_COLUMNS)
        named = find_column(table, "id", columns, ("id", "unique_id"))
        problems = []
        for row in table.rows:
            question = as_text(table, row, asked)
            if question is None:
                raise table.error(f"column {asked!r} is empty: there is nothing to ask", row)
            gold = _gold(table, row, answered, extract)
            key = None if named is None else as_text(table, row, named)
            problem = Problem(key or question_id(question), style.render(question), gold)
            problems.append((question_hash(question_key(question)), problem))
        self.test: Sequence[Problem] = tuple(p for _, p in sorted(problems, key=lambda pair: pair[0]))
        self.train: Sequence[Problem] = ()
        if sizes and len(self.test) not in sizes:
            expected = " or ".join(map(str, sizes))
            self.notes = (f"{name} has {expected} problems, but {self.source} has {len(self.test)}",)

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """See :class:`hacrl.tasks.base.Task`."""
        if self._verifier is None:
            from hacrl.tasks.verification.pool import MathVerifier

            self._verifier = MathVerifier(self._verifier_settings)
        return self._verifier.verify([(rollout.problem.answer, rollout.text) for rollout in rollouts])

    def close(self) -> None:
        """Let go of the verifier's worker processes."""
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = None


def _gold(table: Table, row: Row, column: str, extract: Callable[[str], str | None]) -> str:
    value: Any = value_of(row, column)
    # a whole number kept as 27.0 is the answer 27
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else as_text(table, row, column)
    gold = extract(text) if text else None
    if not gold:
        raise table.error(f"column {column!r} holds no answer to judge by", row)
    return gold
