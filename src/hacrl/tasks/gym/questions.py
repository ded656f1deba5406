"""Distinct questions of one kind of reasoning-gym.

This runs in a process of its own with a fixed hash seed: some kinds walk over sets or use the global random
generators, and would ask other questions in every process, with no regard to the seed.
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
from hacrl.tasks.gym.scoring import FORMATS, is_answerable, is_correct
from hacrl.tasks.splits import question_hash, question_key

_GOLDS_TRIED = 8  # answers of reasoning-gym itself that are scored
_NO_ANSWERS = ("0", "x")  # hardly ever right
_PATIENCE = 500  # draws without a new question after which a small space counts as exhausted


class QuestionSource:
    """One kind with its settings; everything it refuses is a :class:`TaskError`."""

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
        self._first: Any = None  # scores the answers of all

    def draw(self, count: int, avoid: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Exactly ``count`` distinct questions in the order of their hash, or an error if there are fewer."""
        avoided = {question_key(text) for text in avoid}
        found: dict[str, dict[str, Any]] = {}
        fruitless = 0
        while len(found) < count:
            # Question number i comes from seed + i, so the next block goes on where the last one ended.
            for entry in self._block(count, start=self.draws):
                key = question_key(entry["question"])
                self.draws += 1
                is_new = key not in found and key not in avoided and is_answerable(entry)
                fruitless = 0 if is_new else fruitless + 1
                if is_new:
                    found[key] = entry
                if len(found) == count:
                    break
                if fruitless > max(_PATIENCE, 3 * len(found)):
                    raise TaskError(
                        f"size: gym:{self._kind} has only {len(found)} different questions with config "
                        f"{self._config} ({self.draws} were drawn), but size, test_size and demonstrations "
                        f"ask for {count}; lower them or widen config"
                    )
        return [found[key] for key in sorted(found, key=question_hash)]

    def check_golds(self, entries: Sequence[Mapping[str, Any]], answer: str) -> None:
        """What reasoning-gym itself calls the answer must be correct in this format, or nothing can be."""
        form = FORMATS[answer]
        for entry in entries[:_GOLDS_TRIED]:
            gold = entry["answer"]
            if not isinstance(gold, str):
                continue  # some kinds have many right answers and name none
            read = form.read(form.write(gold))
            if read is None or not is_correct(self._first, read, entry):
                raise TaskError(
                    f"answer={answer!r}: the right answer {gold!r} of gym:{self._kind} is not read as "
                    f"correct in this format; try {' or '.join(name for name in FORMATS if name != answer)}"
                )

    def check_scorer(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a kind in which one answer passes for most questions: a learner would find it at once."""
        asked = entries[:_GOLDS_TRIED]
        golds = [entry["answer"] for entry in asked if isinstance(entry["answer"], str)]
        for answer in dict.fromkeys((*golds[:2], *_NO_ANSWERS)):
            others = [entry for entry in asked if str(entry["answer"]).casefold() != answer.casefold()]
            passed = sum(self._passes(answer, entry) for entry in others)
            if len(others) >= _GOLDS_TRIED // 2 and 2 * passed > len(others):
                raise TaskError(
                    f"task.name: the scorer of gym:{self._kind} cannot be trusted: it calls {answer!r} right "
                    f"for {passed} of {len(others)} questions with other answers; use another kind"
                )

    def _passes(self, answer: str, entry: Mapping[str, Any]) -> bool:
        try:
            return is_correct(self._first, answer, entry)
        except Exception:  # each kind has its own; in a run it is the verdict "crash"
            return False

    def _block(self, size: int, start: int) -> Iterator[dict[str, Any]]:
        _seed_globals(self._seed + start)
        try:
            block = self._gym.create_dataset(self._kind, size=size, seed=self._seed + start, **self._config)
            first = block[0]
        except Exception as error:  # its checks are assertions, and each kind has its own
            raise TaskError(
                f"config: gym:{self._kind} refuses {self._config}, size {size}: {error}"
            ) from error
        self._first = self._first or block
        yield first
        for index in range(1, size):
            yield block[index]


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the questions that the parent process asked for, as plain JSON.

    ``entry`` is reasoning-gym's record in tagged JSON, from which the scoring process restores it exactly.
    """
    try:
        source = QuestionSource(request["kind"], request["config"], request["seed"])
        entries = source.draw(request["count"], request["avoid"])
        source.check_golds(entries, request["answer"])
        source.check_scorer(entries)
        written = [to_tagged_json(entry) for entry in entries]
    except TaskError as error:
        return {"error": str(error)}
    except TypeError as error:
        return {"error": f"task.name: questions of gym:{request['kind']} cannot be stored: {error}"}
    questions = [
        {
            "question": entry["question"],
            "answer": entry["answer"] if isinstance(entry["answer"], str) else None,
            "entry": stored,
        }
        for entry, stored in zip(entries, written, strict=True)
    ]
    return {"questions": questions, "draws": source.draws}


def _seed_globals(seed: int) -> None:
    random.seed(seed)
    import_module("numpy").random.seed(seed % 2**32)


def _check_config(kind: str, config: Mapping[str, Any], known: Sequence[str]) -> None:
    own = [name for name in known if name not in ("size", "seed")]
    for key in config:
        if key in ("size", "seed"):
            raise TaskError(f"config.{key}: give {key} beside config, not in it")
        if key not in own:
            near = get_close_matches(str(key), own, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(own)}"
            raise TaskError(f"config.{key}: unknown setting of gym:{kind}; {hint}")
