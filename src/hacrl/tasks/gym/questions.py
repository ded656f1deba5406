"""Generate distinct questions of one kind of reasoning-gym.

This runs in a process of its own with a fixed hash seed. Some kinds iterate over sets or use the global
random generators: without this, equal seeds would give different questions in every process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from hacrl.errors import TaskError
from hacrl.json_values import to_tagged_json
from hacrl.tasks.gym.formats import FORMATS
from hacrl.tasks.gym.scoring import is_answerable, is_correct
from hacrl.tasks.splits import question_hash, question_key

_CHECKED_ENTRIES = 8  # on which answer format and scorer are tried
_WRONG_ANSWERS = ("0", "x")  # hardly ever correct
_MAX_REPEATS = 500  # draws without a new question after which the kind counts as exhausted


class QuestionSource:
    """One kind with its settings. Invalid settings raise :class:`TaskError`."""

    def __init__(self, kind: str, config: Mapping[str, Any], seed: int) -> None:
        self._gym: Any = import_module("reasoning_gym")
        known = import_module("reasoning_gym.factory").DATASETS
        if kind not in known:
            near = get_close_matches(kind, known, n=3)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?"
                if near
                else f"it has {', '.join(sorted(known))}"
            )
            raise TaskError(f"task.name: reasoning-gym has no {kind!r}; {hint}")
        _check_config(kind, config, [entry.name for entry in fields(known[kind][1])])
        self.draws = 0
        self._kind, self._config, self._seed = kind, dict(config), seed
        self._dataset: Any = None  # the first block; it can score answers to any question

    def draw(self, count: int, avoid: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return ``count`` distinct entries in the order of their hash; raise TaskError if too few exist."""
        avoided = {question_key(text) for text in avoid}
        found: dict[str, dict[str, Any]] = {}
        repeats = 0
        while len(found) < count:
            # Question i is drawn with seed + i, so the next block continues where the last one ended.
            for entry in self._block(count, start=self.draws):
                key = question_key(entry["question"])
                self.draws += 1
                is_new = key not in found and key not in avoided and is_answerable(entry)
                repeats = 0 if is_new else repeats + 1
                if is_new:
                    found[key] = entry
                if len(found) == count:
                    break
                if repeats > max(_MAX_REPEATS, 3 * len(found)):
                    raise TaskError(
                        f"size: gym:{self._kind} has only {len(found)} different questions with config "
                        f"{self._config} (after {self.draws} draws), but size, test_size and demonstrations "
                        f"need {count}; lower them or widen config"
                    )
        return [found[key] for key in sorted(found, key=question_hash)]

    def check_golds(self, entries: Sequence[Mapping[str, Any]], answer: str) -> None:
        """Raise TaskError if reasoning-gym's own answers are not scored as correct in this format."""
        answer_format = FORMATS[answer]
        for entry in entries[:_CHECKED_ENTRIES]:
            gold = entry["answer"]
            if not isinstance(gold, str):
                continue  # some kinds have many correct answers and give none
            extracted = answer_format.extract(answer_format.write(gold))
            if extracted is None or not is_correct(self._dataset, extracted, entry):
                raise TaskError(
                    f"answer={answer!r}: the correct answer {gold!r} of gym:{self._kind} is not scored as "
                    f"correct in this format; try {' or '.join(name for name in FORMATS if name != answer)}"
                )

    def check_scorer(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Raise TaskError if one answer passes for most questions: a learner would soon exploit that."""
        tried = entries[:_CHECKED_ENTRIES]
        golds = [entry["answer"] for entry in tried if isinstance(entry["answer"], str)]
        for answer in dict.fromkeys((*golds[:2], *_WRONG_ANSWERS)):
            others = [entry for entry in tried if str(entry["answer"]).casefold() != answer.casefold()]
            passed = sum(self._passes(answer, entry) for entry in others)
            if len(others) >= _CHECKED_ENTRIES // 2 and 2 * passed > len(others):
                raise TaskError(
                    f"task.name: the scorer of gym:{self._kind} cannot be trusted: it scores {answer!r} as "
                    f"correct for {passed} of {len(others)} questions with other answers; use another kind"
                )

    def _passes(self, answer: str, entry: Mapping[str, Any]) -> bool:
        try:
            return is_correct(self._dataset, answer, entry)
        except Exception:  # each kind raises its own types; in a run the verdict is "crash"
            return False

    def _block(self, size: int, start: int) -> Iterator[dict[str, Any]]:
        _seed_globals(self._seed + start)
        try:
            block = self._gym.create_dataset(self._kind, size=size, seed=self._seed + start, **self._config)
            first = block[0]
        except Exception as error:  # each kind raises its own types, also AssertionError
            raise TaskError(
                f"config: gym:{self._kind} refuses {self._config}, size {size}: {error}"
            ) from error
        self._dataset = self._dataset or block
        yield first
        for index in range(1, size):
            yield block[index]


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the questions that the parent process requested, as plain JSON.

    ``entry`` is reasoning-gym's record in tagged JSON, from which the scoring process restores it exactly.
    """
    try:
        source = QuestionSource(request["kind"], request["config"], request["seed"])
        entries = source.draw(request["count"], request["avoid"])
        source.check_golds(entries, request["answer"])
        source.check_scorer(entries)
        stored = [to_tagged_json(entry) for entry in entries]
    except TaskError as error:
        return {"error": str(error)}
    except TypeError as error:
        return {"error": f"task.name: questions of gym:{request['kind']} cannot be stored: {error}"}
    questions = [
        {
            "question": entry["question"],
            "answer": entry["answer"] if isinstance(entry["answer"], str) else None,
            "entry": tagged,
        }
        for entry, tagged in zip(entries, stored, strict=True)
    ]
    return {"questions": questions, "draws": source.draws}


def _seed_globals(seed: int) -> None:
    random.seed(seed)
    import_module("numpy").random.seed(seed % 2**32)


def _check_config(kind: str, config: Mapping[str, Any], known: Sequence[str]) -> None:
    own = [name for name in known if name not in ("size", "seed")]
    for key in config:
        if key in ("size", "seed"):
            raise TaskError(f"config.{key}: give {key} next to config, not inside it")
        if key not in own:
            near = get_close_matches(str(key), own, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(own)}"
            raise TaskError(f"config.{key}: unknown setting of gym:{kind}; {hint}")
