"""The rollout log: every verified rollout of a run, on disk, one file per step and agent.

``RUN/rollouts/step-000012/NAME.jsonl`` holds one JSON object per rollout, ``round-1/NAME.jsonl`` beside it
those of a further round of the step, and ``learnt/NAME.jsonl`` one per rollout that the agent could learn
from; ``docs/rollout_log.md`` lists the fields. A file is written under a temporary name and then renamed, so
a file that exists is complete. Three readers use it: people, a resumed run (which never samples again what
the log holds), and other programs.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from hacrl.errors import CheckpointError
from hacrl.files import check_file, flush_to_disk
from hacrl.plain_text import json_text
from hacrl.rollouts.records import dump_line, from_json, load_line, to_json
from hacrl.types import Episode, LearntRollout, Problem, Remote, Rollout, Segment, Verdict, VerifiedRollout

SCHEMA = 1
LEARNT = "learnt"  # folder in a step's folder
Row = dict[str, Any]
Keep = int | Literal["all", "none"]
_DETAILS = ("rewards", "columns", "metrics")  # of a verdict; left out of rows where they are empty
_OPTIONAL = ("loss_mask", "late_from")  # of a learner's record; left out where they are None
_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_ROUND_FOLDER = re.compile(r"round-[1-9]\d*")


class RolloutLog:
    """Append and read the rollouts of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def append(
        self, step: int, agent: str, rollouts: Sequence[VerifiedRollout], round_number: int = 0
    ) -> None:
        """Write all of one agent's verified rollouts of a round. The file appears when it is complete."""
        seen: dict[str, int] = {}
        lines = []
        for verified in rollouts:
            problem = verified.rollout.problem
            sample = seen.get(problem.id, 0)
            seen[problem.id] = sample + 1
            lines.append(_encode(_row(step, sample, verified)))
        self._write(self._path(step, agent, round_number), lines)

    def append_learnt(self, step: int, learner: str, records: Sequence[LearntRollout]) -> None:
        """Write what one learner made of each rollout of a step. The file appears when it is complete.

        The file is not forced to disk, which would take longer than everything else: no run depends on it.
        """
        lines = [_encode_learnt(step, record) for record in records]
        self._write(self._learnt_path(step, learner), lines, flush=False)

    def _write(self, path: Path, lines: Sequence[bytes], *, flush: bool = True) -> None:
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(b"".join(lines))
            if flush:
                flush_to_disk(unfinished)
            unfinished.replace(path)
            if flush:
                flush_to_disk(path.parent)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {path}: {error.strerror or error}. Everything up to the last checkpoint is "
                f"safe: free disk space or grant access, then `hacrl resume {self.folder.parent}`"
            ) from error

    def has(self, step: int, agent: str, round_number: int = 0) -> bool:
        """Return whether the log holds this agent's rollouts of this round."""
        return self._path(step, agent, round_number).is_file()

    def discard(self, step: int, agent: str) -> None:
        """Delete one agent's rollouts of a step, so that they are sampled again."""
        for folder in self._round_folders(step):
            (folder / f"{agent}.jsonl").unlink(missing_ok=True)

    def discard_rounds_after(self, step: int, round_number: int) -> None:
        """Delete all agents' rollouts of later rounds of a step, which other rewards called for."""
        for folder in self._round_folders(step)[round_number + 1 :]:
            shutil.rmtree(folder)

    def load(
        self, step: int, agent: str, problems: Iterable[Problem], round_number: int = 0
    ) -> list[VerifiedRollout]:
        """Return one agent's rollouts of a round exactly as they were appended.

        ``problems`` are the round's: a rollout refers to its problem by id. Raise CheckpointError if the
        file is damaged or names a problem that is not among them.
        """
        by_id = {problem.id: problem for problem in problems}
        path = self._path(step, agent, round_number)
        try:
            return [_verified_rollout(row, by_id) for row in self._rows(path)]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"{path} does not fit this run: {error!r}; delete it to sample again"
            ) from error

    def read(self, step: int | None = None, agent: str | None = None) -> Iterator[Row]:
        """Yield rows, ordered by step, then round, then agent's name, then order of sampling."""
        for number in self.steps() if step is None else [step]:
            for path in self.files(number):
                if agent is None or path.stem == agent:
                    yield from self._rows(path)

    def files(self, step: int) -> list[Path]:
        """Return the files of a step's rollouts, ordered by round, then agent's name."""
        return [path for folder in self._round_folders(step) for path in sorted(folder.glob("*.jsonl"))]

    def _round_folders(self, step: int) -> list[Path]:
        """Return the folders of a step's rounds, the first round's first; empty without rollouts."""
        folder = self.folder / _folder_name(step)
        if not folder.is_dir():
            return []
        rounds = [path for path in folder.iterdir() if _ROUND_FOLDER.fullmatch(path.name)]
        return [folder, *sorted(rounds, key=lambda path: int(path.name.removeprefix("round-")))]

    def read_learnt(self, step: int) -> Iterator[Row]:
        """Yield what each learner made of each rollout of a step, ordered by learner's name."""
        folder = self._learnt_path(step, "-").parent
        for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
            yield from self._rows(path)

    def steps(self) -> list[int]:
        """Return the steps that the log holds, in increasing order."""
        if not self.folder.is_dir():
            return []
        found = (_STEP_FOLDER.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def prune(self, keep: Keep, steps_done: int, resumable_from: int | None) -> None:
        """Delete old steps. ``keep``: "all", "none", or a number of steps, counted back from ``steps_done``.

        Steps after ``resumable_from`` stay, because a resumed run reads them. None: no checkpoint needs them.
        """
        if keep == "all":
            return
        newest_deleted = steps_done if keep == "none" else steps_done - keep
        if resumable_from is not None:
            newest_deleted = min(newest_deleted, resumable_from)
        for step in self.steps():
            if step <= newest_deleted:
                shutil.rmtree(self.folder / _folder_name(step), ignore_errors=True)

    def _path(self, step: int, agent: str, round_number: int) -> Path:
        folder = self.folder / _folder_name(step)
        return (folder / f"round-{round_number}" if round_number else folder) / f"{agent}.jsonl"

    def _learnt_path(self, step: int, learner: str) -> Path:
        return self.folder / _folder_name(step) / LEARNT / f"{learner}.jsonl"

    def _rows(self, path: Path) -> Iterator[Row]:
        check_file(path, self.folder)
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = load_line(line)
                except ValueError as error:
                    raise CheckpointError(
                        f"{path}, line {number}, is damaged: {error}; delete the file to sample again"
                    ) from error
                if row.get("schema") != SCHEMA:
                    raise CheckpointError(
                        f"{path}, line {number}, has another schema than {SCHEMA}, the one that this version "
                        "of hacrl reads; use the version that wrote it"
                    )
                yield row


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _row(step: int, sample: int, verified: VerifiedRollout) -> Row:
    rollout, problem, verdict = verified.rollout, verified.rollout.problem, verified.verdict
    row: Row = {
        "schema": SCHEMA,
        "step": step,
        "agent": rollout.agent,
        "problem": problem.id,
        "sample": sample,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "text": rollout.text,
        "verdict": verdict.label,
        "reward": verdict.reward,
        "finish_reason": rollout.finish_reason,
        "tokens": rollout.num_tokens,
        "logprob": rollout.logprob if math.isfinite(rollout.logprob) else None,
        "policy_version": rollout.policy_version,
        "tokenizer": rollout.tokenizer,
        "prompt_ids": list(rollout.prompt_ids),
        "segments": [_segment(segment) for segment in rollout.segments],
    }
    row |= {key: dict(value) for key in _DETAILS if (value := getattr(verdict, key))}
    if problem.context:
        row["context"] = [turn.as_message() for turn in problem.context]
    if problem.fields:
        row["fields"] = dict(problem.fields)
    if problem.tools:
        row["tools"] = [to_json(tool) for tool in problem.tools]
    if rollout.episode is not None:
        row["episode"] = to_json(rollout.episode)
    if rollout.remote is not None:
        row["remote"] = to_json(rollout.remote)
    return row


def _segment(segment: Segment) -> Row:
    data = to_json(segment)
    for key in ("versions", "stop_text", "turns", "finish_reason"):
        if not data[key]:
            del data[key]
    return data


def _verified_rollout(row: Mapping[str, Any], problems: Mapping[str, Problem]) -> VerifiedRollout:
    rollout = Rollout(
        problem=problems[row["problem"]],
        agent=row["agent"],
        segments=tuple(from_json(Segment, segment) for segment in row["segments"]),
        finish_reason=row["finish_reason"],
        policy_version=row["policy_version"],
        tokenizer=row["tokenizer"],
        prompt_ids=tuple(row["prompt_ids"]),
        episode=from_json(Episode, row["episode"]) if "episode" in row else None,
        remote=from_json(Remote, row["remote"]) if "remote" in row else None,
    )
    details = {key: row[key] for key in _DETAILS if key in row}
    return VerifiedRollout(rollout, Verdict(row["reward"], row["verdict"], **details))


def _encode(row: Row) -> bytes:
    """Return one line of JSON without characters that could disturb a terminal."""
    line = dump_line(row).decode()
    return (line if line.isprintable() else json_text(row)).encode() + b"\n"


def _encode_learnt(step: int, record: LearntRollout) -> bytes:
    """Return what :func:`_encode` returns. There are many records, and orjson writes a record by itself."""
    try:
        line = orjson.dumps(record)
    except TypeError:  # lone surrogates
        line = b""
    if not line or not line.decode().isprintable():
        row = {"schema": SCHEMA, "step": step, **to_json(record)}
        return _encode({key: row[key] for key in row if key not in _OPTIONAL or row[key] is not None})
    for key in _OPTIONAL:  # texts cannot match: their quotes are escaped
        line = line.replace(b',"%b":null' % key.encode(), b"")
    return b'{"schema":%d,"step":%d,%b\n' % (SCHEMA, step, line[1:])
