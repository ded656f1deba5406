"""The ``boxed`` task: maths problems of any data set, answered in ``\\boxed{}``; and its presets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.tasks.columns import as_text, check_columns, find_column, merge_columns, require_column
from hacrl.tasks.data import DataOption, Table, load_table
from hacrl.tasks.math.extraction import extract_answer
from hacrl.tasks.prompts import PromptStyle, parse_demonstrations, prompt_style
from hacrl.tasks.splits import (
    DEFAULT_TEST_SHARE,
    Candidate,
    check_count,
    check_test_share,
    make_splits,
    plural,
    question_id,
)
from hacrl.types import Problem, Rollout, Verdict

if TYPE_CHECKING:
    from hacrl.tasks.math.pool import MathVerifier

AnswerFrom = Literal["auto", "column", "boxed", "hashes"]

DEFAULT_PROMPT = r"{problem} Let's think step by step and output the final answer within \boxed{}."
PURPOSES = ("problem", "answer", "id")  # of columns
DEFAULT_COLUMNS = {"problem": ("problem", "question"), "answer": ("answer", "solution")}


class BoxedTask:
    """Problems with a mathematical answer; the last ``\\boxed{}`` of a response is compared with it.

    ``train`` and ``test`` are data sources (:mod:`hacrl.tasks.data`). Without ``test``, a share of the
    questions is held out. ``answer_from`` says what the answer column holds: the answer itself
    (``column``), a solution with a ``\\boxed{}`` (``boxed``), or a solution that ends in ``#### 18``
    (``hashes``). ``auto`` detects which, and refuses a column whose rows differ.
    """

    def __init__(
        self,
        *,
        train: DataOption,
        test: DataOption | None = None,
        test_share: float | None = None,
        columns: Mapping[str, str] | None = None,
        answer_from: AnswerFrom = "auto",
        skip_missing_answers: bool = False,
        prompt: str = DEFAULT_PROMPT,
        system: str | None = None,
        demonstrations: Sequence[Any] = (),
        limit: int | None = None,
        name: str = "boxed",
        verifier: VerifierSettings | None = None,
    ) -> None:
        self.name = name
        self.max_reward: float | None = 1.0
        self.independent_verdicts = True
        if answer_from not in get_args(AnswerFrom):
            raise TaskError(f"answer_from={answer_from!r}: must be one of {', '.join(get_args(AnswerFrom))}")
        share = check_test_share(test_share, test, DEFAULT_TEST_SHARE)
        check_count("limit", limit)
        shots = parse_demonstrations(demonstrations)
        reader = _RowReader(
            check_columns(columns, PURPOSES),
            answer_from,
            skip_missing_answers,
            prompt_style(prompt, system, shots),
        )
        candidates = reader.candidates(load_table("train", train))
        held_out = None if test is None else reader.candidates(load_table("test", test))
        splits = make_splits(
            candidates, held_out, test_share=share, shown=[shot.problem for shot in shots], limit=limit
        )
        self._train, self._test = splits.train, splits.test
        self.solutions = tuple(reader.solutions)
        self.notes: tuple[str, ...] = (*reader.notes, *splits.notes)
        self._settings = verifier or VerifierSettings()
        self._verifier: MathVerifier | None = None

    @property
    def train(self) -> Sequence[Problem]:
        """Problems to train on, in a fixed shuffled order."""
        return self._train

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order."""
        return self._test

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout. Worker processes start when the first answer needs algebra."""
        if not rollouts:
            return []
        if self._verifier is None:
            from hacrl.tasks.math.pool import MathVerifier

            self._verifier = MathVerifier(self._settings)
        return self._verifier.verify([(rollout.problem.answer, rollout.text) for rollout in rollouts])

    def close(self) -> None:
        """End the worker processes; a later :meth:`verify` starts new ones."""
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = None


class _RowReader:
    """Turns rows into candidates, in the same way for train and test."""

    def __init__(
        self, columns: Mapping[str, str], answer_from: AnswerFrom, skip_missing: bool, style: PromptStyle
    ) -> None:
        self.notes: list[str] = []
        self.solutions: list[str] = []  # of training problems, if the data has any
        self._columns = columns
        self._answer_from = answer_from
        self._skip_missing = skip_missing
        self._style = style

    def candidates(self, table: Table) -> list[Candidate]:
        columns = merge_columns(table, self._columns, PURPOSES)
        problem_column = require_column(table, "problem", columns, DEFAULT_COLUMNS["problem"])
        answer_column = require_column(table, "answer", columns, DEFAULT_COLUMNS["answer"])
        id_column = find_column(table, "id", columns)
        found = []
        answers = self._answers(table, answer_column)
        for row, answer in zip(table.rows, answers, strict=True):
            if answer is None:
                continue
            question = as_text(table, row, problem_column)
            if question is None:
                raise table.error(f"column {problem_column!r} is empty; every row needs a problem", row)
            own_id = as_text(table, row, id_column) if id_column else question_id(question)
            if own_id is None:
                raise table.error(f"column {id_column!r} is empty; every row needs an id", row)
            problem = Problem(own_id, self._style.render(question), answer, self._style.context)
            found.append(Candidate(question, problem))
        if not found:
            raise table.error(f"no row has an answer in column {answer_column!r}")
        return found

    def _answers(self, table: Table, column: str) -> list[str | None]:
        values = [as_text(table, row, column) for row in table.rows]
        kind = self._answer_from if self._answer_from != "auto" else _detect_kind(table, column, values)
        answers = [None if value is None else _final_answer(value, kind) for value in values]
        if table.option == "train":
            given = values if kind != "column" else [row.values.get("solution") for row in table.rows]
            self.solutions = [text for text in given if isinstance(text, str)]
        missing = [row for row, answer in zip(table.rows, answers, strict=True) if answer is None]
        if missing and not self._skip_missing:
            problem = {"boxed": r"no \boxed{} with an answer", "hashes": "no answer after ####"}.get(
                kind, "no answer"
            )
            raise table.error(
                f"{problem} in column {column!r} ({plural(len(missing), 'row')} of {len(values)} without); "
                "add it, or skip such rows with skip_missing_answers: true",
                missing[0],
            )
        if missing:
            split = "training" if table.option == "train" else "test"
            have = "it has" if len(missing) == 1 else "they have"
            self.notes.append(f"{plural(len(missing), f'{split} row')} left out: {have} no answer")
        return answers


def _detect_kind(table: Table, column: str, values: Sequence[str | None]) -> AnswerFrom:
    """Return what the column holds. Raise TaskError if its rows differ."""
    present = [value for value in values if value is not None]
    hashes, boxes = sum("####" in value for value in present), sum(r"\boxed" in value for value in present)
    if present and hashes == len(present):
        return "hashes"
    if present and boxes == len(present):
        return "boxed"
    if hashes or boxes:
        raise table.error(
            rf"of {len(present)} values in column {column!r}, {boxes} have a \boxed{{}} and {hashes} a ####: "
            "say what the column holds with answer_from: column, boxed or hashes"
        )
    return "column"


def _final_answer(value: str, kind: AnswerFrom) -> str | None:
    if kind == "boxed":
        return extract_answer(value)
    if kind == "hashes":
        return after_hashes(value)
    return value.strip()


# Options of `boxed` for well-known data sets; the user may override each. No preset names columns: their
# names are defaults of `boxed`, so that a local copy with plain answers works too.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # problem, level, type, solution (with \boxed{}); 7,500 and 5,000 rows. Two training solutions have an
    # empty box. The test set is the whole of MATH's test split; MATH-500 is 500 of it.
    "math": {
        "train": {"path": "DigitalLearningGmbH/MATH-lighteval", "split": "train"},
        "test": {"path": "DigitalLearningGmbH/MATH-lighteval", "split": "test"},
        "skip_missing_answers": True,
    },
    # question, answer (a solution that ends in #### 18); 7,473 and 1,319 rows
    "gsm8k": {
        "train": {"path": "openai/gsm8k", "name": "main", "split": "train"},
        "test": {"path": "openai/gsm8k", "name": "main", "split": "test"},
    },
}


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


def after_hashes(text: str) -> str | None:
    """Return the text after the last ``####``, to the end of its line; ``1,200`` becomes ``1200``."""
    _, mark, rest = text.rpartition("####")
    if not mark:
        return None
    return _THOUSANDS.sub("", rest.strip().partition("\n")[0].strip()) or None
