"""The paper's seven benchmarks by name, from the Hugging Face hub or a folder, and files of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from hacrl.errors import TaskError
from hacrl.evaluation.questions import QuestionTask
from hacrl.tasks.answers import after_hashes
from hacrl.tasks.boxed import DEFAULT_PROMPT
from hacrl.tasks.files import READERS
from hacrl.tasks.sources import load_table
from hacrl.tasks.verification.boxes import extract_answer
from hacrl.tasks.verification.settings import VerifierSettings


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
