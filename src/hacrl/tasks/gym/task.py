"""The ``gym:NAME`` tasks: procedural reasoning of reasoning-gym, e.g. ``gym:chain_sum``, ``gym:countdown``.

Scoring is strict. reasoning-gym gives part of a point to text that merely contains the answer, which a
learner would soon exploit. Here only a score of 1 is correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.tasks.gym.formats import FORMATS
from hacrl.tasks.gym.processes import GymScorer, Question, draw_questions
from hacrl.tasks.prompts import Demonstration, PromptStyle, parse_demonstrations, prompt_style
from hacrl.tasks.splits import check_count, question_id
from hacrl.types import Problem, Rollout, Verdict


class GymTask:
    """One kind of reasoning-gym, with its own ``config``, split by question into train and test.

    ``demonstrations`` is a list of ``{problem: ..., solution: ...}``, or the number of further questions to
    show with their answers; these are in neither train nor test.
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
        shot_count = demonstrations if isinstance(demonstrations, int) else 0
        check_count("demonstrations", shot_count, least=0)
        given = () if isinstance(demonstrations, int) else parse_demonstrations(demonstrations)
        prompt_style(template, system, given)  # refuse bad options before the slow generation
        count = size + test_size + shot_count
        shown = [demonstration.problem for demonstration in given]
        questions, draws = draw_questions(kind, config or {}, seed, count, avoid=shown, answer=answer)
        drawn = tuple(self._demonstration(question) for question in questions[:shot_count])
        style = prompt_style(template, system, given or drawn)
        problems = tuple(_problem(question, style) for question in questions[shot_count:])
        self._test, self._train = problems[:test_size], problems[test_size:]
        self.notes: tuple[str, ...] = ()
        if draws > count:
            self.notes = (f"{count} different questions took {draws} draws",)
        self._scorer = GymScorer(kind, config or {}, seed, verifier or VerifierSettings())

    @property
    def train(self) -> Sequence[Problem]:
        """Problems to train on, in a fixed shuffled order."""
        return self._train

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order."""
        return self._test

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout. The scoring process starts with the first call."""
        judged: dict[tuple[str, str], Verdict] = {}
        verdicts = []
        for rollout in rollouts:
            answer = self._format.extract(rollout.text)
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

    def _demonstration(self, question: Question) -> Demonstration:
        if question.answer is None:
            raise TaskError(
                f"demonstrations: {self.name} has no answers to show; give a list of {{problem, solution}}"
            )
        return Demonstration(question.question, self._format.write(question.answer))


def _problem(question: Question, style: PromptStyle) -> Problem:
    text = question.question
    fields = {"entry": question.entry}
    return Problem(question_id(text), style.render(text), question.answer or "", style.context, fields)
