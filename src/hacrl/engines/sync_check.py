"""Prove that an engine computes with the policy's weights: compare log-probabilities of the same tokens.

A transfer that reports success proves nothing. An output layer that is tied to the embeddings can stay stale,
for example.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hacrl.engines.base import Policy, Sample
from hacrl.errors import HacrlError
from hacrl.models.logprobs import checking_pass, plain_logprobs, response_logprobs
from hacrl.models.own_policy import sync_check_limit
from hacrl.types import Sampling

NUM_PROBES = 4  # prompts
PROBE_TOKENS = 16  # most new tokens to each
# Forward passes over a few tokens are mostly Python's work, so two at a time are no faster. Models made from
# one config share the setting of their attention, which is switched during the pass.
FORWARD_PASS = threading.Lock()


class EngineError(HacrlError, RuntimeError):
    """An engine cannot be used; the message names the engine and the fix."""


class PolicyMismatchError(EngineError):
    """An engine's log-probabilities do not match the agent's; sending the weights again may help."""


class SyncCheck:
    """Compares the log-probabilities of a few short samples, the engine's with the learner's."""

    def __init__(self, policy: Policy, prompts: Sequence[tuple[int, ...]]) -> None:
        self._policy = policy
        self.prompts = list(prompts[:NUM_PROBES])
        self.sampling = Sampling(max_new_tokens=PROBE_TOKENS)
        self._samples: dict[int, Sample] = {}
        assert self.prompts, "a proof needs at least one prompt"

    def add(self, index: int, sample: Sample) -> bool:
        """Take the engine's sample for one prompt; return whether all are there."""
        self._samples[index] = sample
        return len(self._samples) == len(self.prompts)

    def gap(self, engine: str, limit: float | None) -> float:
        """Return the mean |difference| per token; raise :class:`PolicyMismatchError` if it is too large."""
        policy, samples = self._policy, [sample for _, sample in sorted(self._samples.items())]
        learner = self._learner_logprobs(response_logprobs)
        theirs = torch.tensor([logprob for sample in samples for logprob in sample.logprobs]).double()
        gaps = (learner - theirs).abs()
        mean, largest = float(gaps.mean()), float(gaps.max())
        allowed = sync_check_limit(policy.model.dtype, limit)
        if math.isfinite(mean) and mean <= allowed:
            return mean
        # in case hacrl's kernels are wrong and not the engine
        starts = list(accumulate((len(sample.token_ids) for sample in samples[:-1]), initial=0))
        plain = float((self._learner_logprobs(plain_logprobs) - theirs).abs().mean())
        raise PolicyMismatchError(
            f"{engine} is not at the agent's policy after a weight update (policy version "
            f"{policy.policy_version}): its log-probabilities differ by {mean:.3g} nats per token on "
            f"average (at most {largest:.3g}, over {gaps.numel()} tokens; first tokens of responses by "
            f"{float(gaps[starts].mean()):.3g}), allowed are {allowed:g}. The engine's are "
            f"{float(theirs.mean()):.3g} on average, the agent's {float(learner.mean()):.3g}; computed in "
            f"rows and with plain attention, the agent's differ by {plain:.3g}. Weights did not arrive, or "
            "the engine computes something else; if it is only a matter of precision, raise "
            f"agents.{policy.name}.vllm.max_logprob_gap"
        )

    def _learner_logprobs(self, compute: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """Return the learner's log-probabilities of all sampled tokens, one response after the other."""
        policy = self._policy
        pairs = [(self.prompts[index], sample.token_ids) for index, sample in sorted(self._samples.items())]
        plain = compute is plain_logprobs
        with FORWARD_PASS, checking_pass(policy.model, pairs, self.sampling, plain=plain):
            logprobs_BT, mask_BT = compute(policy.model, pairs, self.sampling, policy.device)
            return logprobs_BT[mask_BT].double().cpu()
