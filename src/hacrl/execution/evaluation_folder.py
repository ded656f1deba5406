"""The folder of an evaluation: every response, the numbers, and what it takes to go on after an interruption.

plan.json       what was asked: one record per agent and benchmark
responses.jsonl every response with its verdict, written as they come
results.json    the numbers
results.md      the same, as tables
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hacrl.errors import ConfigError
from hacrl.evaluation.chunks import Chunk, ChunkPlan
from hacrl.evaluation.scores import Mark

FILES = ("plan.json", "responses.jsonl", "results.json", "results.md")
# what a process that was killed while it wrote one of them may leave behind
UNFINISHED = ("plan.unfinished", "responses.unfinished", "results.unfinished")


@dataclass(frozen=True, kw_only=True)
class PairRecord:
    """Everything that decides the responses of one agent to one benchmark."""

    agent: str
    benchmark: str
    model: str
    weights: str  # a digest of the weights' files; empty for a model of the hub
    problem_count: int
    problems: str  # a digest of ids, prompts and answers
    samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    batch: int
    device: str
    precision: str
    chat_template: bool
    chat_template_args: str

    @property
    def key(self) -> tuple[str, str]:
        """Which pair it is."""
        return self.agent, self.benchmark


class EvaluationFolder:
    """Writes responses a chunk at a time; keeps whole chunks of an evaluation that was broken off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marks: dict[tuple[str, str], list[Mark]] = {}

    def check(self, records: Sequence[PairRecord], overwrite: bool) -> None:
        """Refuse a folder that holds something else, or another evaluation that may not be replaced."""
        try:
            present = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        except OSError as error:
            raise ConfigError(f"--output: cannot use {self.path}: {error}") from error
        foreign = sorted(present - {*FILES, *UNFINISHED})
        if foreign:
            raise ConfigError(
                f"--output: {self.path} holds more than an evaluation ({', '.join(foreign[:3])}); "
                "use another folder"
            )
        if present and not overwrite:
            difference = self._difference(records)
            if difference:
                raise ConfigError(
                    f"--output: {self.path} holds an evaluation with {difference}, and is kept; use another "
                    "--output FOLDER, or --overwrite to replace it"
                )

    def open(
        self,
        records: Sequence[PairRecord],
        plans: Mapping[tuple[str, str], ChunkPlan],
        overwrite: bool = False,
    ) -> None:
        """Go on with the evaluation of these pairs, or start it; anew if what is there is to be replaced."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if overwrite:  # equal ones too: their files may be damaged
                for name in (*FILES, *UNFINISHED):
                    (self.path / name).unlink(missing_ok=True)
            _write(self.path / "plan.json", [asdict(record) for record in records])
            self._marks = {record.key: [] for record in records}
            self._keep_whole_chunks(plans)
        except OSError as error:
            raise ConfigError(f"--output: cannot write to {self.path}: {error}") from error

    def marks(self, pair: tuple[str, str]) -> list[Mark]:
        """The responses of a pair that are there already, in the order of its plan."""
        return self._marks[pair]

    def chunks_left(self, pair: tuple[str, str], plan: ChunkPlan) -> list[Chunk]:
        """What is still to be asked."""
        done = len(self._marks[pair])
        left = []
        for chunk in plan.chunks:
            if done <= 0:
                left.append(chunk)
            done -= chunk.responses
        return left

    def append(self, pair: tuple[str, str], marks: Sequence[Mark], texts: Sequence[str]) -> None:
        """Write the responses of one chunk."""
        agent, benchmark = pair
        lines = []
        for mark, text in zip(marks, texts, strict=True):
            record = {"agent": agent, "benchmark": benchmark, **asdict(mark), "response": text}
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        with (self.path / "responses.jsonl").open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(lines))
        self._marks[pair] += marks

    def write_results(self, results: Mapping[str, Any], tables: str) -> None:
        """The numbers so far."""
        _write(self.path / "results.json", results)
        (self.path / "results.md").write_text(tables, encoding="utf-8")

    def _difference(self, records: Sequence[PairRecord]) -> str:
        """In which way the evaluation that is there differs from these pairs; empty if it can go on."""
        planned = {record.key: asdict(record) for record in records}
        try:
            text = (self.path / "plan.json").read_text("utf-8")
            there = [(entry["agent"], entry["benchmark"], entry) for entry in json.loads(text)]
        except FileNotFoundError:
            return "no readable plan.json" if any((self.path / name).exists() for name in FILES) else ""
        except (OSError, ValueError, KeyError, TypeError):
            return "no readable plan.json"
        for agent, benchmark, entry in there:
            if (agent, benchmark) not in planned:
                return f"{agent} on {benchmark}, which is not asked for now"
            for key, value in planned[agent, benchmark].items():
                if entry.get(key) != value:
                    return _told_difference(key, entry.get(key), value)
        return ""

    def _keep_whole_chunks(self, plans: Mapping[tuple[str, str], ChunkPlan]) -> None:
        """Read the responses back; of a chunk that was broken off nothing is kept."""
        path = self.path / "responses.jsonl"
        if not path.exists():
            return
        for pair, mark in _read_marks(path):
            self._marks[pair].append(mark)
        for pair, plan in plans.items():
            whole = 0
            for chunk in plan.chunks:
                if whole + chunk.responses > len(self._marks[pair]):
                    break
                whole += chunk.responses
            del self._marks[pair][whole:]
        left = {pair: len(marks) for pair, marks in self._marks.items()}
        kept = path.with_suffix(".unfinished")
        with path.open("rb") as source, kept.open("wb") as target:
            for line, (pair, _) in zip(source, list(_read_marks(path)), strict=False):
                if left[pair] > 0:
                    left[pair] -= 1
                    target.write(line)
        os.replace(kept, path)


def _read_marks(path: Path) -> Iterator[tuple[tuple[str, str], Mark]]:
    """Pair and mark of every line; a last line that was broken off ends it."""
    names = [field.name for field in fields(Mark)]
    with path.open("rb") as file:  # bytes: it may have been broken off in the middle of a character
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
                pair = (record["agent"], record["benchmark"])
                mark = Mark(**{name: record[name] for name in names})
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path}, line {number}, is damaged; use --overwrite to start anew"
                ) from error
            yield pair, mark


def _told_difference(key: str, there: object, now: object) -> str:
    if key in ("weights", "problems"):
        return f"other {key}"
    return f"{key} {there}, not {now}"


def _write(path: Path, content: Any) -> None:
    """Whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
