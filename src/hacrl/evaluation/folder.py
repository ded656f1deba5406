"""The folder of an evaluation, from which an interrupted evaluation continues.

plan.json       one record per model and benchmark: everything that decides the responses
responses.jsonl every response with its verdict, appended chunk by chunk
results.json    the metrics
results.md      the metrics as tables
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from hacrl.errors import ConfigError
from hacrl.evaluation.chunks import Chunk, ChunkPlan
from hacrl.evaluation.results import ScoredResponse
from hacrl.files import MissingFileError, UnreadableFileError, iterate_jsonl, open_inside, read_json
from hacrl.plain_text import json_text
from hacrl.types import FinishReason, VerdictLabel

FILES = ("plan.json", "responses.jsonl", "results.json", "results.md")
# what a process that is killed while it writes may leave behind
UNFINISHED = ("plan.unfinished", "responses.unfinished", "results.unfinished")


_OVERWRITE_HINT = "use --overwrite to start again"
_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "problem": str,
    "sample": int,
    "reward": (int, float),
    "verdict": str,
    "tokens": int,
    "finish_reason": str,
}


@dataclass(frozen=True, kw_only=True)
class PairRecord:
    """Everything that decides the responses of one model to one benchmark."""

    agent: str
    benchmark: str
    model: str
    weights: str  # a digest of the weight files; empty for a model of the hub
    problem_count: int
    problems: str  # a digest of ids, prompts and answers
    samples: int
    temperature: float
    top_p: float
    stop: str  # a list in JSON
    max_new_tokens: int
    seed: int
    batch: int
    engine: str
    device: str
    precision: str
    chat_template: bool
    chat_template_args: str

    @property
    def key(self) -> tuple[str, str]:
        """Model and benchmark."""
        return self.agent, self.benchmark


class EvaluationFolder:
    """Writes responses chunk by chunk; keeps the complete chunks of an interrupted evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._responses: dict[tuple[str, str], list[ScoredResponse]] = {}

    def check(self, records: Sequence[PairRecord], overwrite: bool) -> None:
        """Raise ConfigError if the folder holds other files, or another evaluation without ``overwrite``."""
        try:
            present = {entry.name for entry in self.path.iterdir()} if os.path.lexists(self.path) else set()
        except OSError as error:
            raise ConfigError(f"--output: cannot use {self.path}: {error}") from error
        foreign = sorted(present - {*FILES, *UNFINISHED})
        if foreign:
            raise ConfigError(
                f"--output: {self.path} holds files of something else ({', '.join(foreign[:3])}); "
                "use another folder"
            )
        if present and not overwrite:
            difference = self._difference(records)
            if difference:
                raise ConfigError(
                    f"--output: {self.path} holds an evaluation with {difference}; use another "
                    "--output FOLDER, or --overwrite to replace it"
                )

    def open(
        self,
        records: Sequence[PairRecord],
        plans: Mapping[tuple[str, str], ChunkPlan],
        overwrite: bool = False,
    ) -> None:
        """Continue or start the evaluation of these pairs. ``overwrite`` deletes the old files first."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if overwrite:  # also an evaluation of the same pairs: its files may be damaged
                for name in (*FILES, *UNFINISHED):
                    (self.path / name).unlink(missing_ok=True)
            self._write("plan.json", json_text([asdict(record) for record in records], indent=2) + "\n")
            self._responses = {record.key: [] for record in records}
            self._keep_whole_chunks(plans)
        except OSError as error:
            raise ConfigError(f"--output: cannot write to {self.path}: {error}") from error

    def responses(self, pair: tuple[str, str]) -> list[ScoredResponse]:
        """Return the responses of a pair so far, in the order of its plan."""
        return self._responses[pair]

    def chunks_left(self, pair: tuple[str, str], plan: ChunkPlan) -> list[Chunk]:
        """Return the chunks that have no responses yet."""
        done = len(self._responses[pair])
        remaining = []
        for chunk in plan.chunks:
            if done <= 0:
                remaining.append(chunk)
            done -= chunk.response_count
        return remaining

    def append(
        self, pair: tuple[str, str], responses: Sequence[ScoredResponse], texts: Sequence[str]
    ) -> None:
        """Write the responses of one chunk."""
        agent, benchmark = pair
        lines = []
        for response, text in zip(responses, texts, strict=True):
            record = {"agent": agent, "benchmark": benchmark, **asdict(response), "response": text}
            lines.append(json_text(record) + "\n")
        with open_inside(self.path / "responses.jsonl", self.path, "ab") as file:
            file.write("".join(lines).encode("utf-8", errors="backslashreplace"))
        self._responses[pair] += responses

    def write_results(self, results: Mapping[str, Any], tables: str) -> None:
        """Write the metrics of the pairs that are finished."""
        self._write("results.json", json_text(results, indent=2) + "\n")
        with open_inside(self.path / "results.md", self.path, "wb") as file:
            file.write(tables.encode("utf-8", errors="backslashreplace"))

    def _write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        unfinished = (self.path / name).with_suffix(".unfinished")
        with open_inside(unfinished, self.path, "wb") as file:
            file.write(text.encode("utf-8", errors="backslashreplace"))
        os.replace(unfinished, self.path / name)

    def _difference(self, records: Sequence[PairRecord]) -> str:
        """Return how the folder's evaluation differs from these pairs; empty if it can continue."""
        planned = {record.key: asdict(record) for record in records}
        try:
            plan = read_json(self.path / "plan.json", self.path)
            existing = [(str(entry["agent"]), str(entry["benchmark"]), dict(entry)) for entry in plan]
        except MissingFileError:
            return "no readable plan.json" if any((self.path / name).exists() for name in FILES) else ""
        except UnreadableFileError as error:
            return f"no readable plan.json ({error})"
        except (ValueError, KeyError, TypeError):
            return "no readable plan.json"
        for agent, benchmark, entry in existing:
            if (agent, benchmark) not in planned:
                return f"{agent} on {benchmark}, which this command does not request"
            for key, value in planned[agent, benchmark].items():
                if entry.get(key) != value:
                    return _describe_difference(key, entry.get(key), value)
        return ""

    def _keep_whole_chunks(self, plans: Mapping[tuple[str, str], ChunkPlan]) -> None:
        """Read the responses back and drop those of an incomplete chunk."""
        path = self.path / "responses.jsonl"
        if not os.path.lexists(path):
            return
        ends: dict[tuple[str, str], list[int]] = {pair: [] for pair in plans}
        starts: dict[int, int] = {}  # end of a line -> start of the line
        for pair, response, start, end in _read_responses(path, plans.keys()):
            self._responses[pair].append(response)
            ends[pair].append(end)
            starts[end] = start
        for pair, plan in plans.items():
            whole = _whole_responses(plan, len(self._responses[pair]))
            del self._responses[pair][whole:], ends[pair][whole:]
            if not _follow_plan(self._responses[pair], plan):
                raise ConfigError(
                    f"{path} is damaged: responses of {pair[0]} on {pair[1]} are missing in the middle; "
                    f"{_OVERWRITE_HINT}"
                )
        kept = path.with_suffix(".unfinished")
        with open_inside(path, self.path) as source, open_inside(kept, self.path, "wb") as target:
            for end in sorted(end for of_pair in ends.values() for end in of_pair):
                source.seek(starts[end])
                target.write(source.read(end - starts[end]))
        os.replace(kept, path)


def _whole_responses(plan: ChunkPlan, count: int) -> int:
    """Return how many of the first ``count`` responses belong to complete chunks."""
    whole = 0
    for chunk in plan.chunks:
        if whole + chunk.response_count > count:
            break
        whole += chunk.response_count
    return whole


def _follow_plan(responses: Sequence[ScoredResponse], plan: ChunkPlan) -> bool:
    """Return whether the responses are those of the plan, in order: one problem id for each position."""
    slots = [slot for chunk in plan.chunks for slot in chunk.slots][: len(responses)]
    pairs = {(position, response.problem) for (position, _), response in zip(slots, responses, strict=True)}
    one_to_one = len(pairs) == len({position for position, _ in pairs}) == len({name for _, name in pairs})
    samples = [sample for _, sample in slots]
    return one_to_one and samples == [response.sample for response in responses]


def _read_responses(
    path: Path, pairs: Collection[tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], ScoredResponse, int, int]]:
    """Yield pair, response and offset of every line; stop at a truncated last line."""
    start = 0
    try:
        for line in iterate_jsonl(path, path.parent):
            pair = (line.record.get("agent"), line.record.get("benchmark"))
            if not isinstance(pair[0], str) or not isinstance(pair[1], str) or pair not in pairs:
                raise UnreadableFileError(
                    f"{path}, line {line.number}, is damaged: its pair is not in plan.json"
                )
            yield (
                (pair[0], pair[1]),
                _parse_response(line.record, f"{path}, line {line.number},"),
                start,
                line.end,
            )
            start = line.end
    except UnreadableFileError as error:
        raise ConfigError(f"{error}; {_OVERWRITE_HINT}") from error


def _parse_response(record: Mapping[str, Any], where: str) -> ScoredResponse:
    for field in fields(ScoredResponse):
        value = record.get(field.name)
        if not isinstance(value, _FIELD_TYPES[field.name]) or isinstance(value, bool):
            raise UnreadableFileError(f"{where} is damaged or of another version: {field.name}")
    if record["verdict"] not in get_args(VerdictLabel) or record["finish_reason"] not in get_args(
        FinishReason
    ):
        raise UnreadableFileError(f"{where} is damaged or of another version: verdict or finish_reason")
    return ScoredResponse(**{field.name: record[field.name] for field in fields(ScoredResponse)})


def _describe_difference(key: str, existing: object, now: object) -> str:
    if key in ("weights", "problems"):
        return f"other {key}"
    return f"{key} {existing}, not {now}"
