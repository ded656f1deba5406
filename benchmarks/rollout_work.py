"""The work rollout engines are compared on: prompts of an exact length, and answers that cost a verifier.

A random model says no ``\\boxed{}``: the task here makes an answer out of every response, so that judging is
as dear as it is with a model that has learnt to answer.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hacrl.models.agent import Agent
from hacrl.tasks.math.pool import MathVerifier
from hacrl.types import Problem, Rollout, Verdict

GOLD = r"\frac{x + 1}{2}"


@dataclass(frozen=True)
class Work:
    """One case, e.g. ``32x8x128x256``: prompts, responses to each, prompt tokens, new tokens."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Work:
        """From its name."""
        return cls(*(int(part) for part in text.lower().split("x")))

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.prompts}x{self.samples}x{self.prompt_tokens}x{self.new_tokens}"

    @property
    def responses(self) -> int:
        """All of a round."""
        return self.prompts * self.samples


def make_problems(agent: Agent, count: int, tokens: int, seed: int) -> list[Problem]:
    """Random letters that are exactly so many tokens for this agent."""
    rng = random.Random(f"{seed}/{tokens}")
    found = []
    while len(found) < count:
        text = "".join(rng.choices(string.ascii_lowercase, k=5 * tokens))
        problem = _cut(agent, Problem(f"{seed}-{tokens}-{len(found)}", text, GOLD), tokens)
        if problem is not None:
            found.append(problem)
    return found


def _cut(agent: Agent, problem: Problem, tokens: int) -> Problem | None:
    """The longest beginning of a text that has so many tokens; a letter more is rarely a token less."""
    low, high = 1, len(problem.prompt)
    while low < high:
        middle = (low + high + 1) // 2
        length = len(agent.encode_prompt(replace(problem, prompt=problem.prompt[:middle])))
        low, high = (middle, high) if length <= tokens else (low, middle - 1)
    cut = replace(problem, prompt=problem.prompt[:low])
    return cut if len(agent.encode_prompt(cut)) == tokens else None


class AnsweringTask:
    """Judges each response by itself, as ``boxed`` does, after giving it an answer of its own.

    A share of the answers can only be judged by comparing expressions in a worker process; the others are
    decided by their text. Of wrong answers to MATH-500, a fifth are of the first kind.
    """

    name = "answering"
    max_reward: float | None = 1.0
    independent_verdicts = True

    def __init__(self, problems: Sequence[Problem], symbolic: float) -> None:
        self.train, self.test = list(problems), list[Problem]()
        self._symbolic = symbolic
        self._verifier = MathVerifier()

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """See :class:`hacrl.tasks.base.Task`."""
        return self._verifier.verify([self._answered(one.text) for one in rollouts])

    def close(self) -> None:
        """End the workers."""
        self._verifier.close()

    def _answered(self, text: str) -> tuple[str, str]:
        """Gold answer and response; hardly any two are equal, so that no verdict is remembered."""
        number = zlib.crc32(text.encode())
        wrong, more = number % 3 == 0, number % 10_007
        if number % 1000 >= 1000 * self._symbolic:
            return str(more), rf"{text} \boxed{{{more + wrong}}}"
        return GOLD, rf"{text} \boxed{{\frac{{x}}{{2}} + \frac{{1}}{{2}} + {more} - {more + wrong}}}"
