"""Draw a sample of a run's rollouts for the page, and count the importance ratios of all of them.

A step's rollouts are drawn as whole prompts with all agents' answers, in an order that a hash of step and
prompt decides, until the step's share of the page's size is used up. If not even one prompt fits, the first
one is shortened: fewer answers have tokens, then none, then there are fewer answers. Files are read line by
line; token ids and log-probabilities, most of a line, are parsed only for prompts that are drawn.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from hacrl.files import UnreadableFileError, open_inside
from hacrl.report.tokens import TokenTexts
from hacrl.rollouts.log import LEARNT, RolloutLog

BINS = 100  # of importance ratios; the first one also holds all below, and a last one all above
CROSS_TOP = 2.0  # the upper end of bins of other agents' ratios, which begin at 0
OWN_WIDTHS = 4  # bins of own ratios reach as many widths of the clip range to both sides of 1
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
    shortened: int = 0  # drawn rollouts whose tokens are left out
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
            "shortened": self.shortened,
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
        self,
        log: Path,
        agents: Sequence[str],
        token_texts: Mapping[str, TokenTexts | None],
        own_clip: Sequence[float] | None = None,
    ) -> None:
        self._bins = ratio_bins(own_clip)
        self._log = RolloutLog(log)
        self._agents = {name: number for number, name in enumerate(agents)}
        self._token_texts = token_texts

    @property
    def steps(self) -> list[int]:
        """The steps that the log holds."""
        return self._log.steps()

    def step(self, step: int, budget: int) -> StepRollouts:
        """Return a step with at most about ``budget`` bytes of base64; a budget of 0 gives counts alone."""
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
        rollouts = _by_problem(self._heads(self._log.files(step), ',"prompt_ids":'), found)
        learnt_files = sorted((folder / LEARNT).glob("*.jsonl"))
        learnt = _by_problem(self._heads(learnt_files, ',"token_ids":'), None)
        for rows in learnt.values():
            for row, _ in rows:
                self._count(found, row)
        found.prompts = len(rollouts)
        size = zlib.compressobj(6)
        spent = 0
        for problem in sorted(rollouts, key=lambda name: _hash(step, name)) if budget else ():
            data = self._prompt(rollouts[problem], learnt.get(problem, []))
            text = _json(data)
            spent += len(size.compress(text) + size.flush(zlib.Z_SYNC_FLUSH)) * 4 // 3
            if spent <= budget:
                found.prompt_data.append(data)
                continue
            if not found.prompt_data and (shorter := _first_that_fits(data, budget)) is not None:
                found.prompt_data.append(shorter)
            break
        found.kept_prompts = len(found.prompt_data)
        drawn = [answer for data in found.prompt_data for answer in data["rollouts"]]
        found.kept, found.shortened = len(drawn), sum("x" in answer for answer in drawn)

    def _count(self, found: StepRollouts, row: Row) -> None:
        pair = f"{row['learner']}>{row['agent']}"
        found.fates.setdefault(pair, Counter())[row["fate"]] += 1
        if row["ratio"] is not None:
            bins = self._bins["own" if row["learner"] == row["agent"] else "cross"]
            found.ratios.setdefault(pair, Counter())[bins.number_of(row["ratio"])] += 1

    def _heads(self, files: Iterable[Path], tail: str) -> Iterator[tuple[Row, bytes]]:
        """Yield each line without what comes after ``tail``, and the whole line.

        Text within JSON strings cannot look like ``tail``: its quotation marks are escaped there.
        """
        for path in files:
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
        whole = _parse(rollouts[0][1])
        if "context" in whole:
            prompt["context"] = whole["context"]
        if "tools" in whole:
            prompt["tools"] = [{"name": tool["name"], "text": tool["description"]} for tool in whole["tools"]]
        return {**prompt, "rollouts": answers}

    def _answer(self, row: Row, views: Sequence[Row]) -> Row:
        segments, is_episode = row["segments"], "episode" in row
        whole = "" if is_episode else _whole_text(row)  # an episode's text lacks stop tokens between turns
        answer: Row = {
            "a": self._agents[row["agent"]],
            "i": row["sample"],
            "t": row["text"],
            "v": row["verdict"],
            "r": row["reward"],
            "f": row["finish_reason"],
            "n": row["tokens"],
            "p": None,
            "l": [],
            "k": sorted((self._view(whole, view) for view in views), key=lambda view: view["a"]),
        }
        if is_episode:
            return {**answer, "e": self._episode(row)}
        ids = [token for segment in segments for token in segment["token_ids"]]
        logprobs = [
            value
            for segment in segments
            for value in segment["token_logprobs"] or [None] * len(segment["token_ids"])
        ]
        return {**answer, "p": self._pieces(row["agent"], ids, whole), "l": _rounded(logprobs)}

    def _episode(self, row: Row) -> Row:
        """Return how an episode began and ended, and its turns in order."""
        episode, rewards = row["episode"], iter(row["episode"]["turn_rewards"])
        turns = []
        for segment in row["segments"]:
            turn: Row = {"n": len(segment["token_ids"]), "t": segment["text"] + segment.get("stop_text", "")}
            if segment["kind"] == "action":
                turn["p"] = self._pieces(row["agent"], segment["token_ids"], turn["t"])
                turn["l"] = _rounded(segment["token_logprobs"])
                turn["c"] = [
                    [call["name"], call["arguments"]]
                    for said in segment.get("turns", ())
                    for call in said["tool_calls"]
                ]
                if (reward := next(rewards, None)) is not None:
                    turn["r"] = reward
            else:  # what the environment said, without the control tokens around it
                turn["o"] = [
                    [said["tool"] or "environment", said["content"]] for said in segment.get("turns", ())
                ]
            turns.append(turn)
        found = {"end": episode["end"], "turns": turns}
        return found | {key: episode[key] for key in ("opening", "failure") if episode[key]}

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
        if row.get("loss_mask") is not None:  # tokens that the learner reads without learning them
            view["o"] = _unlearnt(row["loss_mask"])
        if row["token_ids"] is not None:
            view["p"] = self._pieces(row["learner"], row["token_ids"], text)
            view["n"] = len(row["token_ids"])
        return view

    def _pieces(self, agent: str, ids: Sequence[int], text: str) -> list[str] | None:
        texts = self._token_texts.get(agent)
        return None if texts is None else texts.pieces(ids, text)


def _whole_text(row: Row) -> str:
    """Return the text of all tokens, the stop string that ended the response included."""
    return "".join(segment["text"] + segment.get("stop_text", "") for segment in row["segments"])


def _by_problem(
    heads: Iterator[tuple[Row, bytes]], found: StepRollouts | None
) -> dict[str, list[tuple[Row, bytes]]]:
    groups: dict[str, list[tuple[Row, bytes]]] = {}
    for row, line in heads:
        groups.setdefault(row["problem"], []).append((row, line))
        if found is not None:
            found.total += 1
    return groups


def _first_that_fits(prompt: Row, budget: int) -> Row | None:
    """Return the longest version of a prompt that fits; None if not even single answers without tokens do."""
    most = max(Counter(answer["a"] for answer in prompt["rollouts"]).values())
    versions = [(most, 1), (most, 0), *((answers, 0) for answers in (most // 2, 1) if 0 < answers < most)]
    for answers, with_tokens in versions:
        shorter = _shortened(prompt, answers, with_tokens)
        if len(encode(shorter)) <= budget:
            return shorter
    return None


def _shortened(prompt: Row, answers: int, with_tokens: int) -> Row:
    """Return a prompt with the first answers of each agent, and tokens of the first of these."""
    seen: Counter[int] = Counter()
    kept = []
    for answer in prompt["rollouts"]:
        seen[answer["a"]] += 1
        if seen[answer["a"]] <= answers:
            kept.append(answer if seen[answer["a"]] <= with_tokens else _without_tokens(answer))
    return {**prompt, "rollouts": kept}


def _without_tokens(answer: Row) -> Row:
    views = [_without(view, ("l", "p", "o")) for view in answer["k"]]
    shorter = {**answer, "p": None, "l": [], "k": views, "x": 1}
    if "e" in answer:
        turns = [_without(turn, ("l", "p")) for turn in answer["e"]["turns"]]
        shorter["e"] = {**answer["e"], "turns": turns}
    return shorter


def _unlearnt(loss_mask: Sequence[bool]) -> list[list[int]]:
    """Return where each run of tokens that are not learnt begins, and how many tokens it has."""
    runs: list[list[int]] = []
    for index, is_learnt in enumerate(loss_mask):
        if is_learnt:
            continue
        if runs and sum(runs[-1]) == index:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    return runs


def _without(row: Row, keys: Sequence[str]) -> Row:
    return {key: value for key, value in row.items() if key not in keys}


@dataclass(frozen=True)
class RatioBins:
    """Bins of equal width. Number ``BINS`` holds all ratios above the others, number 0 all below."""

    low: float
    width: float

    def number_of(self, ratio: float) -> int:
        """Return the number of the bin that holds the ratio."""
        return math.floor(min(BINS, max(0.0, (ratio - self.low) / self.width)))


def ratio_bins(own_clip: Sequence[float] | None) -> dict[str, RatioBins]:
    """Return the bins of own and of other agents' ratios.

    Own ratios are as close to 1 as their clip range is narrow, by default 0.0007. ``own_clip``: this range.
    """
    reach = OWN_WIDTHS * (own_clip[1] - own_clip[0]) if own_clip else 0.0
    if not 0 < reach <= 1:
        reach = 1.0
    return {
        "own": RatioBins(1 - reach * (1 + 1 / BINS), 2 * reach / BINS),  # 1 is the middle of a bin
        "cross": RatioBins(0.0, CROSS_TOP / BINS),
    }


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
