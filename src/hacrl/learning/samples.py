"""From everybody's verified rollouts to one learner's samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hacrl.agents.agent import Agent
from hacrl.agents.retokenise import DropReason, learner_tokens
from hacrl.algorithms.advantage import CapabilityRatio
from hacrl.algorithms.methods import Method
from hacrl.exchange.base import PromptGroup
from hacrl.types import LearnerSample, VerifiedRollout


@dataclass
class LearnerSamples:
    """The samples of one step, and which rollouts could not become one, by source and reason."""

    samples: list[LearnerSample] = field(default_factory=list)
    dropped: Counter[tuple[str, DropReason]] = field(default_factory=Counter)
    length_ratios: dict[str, list[float]] = field(default_factory=dict)  # retokenised: own tokens / source's


class SampleBuilder:
    """One learner's way of looking at rollouts."""

    def __init__(
        self, learner: Agent, fingerprints: Mapping[str, str], method: Method, learn_stop_token: bool = True
    ) -> None:
        self._learner = learner
        self._method = method
        self._learn_stop_token = learn_stop_token
        own = learner.tokenizer_fingerprint
        self._same_tokenizer = {agent: fingerprint == own for agent, fingerprint in fingerprints.items()}

    def build(self, groups: Sequence[PromptGroup], ratio: CapabilityRatio) -> LearnerSamples:
        """All samples of a step, prompt by prompt; advantages compare all rollouts, dropped ones included.

        Sources come in the order of their names, so that mini-batches do not depend on the order of agents.
        """
        built = LearnerSamples()
        for group in groups:
            advantages = self._method.advantages(group.rewards, self._learner.name, ratio)
            for source, source_advantages in sorted(advantages.items()):
                for verified, advantage in zip(group.responses[source], source_advantages, strict=True):
                    sample = self._sample(verified, advantage)
                    if not isinstance(sample, LearnerSample):
                        built.dropped[source, sample] += 1
                        continue
                    built.samples.append(sample)
                    if sample.behaviour_logprobs is None:
                        ratio_of_lengths = len(sample.response_ids) / sample.source_length
                        built.length_ratios.setdefault(source, []).append(ratio_of_lengths)
        return built

    def _sample(self, verified: VerifiedRollout, advantage: float) -> LearnerSample | DropReason:
        rollout = verified.rollout
        if not math.isfinite(rollout.logprob):
            return "non_finite"
        tokens = learner_tokens(self._learner, rollout, self._same_tokenizer[rollout.agent])
        if isinstance(tokens, str):
            return tokens
        unlearnt = 1 if rollout.finish_reason == "stop" and not self._learn_stop_token else 0
        source_logprobs = rollout.token_logprobs[: rollout.num_tokens - unlearnt]
        loss_tokens = len(tokens.response_ids) - unlearnt
        if loss_tokens == 0 or not source_logprobs:
            return "empty"
        return LearnerSample(
            prompt_ids=tokens.prompt_ids,
            response_ids=tokens.response_ids[:loss_tokens],
            behaviour_logprobs=source_logprobs if tokens.reused else None,
            behaviour_logprob=math.fsum(source_logprobs),
            source_length=len(source_logprobs),
            source=rollout.agent,
            is_own=rollout.agent == self._learner.name,
            advantage=advantage,
        )
