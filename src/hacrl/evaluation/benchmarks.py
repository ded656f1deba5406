"""Benchmarks: the paper's seven by name, from the Hugging Face hub or a folder, and the user's own files.

A benchmark is a task with test problems only, whose answers are verified as mathematics.
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
from hacrl.tasks.columns import as_text, find_column, merge_columns, require_column, value_of
from hacrl.tasks.data import READERS, Row, Table, load_table
from hacrl.tasks.math.extraction import extract_answer
from hacrl.tasks.prompts import prompt_style
from hacrl.tasks.splits import question_hash, question_id, question_key
from hacrl.types import Problem, Rollout, Verdict

if TYPE_CHECKING:
    from hacrl.tasks.math.pool import MathVerifier

FILE_PURPOSES = ("problem", "answer", "id")  # of columns
_PROBLEM_COLUMNS = ("problem", "question", "prompt")
_ANSWER_COLUMNS = ("answer", "final_answer", "solution")


class BenchmarkTask:
    """All rows of a table as test problems, in a fixed shuffled order. Repeated questions stay."""

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
        columns = merge_columns(table, columns, FILE_PURPOSES)
        problem_column = require_column(table, "problem", columns, _PROBLEM_COLUMNS)
        answer_column = require_column(table, "answer", columns, _ANSWER_COLUMNS)
        id_column = find_column(table, "id", columns, ("id", "unique_id"))
        problems = []
        for row in table.rows:
            question = as_text(table, row, problem_column)
            if question is None:
                raise table.error(f"column {problem_column!r} is empty; every row needs a problem", row)
            gold = _gold_answer(table, row, answer_column, extract)
            own_id = None if id_column is None else as_text(table, row, id_column)
            problem = Problem(own_id or question_id(question), style.render(question), gold)
            problems.append((question_hash(question_key(question)), problem))
        self.test: Sequence[Problem] = tuple(
            problem for _, problem in sorted(problems, key=lambda pair: pair[0])
        )
        self.train: Sequence[Problem] = ()
        if sizes and len(self.test) not in sizes:
            expected = " or ".join(map(str, sizes))
            self.notes = (f"{name} has {expected} problems, but {self.source} has {len(self.test)}",)

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""
        if self._verifier is None:
            from hacrl.tasks.math.pool import MathVerifier

            self._verifier = MathVerifier(self._verifier_settings)
        return self._verifier.verify([(rollout.problem.answer, rollout.text) for rollout in rollouts])

    def close(self) -> None:
        """End the verifier's worker processes."""
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = None


def _gold_answer(table: Table, row: Row, column: str, extract: Callable[[str], str | None]) -> str:
    value: Any = value_of(row, column)
    # a whole number stored as 27.0 is the answer 27
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else as_text(table, row, column)
    gold = extract(text) if text else None
    if not gold:
        raise table.error(f"column {column!r} holds no answer", row)
    return gold


def whole_text(text: str) -> str | None:
    """Return the answer of a column that holds only the answer."""
    return text.strip()


def last_box(text: str) -> str | None:
    """Return the content of the last box of a worked solution."""
    return extract_answer(text)


def without_dollars(text: str) -> str | None:
    """Return an answer without the marks of TeX's maths mode: ``$69$,$84$`` is ``69,84``."""
    return text.replace("$", "").strip()


def detect_answer(text: str) -> str | None:
    """Return the content of the last box, else the text after ``####``, else the whole text."""
    if "\\boxed" in text:
        return extract_answer(text)
    return after_hashes(text) if "####" in text else text.strip()


@dataclass(frozen=True, kw_only=True)
class BenchmarkSource:
    """Where a benchmark's problems are, and how to extract its answers."""

    title: str
    hub: str  # id of the data set
    config: str | None = None
    split: str = "test"
    problem: str = "problem"  # column names on the hub; local files have id, problem and answer
    answer: str = "answer"
    extract: Callable[[str], str | None] = whole_text
    file: str  # name in the folder of --data
    sizes: tuple[int, ...]  # number of problems of each known version
    samples: int = 1  # k of avg@k in the paper


BENCHMARKS: dict[str, BenchmarkSource] = {
    "math500": BenchmarkSource(
        title="MATH-500", hub="HuggingFaceH4/MATH-500", file="math500.jsonl", sizes=(500,)
    ),
    "math": BenchmarkSource(
        title="MATH",
        hub="DigitalLearningGmbH/MATH-lighteval",
        config="default",
        answer="solution",
        extract=last_box,
        file="math.test.jsonl",
        sizes=(5000,),
    ),
    "gsm8k": BenchmarkSource(
        title="GSM8K",
        hub="openai/gsm8k",
        config="main",
        problem="question",
        extract=after_hashes,
        file="gsm8k.test.jsonl",
        sizes=(1319,),
    ),
    "aime2025": BenchmarkSource(
        title="AIME 2025", hub="math-ai/aime25", file="aime2025.jsonl", sizes=(30,), samples=30
    ),
    "amc23": BenchmarkSource(
        title="AMC 2023", hub="math-ai/amc23", problem="question", file="amc23.jsonl", sizes=(40,)
    ),
    "minerva": BenchmarkSource(
        title="Minerva Math",
        hub="math-ai/minervamath",
        problem="question",
        file="minerva.jsonl",
        sizes=(272,),
    ),
    "olympiad": BenchmarkSource(
        title="OlympiadBench",
        hub="math-ai/olympiadbench",
        problem="question",
        answer="final_answer.0",  # a list with one entry in every row
        extract=without_dollars,
        file="olympiad.jsonl",
        sizes=(675, 674),  # a later version has one problem less
    ),
}


def find_benchmark(name: str) -> BenchmarkSource:
    """Return the benchmark of that name; raise TaskError with the nearest name."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    near = get_close_matches(name.lower(), BENCHMARKS, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise TaskError(
        f"--on: there is no benchmark {name!r}{hint} There are {', '.join(BENCHMARKS)}; 'task' is the "
        "held-out split of a run's own task, and a path names a file of problems"
    )


def load_benchmark(
    name: str,
    data: Path | None = None,
    prompt: str = DEFAULT_PROMPT,
    verifier: VerifierSettings | None = None,
) -> BenchmarkTask:
    """Load a benchmark from its file in the folder ``data``, or from the hub without one."""
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
    return BenchmarkTask(name, table, columns, benchmark.extract, prompt, verifier, benchmark.sizes)


def load_file(
    path: Path,
    name: str | None = None,
    prompt: str = DEFAULT_PROMPT,
    verifier: VerifierSettings | None = None,
    columns: Mapping[str, str] | None = None,
    sizes: tuple[int, ...] = (),
) -> BenchmarkTask:
    """Load a file (JSONL, JSON, CSV or Parquet) with a problem and an answer in each row."""
    if not path.is_file():
        raise TaskError(f"--on: there is no file {path}")
    option = "--on" if name is None else "--data"
    try:
        table = load_table("test", path)
    except TaskError as error:
        raise TaskError(f"{option}: {str(error).removeprefix('test: ')}") from error
    table = replace(table, option=option)
    return BenchmarkTask(name or path.stem, table, columns or {}, detect_answer, prompt, verifier, sizes)


def looks_like_a_file(name: str) -> bool:
    """Return whether a value of --on is a path, not a name."""
    return "/" in name or Path(name).suffix.lower() in READERS


def label_of(name: str) -> str:
    """Return the benchmark's name in tables and folders; for a file, its name without the suffix."""
    return Path(name).stem if looks_like_a_file(name) else name


def _file_in(data: Path, name: str, benchmark: BenchmarkSource) -> Path:
    if not data.is_dir():
        raise TaskError(f"--data: there is no folder {data}")
    path = data / benchmark.file
    if not path.is_file():
        found = ", ".join(sorted(entry.name for entry in data.iterdir())[:8]) or "nothing"
        raise TaskError(
            f"--data: benchmark {name!r} is read from {path}, which does not exist (found: {found}); without "
            f"--data it is downloaded from the hub ({benchmark.hub})"
        )
    return path
