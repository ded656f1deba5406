"""pi_old of own responses by the learner's own forward pass, for samplers whose numerics are not its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

from torch import Tensor

from hacrl.types import LearnerSample


class OldLogprobs:
    """log pi_old per token of one step's own responses: at the weights before the step's first update.

    A response of the first update needs no forward pass before it, the update's own is that. It is
    remembered in case the response comes again.
    """

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}  # by identity: two rollouts may say the same

    def remember(self, samples: Sequence[LearnerSample], logprobs_BT: Tensor) -> None:
        """Keep the own rows of a forward pass that was made before the first update."""
        for sample, logprobs_T in zip(samples, logprobs_BT.detach(), strict=True):
            if sample.is_own and id(sample) not in self._known:
                self._known[id(sample)] = logprobs_T[: len(sample.response_ids)].clone()

    def in_place_of(self, behaviour_BT: Tensor, samples: Sequence[LearnerSample]) -> Tensor:
        """The given rows with own ones replaced, (B, T)."""
        old_BT = behaviour_BT.clone()
        for row, sample in enumerate(samples):
            if sample.is_own:
                assert id(sample) in self._known, "an own response was not looked at before the first update"
                known_T = self._known[id(sample)]
                old_BT[row, : len(known_T)] = known_T
        return old_BT


def sampler_differences(samples: Iterable[LearnerSample], logprobs_BT: Tensor) -> list[float]:
    """log pi_sampler - log pi_old of every own action token, from a forward pass before the first update."""
    differences: list[float] = []
    for sample, learners in zip(samples, logprobs_BT.tolist(), strict=True):
        if sample.is_own and sample.behaviour_logprobs is not None:
            actions = compress(learners, sample.loss_mask)  # leaves out observations and padding
            pairs = zip(sample.behaviour_logprobs, actions, strict=True)
            differences += [sampler - learner for sampler, learner in pairs]
    return differences


def first_uses(minibatches: Iterable[Sequence[LearnerSample]]) -> list[list[LearnerSample]]:
    """The mini-batches with every sample only where it comes first: in a second epoch it comes again."""
    seen: set[int] = set()
    firsts = []
    for minibatch in minibatches:
        firsts.append([sample for sample in minibatch if id(sample) not in seen])
        seen.update(id(sample) for sample in minibatch)
    return firsts


def spread_out(samples: Sequence[LearnerSample], most: int) -> list[LearnerSample]:
    """At most so many, evenly from all."""
    return list(samples[:: -(-len(samples) // most) or 1])
