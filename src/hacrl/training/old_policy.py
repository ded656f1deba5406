"""pi_old of responses, computed by the learner's forward pass before the step's first update.

Of own responses for samplers with other numerics; of other agents' responses for methods whose ratios compare
with the learner's own policy.

In an asynchronous run, a response may have been sampled by an older policy of the agent, or by several:
token t by mu_t, the policy of version v(t), whose log-probability the sampler recorded. Given when weights
changed, the whole response was sampled with probability

    mu(y) = prod_t mu_t(y_t | y_<t)

So pi_old of such a response is mu:

    r_t = pi_k(y_t) / mu_t(y_t)                           token-level losses
    s   = ( pi_k(y) / mu(y) )^(1/|y|)                     sequence-level losses, own and others' responses

Ratios start at what the updates since then have made of them, not at 1. Clipping bounds how far the policy
moves from the one that sampled: an own response that updates have already moved out of the clip range, in the
direction of its advantage, has no gradient. The ratio of other agents' responses is to mu in any run.

The learner's forward pass gives pi_old only for responses that its present policy sampled as a whole
(:func:`has_old_policy`). Weights of version v(t) are gone by the time the learner learns. And a token that
was sampled after an update in mid-generation attends to keys and values of the older policies. So even where
v(t) is the present version, the learner's pass computes something else. For the same reason only whole
responses of the present policy are compared with the learner, and weighted for the sampler's numerics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

from torch import Tensor

from hacrl.types import LearnerSample


def has_old_policy(sample: LearnerSample) -> bool:
    """Return whether the learner's weights before the step's first update sampled the whole response."""
    return sample.is_own and sample.is_current


class OldPolicyLogprobs:
    """log pi_old per token of one step's responses, at the weights before the step's first update.

    The first update's own forward pass gives pi_old of its responses, so they need no pass before it. Their
    log-probabilities are remembered because a response may come again in a later update.

    ``own``, ``cross``: whether pi_old of the learner's own responses and of others' is recomputed.
    """

    def __init__(self, own: bool = True, cross: bool = False) -> None:
        self._own, self._cross = own, cross
        self._logprobs: dict[int, Tensor] = {}  # by id(sample): two rollouts may have equal tokens

    def covers(self, sample: LearnerSample) -> bool:
        """Return whether pi_old of the response is recomputed."""
        return (self._own and has_old_policy(sample)) if sample.is_own else self._cross

    def remember(self, samples: Sequence[LearnerSample], logprobs_BT: Tensor) -> None:
        """Store the covered rows of a forward pass that was made before the first update."""
        for sample, logprobs_T in zip(samples, logprobs_BT.detach(), strict=True):
            if self.covers(sample) and id(sample) not in self._logprobs:
                self._logprobs[id(sample)] = logprobs_T[: len(sample.response_ids)].clone()

    def replace(self, behaviour_BT: Tensor, samples: Sequence[LearnerSample]) -> Tensor:
        """Return ``behaviour_BT`` with covered rows replaced by log pi_old, (B, T)."""
        old_BT = behaviour_BT.clone()
        for row, sample in enumerate(samples):
            if self.covers(sample):
                assert id(sample) in self._logprobs, "no forward pass over this response before the update"
                logprobs_T = self._logprobs[id(sample)]
                old_BT[row, : len(logprobs_T)] = logprobs_T
        return old_BT


def sampler_differences(samples: Iterable[LearnerSample], logprobs_BT: Tensor) -> list[float]:
    """Return log pi_sampler - log pi_old of every own action token that the present policy sampled.

    ``logprobs_BT`` come from a forward pass before the step's first update.
    """
    differences: list[float] = []
    for sample, learner_T in zip(samples, logprobs_BT.tolist(), strict=True):
        if has_old_policy(sample) and sample.behaviour_logprobs is not None:
            actions = compress(learner_T, sample.loss_mask)  # without observations and padding
            pairs = zip(sample.behaviour_logprobs, actions, strict=True)
            differences += [sampler - learner for sampler, learner in pairs]
    return differences


def first_occurrences(minibatches: Iterable[Iterable[LearnerSample]]) -> list[list[LearnerSample]]:
    """Return the mini-batches without samples that an earlier mini-batch has: a second epoch repeats them."""
    seen: set[int] = set()
    firsts = []
    for minibatch in map(list, minibatches):
        firsts.append([sample for sample in minibatch if id(sample) not in seen])
        seen.update(id(sample) for sample in minibatch)
    return firsts


def evenly_spaced(samples: Sequence[LearnerSample], most: int) -> list[LearnerSample]:
    """Return at most ``most`` of the samples, evenly spaced."""
    return list(samples[:: -(-len(samples) // most) or 1])
