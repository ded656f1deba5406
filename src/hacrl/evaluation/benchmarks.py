"""A task of held-out questions only: nothing to learn from, and answers judged as mathematics.

The paper's seven benchmarks by name, from the Hugging Face hub or a folder, and files of one's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.tasks.boxed import DEFAULT_PROMPT, after_hashes
from hacrl.tasks.data import (
    READERS,
    Row,
    Table,
    as_text,
    find_column,
    load_table,
    merge_columns,
    require_column,
    value_of,
)
from hacrl.tasks.math.extraction import extract_answer
from hacrl.tasks.prompts import prompt_style
from hacrl.tasks.splits import question_hash, question_id, question_key
from hacrl.types import Problem, Rollout, Verdict

if TYPE_CHECKING:
    from hacrl.tasks.math.pool import MathVerifier

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
        columns = merge_columns(table, columns, ("problem", "answer", "id"))
        asked = require_column(table, "problem", columns, _PROBLEM_COLUMNS)
        answered = require_column(table, "answer", columns, _ANSWER_COLUMNS)
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
            from hacrl.tasks.math.pool import MathVerifier

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


def as_it_stands(text: str) -> str | None:
    """The column is the answer."""
    return text.strip()


def in_the_box(text: str) -> str | None:
    """The column is a worked solution whose last box holds the answer."""
    return extract_answer(text)


def without_dollars(text: str) -> str | None:
    """The column is the answer in TeX's maths mode: ``$69$,$84$`` is ``69,84``."""
    return text.replace("$", "").strip()


def wherever_it_is(text: str) -> str | None:
    """For files of one's own: what is boxed or stands after ``####``, else the whole column."""
    if "\\boxed" in text:
        return extract_answer(text)
    return after_hashes(text) if "####" in text else text.strip()


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Where a benchmark's problems are and how its answers are written there."""

    title: str
    hub: str  # id of the data set
    config: str | None = None
    split: str = "test"
    problem: str = "problem"  # columns on the hub; local files have id, problem and answer
    answer: str = "answer"
    extract: Callable[[str], str | None] = as_it_stands
    file: str  # in a folder given with --data
    sizes: tuple[int, ...]  # numbers of problems its versions have
    samples: int = 1  # k of avg@k in the paper


BENCHMARKS: dict[str, Benchmark] = {
    "math500": Benchmark(title="MATH-500", hub="HuggingFaceH4/MATH-500", file="math500.jsonl", sizes=(500,)),
    "math": Benchmark(
        title="MATH",
        hub="DigitalLearningGmbH/MATH-lighteval",
        config="default",
        answer="solution",
        extract=in_the_box,
        file="math.test.jsonl",
        sizes=(5000,),
    ),
    "gsm8k": Benchmark(
        title="GSM8K",
        hub="openai/gsm8k",
        config="main",
        problem="question",
        extract=after_hashes,
        file="gsm8k.test.jsonl",
        sizes=(1319,),
    ),
    "aime2025": Benchmark(
        title="AIME 2025", hub="math-ai/aime25", file="aime2025.jsonl", sizes=(30,), samples=30
    ),
    "amc23": Benchmark(
        title="AMC 2023", hub="math-ai/amc23", problem="question", file="amc23.jsonl", sizes=(40,)
    ),
    "minerva": Benchmark(
        title="Minerva Math",
        hub="math-ai/minervamath",
        problem="question",
        file="minerva.jsonl",
        sizes=(272,),
    ),
    "olympiad": Benchmark(
        title="OlympiadBench",
        hub="math-ai/olympiadbench",
        problem="question",
        answer="final_answer.0",  # a list, of one entry in every row
        extract=without_dollars,
        file="olympiad.jsonl",
        sizes=(675, 674),  # a later version on the hub has one problem less
    ),
}


def find_benchmark(name: str) -> Benchmark:
    """The benchmark of that name, or an error with the nearest one."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    near = get_close_matches(name.lower(), BENCHMARKS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise TaskError(
        f"--on: there is no benchmark {name!r}{hint} There are {', '.join(BENCHMARKS)}; 'task' is the "
        "held-out split of a run's own task, and a file of problems is given by its path"
    )


def load_benchmark(
    name: str,
    data: Path | None = None,
    prompt: str = DEFAULT_PROMPT,
    verifier: VerifierSettings | None = None,
) -> QuestionTask:
    """The problems of a benchmark, from its file in the folder ``data``, else from the hub."""
    benchmark = find_benchmark(name)
    if data is not None:
        return load_file(_file_in(data, name, benchmark), name, prompt, verifier, sizes=benchmark.sizes)
    source = {"path": benchmark.hub, "name": benchmark.config, "split": benchmark.split}
    try:
        table = load_table("test", source)
    except TaskError as error:
        reason = str(error).removeprefix("test: ").split("; check the connection")[0]
        raise TaskError(
            f"benchmark {name!r}: {reason}; --data FOLDER takes local files instead, here {benchmark.file} "
            "with the columns id, problem and answer"
        ) from error
    columns = {"problem": benchmark.problem, "answer": benchmark.answer}
    return QuestionTask(name, table, columns, benchmark.extract, prompt, verifier, benchmark.sizes)


def load_file(
    path: Path,
    name: str | None = None,
    prompt: str = DEFAULT_PROMPT,
    verifier: VerifierSettings | None = None,
    columns: Mapping[str, str] | None = None,
    sizes: tuple[int, ...] = (),
) -> QuestionTask:
    """Problems of a file: JSONL, JSON, CSV or Parquet with a problem and an answer in each row."""
    if not path.is_file():
        raise TaskError(f"--on: there is no file {path}")
    option = "--on" if name is None else "--data"
    try:
        table = load_table("test", path)
    except TaskError as error:
        raise TaskError(f"{option}: {str(error).removeprefix('test: ')}") from error
    table = replace(table, option=option)
    return QuestionTask(name or path.stem, table, columns or {}, wherever_it_is, prompt, verifier, sizes)


def looks_like_a_file(name: str) -> bool:
    """Whether what was given to --on is a path, not a name."""
    return "/" in name or Path(name).suffix.lower() in READERS


def label_of(name: str) -> str:
    """What a benchmark is called in tables and folders: a file by its name without the suffix."""
    return Path(name).stem if looks_like_a_file(name) else name


def _file_in(data: Path, name: str, benchmark: Benchmark) -> Path:
    if not data.is_dir():
        raise TaskError(f"--data: there is no folder {data}")
    path = data / benchmark.file
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in data.iterdir())[:8]) or "nothing"
        raise TaskError(
            f"--data: benchmark {name!r} is read from {path}, which does not exist (there: {there}); without "
            f"--data it is fetched from the hub ({benchmark.hub})"
        )
    return path
