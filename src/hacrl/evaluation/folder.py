"""The folder of an evaluation: every response, the numbers, and what it takes to go on after an interruption.

plan.json       what was asked: one record per agent and benchmark
responses.jsonl every response with its verdict, written as they come
results.json    the numbers
results.md      the same, as tables
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from hacrl.errors import ConfigError
from hacrl.evaluation.chunks import Chunk, ChunkPlan
from hacrl.evaluation.results import Mark
from hacrl.files import MissingFileError, UnreadableFileError, iterate_jsonl, open_inside, read_json
from hacrl.plain_text import json_text
from hacrl.types import FinishReason, VerdictLabel

FILES = ("plan.json", "responses.jsonl", "results.json", "results.md")
# what a process that was killed while it wrote one of them may leave behind
UNFINISHED = ("plan.unfinished", "responses.unfinished", "results.unfinished")


_START_ANEW = "use --overwrite to start anew"
_MARK: dict[str, type | tuple[type, ...]] = {
    "problem": str,
    "sample": int,
    "reward": (int, float),
    "verdict": str,
    "tokens": int,
    "finish_reason": str,
}


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
            present = {entry.name for entry in self.path.iterdir()} if os.path.lexists(self.path) else set()
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
            self._write("plan.json", json_text([asdict(record) for record in records], indent=2) + "\n")
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
            lines.append(json_text(record) + "\n")
        with open_inside(self.path / "responses.jsonl", self.path, "ab") as file:
            file.write("".join(lines).encode("utf-8", errors="backslashreplace"))
        self._marks[pair] += marks

    def write_results(self, results: Mapping[str, Any], tables: str) -> None:
        """The numbers so far."""
        self._write("results.json", json_text(results, indent=2) + "\n")
        with open_inside(self.path / "results.md", self.path, "wb") as file:
            file.write(tables.encode("utf-8", errors="backslashreplace"))

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all."""
        unfinished = (self.path / name).with_suffix(".unfinished")
        with open_inside(unfinished, self.path, "wb") as file:
            file.write(text.encode("utf-8", errors="backslashreplace"))
        os.replace(unfinished, self.path / name)

    def _difference(self, records: Sequence[PairRecord]) -> str:
        """In which way the evaluation that is there differs from these pairs; empty if it can go on."""
        planned = {record.key: asdict(record) for record in records}
        try:
            plan = read_json(self.path / "plan.json", self.path)
            there = [(str(entry["agent"]), str(entry["benchmark"]), dict(entry)) for entry in plan]
        except MissingFileError:
            return "no readable plan.json" if any((self.path / name).exists() for name in FILES) else ""
        except UnreadableFileError as error:
            return f"no readable plan.json ({error})"
        except (ValueError, KeyError, TypeError):
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
        if not os.path.lexists(path):
            return
        ends: dict[tuple[str, str], list[int]] = {pair: [] for pair in plans}
        starts: dict[int, int] = {}  # of each line, by its end
        for pair, mark, start, end in _read_marks(path, plans.keys()):
            self._marks[pair].append(mark)
            ends[pair].append(end)
            starts[end] = start
        for pair, plan in plans.items():
            whole = _whole_responses(plan, len(self._marks[pair]))
            del self._marks[pair][whole:], ends[pair][whole:]
            if not _fit(self._marks[pair], plan):
                raise ConfigError(
                    f"{path} is damaged: responses of {pair[0]} on {pair[1]} are missing in the middle; "
                    f"{_START_ANEW}"
                )
        kept = path.with_suffix(".unfinished")
        with open_inside(path, self.path) as source, open_inside(kept, self.path, "wb") as target:
            for end in sorted(end for of_pair in ends.values() for end in of_pair):
                source.seek(starts[end])
                target.write(source.read(end - starts[end]))
        os.replace(kept, path)


def _whole_responses(plan: ChunkPlan, there: int) -> int:
    """How many of so many responses make whole chunks."""
    whole = 0
    for chunk in plan.chunks:
        if whole + chunk.responses > there:
            break
        whole += chunk.responses
    return whole


def _fit(marks: Sequence[Mark], plan: ChunkPlan) -> bool:
    """Whether responses are those of the plan, in its order: one problem for each position and back."""
    slots = [slot for chunk in plan.chunks for slot in chunk.slots][: len(marks)]
    pairs = {(position, mark.problem) for (position, _), mark in zip(slots, marks, strict=True)}
    one_to_one = len(pairs) == len({position for position, _ in pairs}) == len({name for _, name in pairs})
    return one_to_one and all(mark.sample == sample for (_, sample), mark in zip(slots, marks, strict=True))


def _read_marks(
    path: Path, pairs: Collection[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], Mark, int, int]]:
    """Pair, mark and place of every line; a last line that was broken off ends it."""
    start = 0
    try:
        for line in iterate_jsonl(path, path.parent):
            pair = (line.record.get("agent"), line.record.get("benchmark"))
            if not isinstance(pair[0], str) or not isinstance(pair[1], str) or pair not in pairs:
                raise UnreadableFileError(f"{path}, line {line.number}, is damaged: of no pair of plan.json")
            yield (pair[0], pair[1]), _mark(line.record, f"{path}, line {line.number},"), start, line.end
            start = line.end
    except UnreadableFileError as error:
        raise ConfigError(f"{error}; {_START_ANEW}") from error


def _mark(record: Mapping[str, Any], where: str) -> Mark:
    for field in fields(Mark):
        value = record.get(field.name)
        if not isinstance(value, _MARK[field.name]) or isinstance(value, bool):
            raise UnreadableFileError(f"{where} is damaged or of another version: {field.name}")
    if record["verdict"] not in get_args(VerdictLabel) or record["finish_reason"] not in get_args(
        FinishReason
    ):
        raise UnreadableFileError(f"{where} is damaged or of another version: verdict or finish_reason")
    return Mark(**{field.name: record[field.name] for field in fields(Mark)})


def _told_difference(key: str, there: object, now: object) -> str:
    if key in ("weights", "problems"):
        return f"other {key}"
    return f"{key} {there}, not {now}"
