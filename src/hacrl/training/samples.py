"""From everybody's verified rollouts to one learner's samples.

Which responses of others a learner learns from, if it may not learn from all.

With n agents every learner has n * G responses per prompt, so that learning costs n^2 in all. A cap on
others' responses keeps it linear in n. What is left out is left out of the loss alone: baselines and
capabilities take every reward, which costs nothing.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hacrl.algorithms.advantage import CapabilityRatio
from hacrl.algorithms.methods import Method
from hacrl.models.agent import Agent
from hacrl.models.retokenizing import DropReason, LearnerTokens, Retokeniser
from hacrl.rollouts.groups import PromptGroup
from hacrl.seeding import derive_seed
from hacrl.types import LearnerSample, Rollout


@dataclass
class LearnerSamples:
    """The samples of one step, and which rollouts did not become one."""

    samples: list[LearnerSample] = field(default_factory=list)
    dropped: Counter[tuple[str, DropReason]] = field(default_factory=Counter)  # by source and reason
    length_ratios: dict[str, list[float]] = field(default_factory=dict)  # retokenised: own tokens / source's
    left_out: Counter[str] = field(default_factory=Counter)  # by source; never tried because of the cap

    def add(self, sample: LearnerSample) -> None:
        """One more."""
        self.samples.append(sample)
        if sample.behaviour_logprobs is None:
            ratio_of_lengths = sample.loss_tokens / sample.source_length
            self.length_ratios.setdefault(sample.source, []).append(ratio_of_lengths)


@dataclass
class _Prompt:
    """One prompt's responses on their way."""

    group: PromptGroup
    trying: list[Candidate]
    waiting: list[Candidate]  # others' beyond the cap, in the order in which they replace what is lost
    samples: dict[tuple[str, int], LearnerSample] = field(default_factory=dict)  # by source and place

    def rollout(self, one: Candidate) -> Rollout:
        return self.group.responses[one.source][one.place].rollout

    def take_in(self, one: Candidate, sample: LearnerSample | DropReason, is_own: bool) -> None:
        """A response was tried; one of another agent that is lost makes room for the next."""
        if isinstance(sample, LearnerSample):
            self.samples[one.source, one.place] = sample
        elif not is_own and self.waiting:
            self.trying.append(self.waiting.pop(0))


class SampleBuilder:
    """One learner's way of looking at rollouts.

    ``max_cross_rollouts``: responses of others per prompt that it learns from; None: all. Builders that
    share a ``retokeniser`` share its work.
    """

    def __init__(
        self,
        learner: Agent,
        method: Method,
        learn_stop_token: bool = True,
        max_cross_rollouts: int | None = None,
        retokeniser: Retokeniser | None = None,
    ) -> None:
        self._learner = learner
        self._method = method
        self._learn_stop_token = learn_stop_token
        self._max_cross_rollouts = max_cross_rollouts
        self._retokeniser = retokeniser or Retokeniser()

    def build(self, groups: Sequence[PromptGroup], ratio: CapabilityRatio, seed: int = 0) -> LearnerSamples:
        """All samples of a step, prompt by prompt; advantages compare all rollouts, the lost ones included.

        Sources come in the order of their names, so that mini-batches do not depend on the order of agents.
        ``seed`` decides between responses that are equally worth learning from, if there is a cap.
        """
        built = LearnerSamples()
        self._retokeniser.start_step(groups)
        prompts = [self._prompt(group, ratio, seed) for group in groups]
        while tried := [(prompt, one) for prompt in prompts for one in prompt.trying]:
            for prompt in prompts:
                prompt.trying = []
            samples = self._samples([(prompt.rollout(one), one.advantage) for prompt, one in tried])
            for (prompt, one), sample in zip(tried, samples, strict=True):
                prompt.take_in(one, sample, is_own=one.source == self._learner.name)
                if not isinstance(sample, LearnerSample):
                    built.dropped[one.source, sample] += 1
        for prompt in prompts:
            for place in sorted(prompt.samples):
                built.add(prompt.samples[place])
            built.left_out.update(one.source for one in prompt.waiting)
        return built

    def _prompt(self, group: PromptGroup, ratio: CapabilityRatio, seed: int) -> _Prompt:
        rewards = group.rewards
        candidates = [
            Candidate(source, place, rewards[source][place], advantage)
            for source, advantages in self._method.advantages(rewards, self._learner.name, ratio).items()
            for place, advantage in enumerate(advantages)
        ]
        cap = self._max_cross_rollouts
        if cap is None:
            return _Prompt(group, candidates, [])
        own = [one for one in candidates if one.source == self._learner.name]
        others = [one for one in candidates if one.source != self._learner.name]
        order = ranked(others, seed, group.problem.id) if len(others) > cap else others
        return _Prompt(group, own + order[:cap], order[cap:])

    def _samples(self, seen: Sequence[tuple[Rollout, float]]) -> list[LearnerSample | DropReason]:
        """Rollouts and their advantages, as samples."""
        finite = [rollout for rollout, _ in seen if math.isfinite(rollout.logprob)]
        same = [rollout.tokenizer == self._learner.tokenizer_fingerprint for rollout in finite]
        tokens = iter(self._retokeniser.tokens(self._learner, finite, same))
        return [
            self._sample(rollout, advantage, next(tokens)) if math.isfinite(rollout.logprob) else "non_finite"
            for rollout, advantage in seen
        ]

    def _sample(
        self, rollout: Rollout, advantage: float, tokens: LearnerTokens | DropReason
    ) -> LearnerSample | DropReason:
        if isinstance(tokens, str):
            return tokens
        unlearnt = 1 if rollout.finish_reason == "stop" and not self._learn_stop_token else 0
        source_logprobs = rollout.token_logprobs[: rollout.num_tokens - unlearnt]
        kept = len(tokens.response_ids) - unlearnt
        loss_mask = tokens.loss_mask[:kept]
        if not any(loss_mask) or not source_logprobs:
            return "empty"
        return LearnerSample(
            prompt_ids=tokens.prompt_ids,
            response_ids=tokens.response_ids[:kept],
            behaviour_logprobs=source_logprobs if tokens.reused else None,
            behaviour_logprob=math.fsum(source_logprobs),
            source_length=len(source_logprobs),
            source=rollout.agent,
            is_own=rollout.agent == self._learner.name,
            advantage=advantage,
            loss_mask=loss_mask,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """One response of another agent to one prompt."""

    source: str
    place: int  # among the source's responses to the prompt
    reward: float
    advantage: float  # as the learner sees it


def ranked(candidates: Iterable[Candidate], seed: int, prompt: str) -> list[Candidate]:
    """The candidates of one prompt, most useful first, whatever order they come in.

    Those that carry signal before those with advantage 0; among these, the highest reward first: correct
    answers teach more than others' mistakes, which the learner need not make. Among equals the source that
    has been chosen least is next, so that no source crowds out the rest; draws are keyed by seed and prompt.
    """
    rng = random.Random(derive_seed(seed, prompt))
    shuffled = sorted(candidates, key=lambda one: (one.source, one.place))
    rng.shuffle(shuffled)
    sources = sorted({one.source for one in shuffled})
    rng.shuffle(sources)
    waiting: dict[tuple[bool, float], dict[str, list[Candidate]]] = {}
    for one in shuffled:
        tier = waiting.setdefault((one.advantage == 0, -one.reward), {})
        tier.setdefault(one.source, []).append(one)
    chosen = dict.fromkeys(sources, 0)
    order: list[Candidate] = []
    for _, by_source in sorted(waiting.items()):
        while by_source:
            source = min(chosen, key=lambda name: (name not in by_source, chosen[name]))  # first of equals
            order.append(by_source[source].pop())
            chosen[source] += 1
            if not by_source[source]:
                del by_source[source]
    return order
