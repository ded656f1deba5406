"""Draw a sample of a run's rollouts for the page, and count the importance ratios of all of them.

A step's rollouts are drawn as whole prompts with all agents' answers, in an order that a hash of step and
prompt decides, until the step's share of the page's size is used up. Files are read line by line; token ids
and log-probabilities, most of a line, are parsed only for prompts that are drawn.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from hacrl.files import UnreadableFileError, open_inside
from hacrl.report.tokens import TokenTexts
from hacrl.rollouts.log import LEARNT, RolloutLog

BINS = 100  # of importance ratios, between 0 and TOP_RATIO; the last bin holds all ratios above
TOP_RATIO = 2.0
_LOGPROB_DECIMALS = 3
Row = dict[str, Any]


@dataclass
class StepRollouts:
    """One step's share of the page."""

    step: int
    total: int = 0  # rollouts in the log
    kept: int = 0
    prompts: int = 0
    kept_prompts: int = 0
    prompt_data: list[Row] = field(default_factory=list)
    # "learner>source" -> bin -> rollouts
    ratios: dict[str, Counter[int]] = field(default_factory=dict)
    fates: dict[str, Counter[str]] = field(default_factory=dict)

    def encoded(self) -> str:
        """Return the drawn prompts as JSON, compressed and in base64."""
        return encode({"step": self.step, "prompts": self.prompt_data})

    def index(self) -> Row:
        """Return the counts, which the page holds of every step."""
        return {
            "step": self.step,
            "total": self.total,
            "kept": self.kept,
            "prompts": self.prompts,
            "keptPrompts": self.kept_prompts,
            "ratios": {pair: sorted(bins.items()) for pair, bins in sorted(self.ratios.items())},
            "fates": {pair: dict(fates) for pair, fates in sorted(self.fates.items())},
        }


def encode(value: Any) -> str:
    """Return JSON data as base64 of gzip, which browsers can read. Equal data gives equal text."""
    return base64.b64encode(gzip.compress(_json(value), 9, mtime=0)).decode("ascii")


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode("ascii")


class RolloutSampler:
    """Reads the rollout log of one run, step by step."""

    def __init__(
        self, log: Path, agents: Sequence[str], token_texts: Mapping[str, TokenTexts | None]
    ) -> None:
        self._log = RolloutLog(log)
        self._agents = {name: number for number, name in enumerate(agents)}
        self._token_texts = token_texts

    @property
    def steps(self) -> list[int]:
        """The steps that the log holds."""
        return self._log.steps()

    def step(self, step: int, budget: int) -> StepRollouts:
        """Return a step with at most about ``budget`` bytes of base64, but one prompt at least."""
        found = StepRollouts(step)
        try:
            self._read(found, budget)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnreadableFileError(
                f"the rollouts of step {step} in {self._log.folder} are damaged or of another version: "
                f"{error!r}; delete their folder to make a report of the other steps"
            ) from error
        return found

    def _read(self, found: StepRollouts, budget: int) -> None:
        step = found.step
        folder = self._log.folder / f"step-{step:06d}"
        rollouts = _by_problem(self._heads(folder, ',"prompt_ids":'), found)
        learnt = _by_problem(self._heads(folder / LEARNT, ',"token_ids":'), None)
        for rows in learnt.values():
            for row, _ in rows:
                _count(found, row)
        found.prompts = len(rollouts)
        size = zlib.compressobj(6)
        spent = 0
        for problem in sorted(rollouts, key=lambda name: _hash(step, name)):
            data = self._prompt(rollouts[problem], learnt.get(problem, []))
            text = _json(data)
            spent += len(size.compress(text) + size.flush(zlib.Z_SYNC_FLUSH)) * 4 // 3
            if found.prompt_data and spent > budget:
                break
            found.prompt_data.append(data)
            found.kept += len(data["rollouts"])
        found.kept_prompts = len(found.prompt_data)

    def _heads(self, folder: Path, tail: str) -> Iterator[tuple[Row, bytes]]:
        """Yield each line without what comes after ``tail``, and the whole line.

        Text within JSON strings cannot look like ``tail``: its quotation marks are escaped there.
        """
        for path in sorted(folder.glob("*.jsonl")):
            with open_inside(path, self._log.folder) as file:
                for line in file:
                    head, cut, _ = line.partition(tail.encode())
                    yield _parse(head + b"}" if cut else line), line

    def _prompt(self, rollouts: Sequence[tuple[Row, bytes]], learnt: Sequence[tuple[Row, bytes]]) -> Row:
        views: dict[tuple[str, int], list[Row]] = {}
        for _, line in learnt:
            row = _parse(line)
            if "late_from" not in row:  # the rollout itself is among those of an earlier step
                views.setdefault((row["agent"], row["sample"]), []).append(row)
        answers = []
        for _, line in rollouts:
            row = _parse(line)
            answers.append(self._answer(row, views.get((row["agent"], row["sample"]), [])))
        first = rollouts[0][0]
        prompt = {"id": first["problem"], "prompt": first["prompt"], "answer": first["answer"]}
        if "context" in (whole := _parse(rollouts[0][1])):
            prompt["context"] = whole["context"]
        return {**prompt, "rollouts": answers}

    def _answer(self, row: Row, views: Sequence[Row]) -> Row:
        ids = [token for segment in row["segments"] for token in segment["token_ids"]]
        logprobs = [
            value
            for segment in row["segments"]
            for value in segment["token_logprobs"] or [None] * len(segment["token_ids"])
        ]
        pieces = self._pieces(row["agent"], ids, row["text"])
        return {
            "a": self._agents[row["agent"]],
            "i": row["sample"],
            "t": row["text"],
            "v": row["verdict"],
            "r": row["reward"],
            "f": row["finish_reason"],
            "n": row["tokens"],
            "p": pieces,
            "l": _rounded(logprobs),
            "k": sorted((self._view(row["text"], view) for view in views), key=lambda view: view["a"]),
        }

    def _view(self, text: str, row: Row) -> Row:
        """Return what one learner made of a response."""
        view = {
            "a": self._agents[row["learner"]],
            "f": row["fate"],
            "A": _short(row["advantage"]),
            "s": _short(row["ratio"]),
            "c": _short(row["clipped"]),
            "w": _short(row["weight"]),
        }
        if row["token_logprobs"] is not None:
            view["l"] = _rounded(row["token_logprobs"])
        if row["token_ids"] is not None:
            view["p"] = self._pieces(row["learner"], row["token_ids"], text)
            view["n"] = len(row["token_ids"])
        return view

    def _pieces(self, agent: str, ids: Sequence[int], text: str) -> list[str] | None:
        texts = self._token_texts.get(agent)
        return None if texts is None else texts.pieces(ids, text)


def _by_problem(
    heads: Iterator[tuple[Row, bytes]], found: StepRollouts | None
) -> dict[str, list[tuple[Row, bytes]]]:
    groups: dict[str, list[tuple[Row, bytes]]] = {}
    for row, line in heads:
        groups.setdefault(row["problem"], []).append((row, line))
        if found is not None:
            found.total += 1
    return groups


def _count(found: StepRollouts, row: Row) -> None:
    pair = f"{row['learner']}>{row['agent']}"
    found.fates.setdefault(pair, Counter())[row["fate"]] += 1
    if row["ratio"] is not None:
        found.ratios.setdefault(pair, Counter())[ratio_bin(row["ratio"])] += 1


def ratio_bin(ratio: float) -> int:
    """Return the number of the bin that holds the ratio."""
    return min(BINS, max(0, math.floor(ratio / TOP_RATIO * BINS)))


def _hash(step: int, problem: str) -> bytes:
    return hashlib.sha256(f"{step}\x1f{problem}".encode(errors="backslashreplace")).digest()


def _parse(line: bytes) -> Row:
    try:
        row: Row = orjson.loads(line)
    except ValueError:  # orjson refuses lone surrogates, which hacrl writes as escapes
        row = json.loads(line)
    return row


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, _LOGPROB_DECIMALS) for value in values]


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
