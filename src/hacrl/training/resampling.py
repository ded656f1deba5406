"""Resampling: replace prompts whose rewards have no variance (the dynamic sampling of DAPO).

If all responses that a learner compares have the same reward, every advantage is zero, and the prompt teaches
nothing. With ``rollout.resample`` a step asks further prompts in further rounds, as many in each as are still
missing. The rounds are a function of the run's seed, the step, and the rewards of the rounds before. So a run
needs no further state, and a resumed run asks the same prompts.

Only learning leaves prompts out. Capabilities and metrics use the rewards of all prompts asked: without the
prompts that are always right or always wrong they would be biased.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hacrl.config.schema import RunConfig
from hacrl.rollouts.groups import PromptGroup
from hacrl.tasks.stream import ProblemStream
from hacrl.training.samples import compared_rewards
from hacrl.types import Problem


class Resampler:
    """Decides which prompts a step asks in further rounds, and which ones it learns from."""

    def __init__(self, config: RunConfig, stream: ProblemStream) -> None:
        self.rounds = config.rollout.resample  # at most, after the first
        self._prompts = config.rollout.prompts_per_step
        self._shares_rollouts = config.method.shares_rollouts
        self._overlong = (config.rollout.max_new_tokens, config.learning.overlong_buffer)
        self._stream = stream

    def further_rounds(self, step: int, asked: Sequence[PromptGroup]) -> Iterator[tuple[int, list[Problem]]]:
        """Yield a round's number, from 1, and its problems, while prompts with variance are missing.

        ``asked`` are the step's prompts so far. The caller adds a round's prompts before the next round.
        """
        for number in range(1, self.rounds + 1):
            missing = self._prompts - sum(map(self.has_variance, asked))
            known = {group.problem.id for group in asked}
            problems = self._stream.replacements(step - 1, number, missing, known) if missing > 0 else []
            if not problems:
                return
            yield number, problems

    def chosen(self, asked: Sequence[PromptGroup]) -> list[PromptGroup]:
        """Return the prompts to learn from, in the order in which they were asked.

        Prompts with variance come first. If there are too few, the first ones without variance stay, so that
        all steps have equally many prompts.
        """
        if len(asked) <= self._prompts:
            return list(asked)
        with_variance = [self.has_variance(group) for group in asked]
        spare = max(0, self._prompts - sum(with_variance))  # prompts without variance that stay
        chosen = []
        for group, has_variance in zip(asked, with_variance, strict=True):
            if has_variance or spare > 0:
                chosen.append(group)
                spare -= not has_variance
        return chosen

    def has_variance(self, group: PromptGroup) -> bool:
        """Return whether some learner compares different rewards to the prompt."""
        rewards = compared_rewards(group, self._overlong)
        if self._shares_rollouts:
            return len({reward for values in rewards.values() for reward in values}) > 1
        return any(len(set(values)) > 1 for values in rewards.values())
