"""Procedural reasoning tasks of reasoning-gym: ``gym:chain_sum``, ``gym:countdown``, and a hundred more.

Scoring is strict: reasoning-gym gives part of a point to text that merely contains the answer, which a
learner would exploit at once; here only a score of 1 is correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.tasks.gym.processes import GymScorer, Question, draw_questions
from hacrl.tasks.gym.scoring import FORMATS
from hacrl.tasks.prompts import Demonstration, PromptStyle, parse_demonstrations, prompt_style
from hacrl.tasks.splits import check_count, question_id
from hacrl.types import Problem, Rollout, Verdict


class GymTask:
    """One kind of reasoning-gym, with its own ``config``, split by question into train and test.

    ``demonstrations`` is a number of questions to show with their answers, drawn apart from train and test,
    or a list of ``{problem: ..., solution: ...}``.
    """

    def __init__(
        self,
        kind: str,
        /,
        *,
        size: int = 1000,
        test_size: int = 100,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        answer: str = "boxed",
        prompt: str | None = None,
        system: str | None = None,
        demonstrations: int | Sequence[Any] = 0,
        verifier: VerifierSettings | None = None,
    ) -> None:
        self.name = f"gym:{kind}"
        self.max_reward: float | None = 1.0
        self.independent_verdicts = True
        check_count("size", size)
        check_count("test_size", test_size, least=0)
        check_count("seed", seed, least=0)
        if answer not in FORMATS:
            raise TaskError(f"answer={answer!r}: must be one of {', '.join(FORMATS)}")
        if config is not None and not isinstance(config, Mapping):
            raise TaskError(f"config={config!r}: must map settings of {self.name} to values")
        self._format = FORMATS[answer]
        template = self._format.prompt if prompt is None else prompt
        to_show = demonstrations if isinstance(demonstrations, int) else 0
        check_count("demonstrations", to_show, least=0)
        given = () if isinstance(demonstrations, int) else parse_demonstrations(demonstrations)
        prompt_style(template, system, given)  # refuse a bad one before slow questions are made
        count = size + test_size + to_show
        shown = [one.problem for one in given]
        questions, draws = draw_questions(kind, config or {}, seed, count, avoid=shown, answer=answer)
        drawn = tuple(self._demonstration(one) for one in questions[:to_show])
        style = prompt_style(template, system, given or drawn)
        problems = tuple(_problem(one, style) for one in questions[to_show:])
        self._test, self._train = problems[:test_size], problems[test_size:]
        self.notes: tuple[str, ...] = ()
        if draws > count:
            self.notes = (f"{draws} questions were drawn to get {count} different ones",)
        self._scorer = GymScorer(kind, config or {}, seed, verifier or VerifierSettings())

    @property
    def train(self) -> Sequence[Problem]:
        """Problems that may be used for learning, in a fixed shuffled order."""
        return self._train

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order."""
        return self._test

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """See :class:`hacrl.tasks.base.Task`. The scoring process starts with the first call."""
        judged: dict[tuple[str, str], Verdict] = {}
        verdicts = []
        for rollout in rollouts:
            answer = self._format.read(rollout.text)
            if answer is None:
                verdicts.append(Verdict(0.0, "unparsable"))
                continue
            key = (rollout.problem.id, answer)
            if key not in judged:
                judged[key] = self._scorer.judge(answer, rollout.problem.fields["entry"])
            verdicts.append(judged[key])
        return verdicts

    def close(self) -> None:
        """End the scoring process; a later :meth:`verify` starts a new one."""
        self._scorer.close()

    def _demonstration(self, one: Question) -> Demonstration:
        if one.answer is None:
            raise TaskError(
                f"demonstrations: {self.name} has no answers to show; give a list of {{problem, solution}}"
            )
        return Demonstration(one.question, self._format.write(one.answer))


def _problem(one: Question, style: PromptStyle) -> Problem:
    fields = {"entry": one.entry}
    return Problem(
        question_id(one.question), style.render(one.question), one.answer or "", style.context, fields
    )
