"""How far log-probabilities of the same tokens may be apart if whoever said them has the agent's policy.

An agent's own responses must come from its policy: whoever said them may have computed something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hacrl.errors import EngineMismatchError
from hacrl.types import Sampling

# Most nats per token. Rounding makes 1e-6 in float32 and 0.003 to 0.05 in bfloat16, wrong weights 1 to 10.
LIMITS = {torch.float32: 1e-3}
LOW_PRECISION_LIMIT = 0.15


def limit_of_proof(dtype: torch.dtype, told: float | None) -> float:
    """For a few tokens that an engine says to be compared; ``told``: what a user allows."""
    return LIMITS.get(dtype, LOW_PRECISION_LIMIT) if told is None else told


def limit_of_responses(told: float | None) -> float:
    """For a step's responses, in any precision.

    A proof that fails is tried again, these end the run. So float32 is not held to its own limit: its kernels
    may round as coarsely as lower precisions (TF32). And what a user allows raises this limit, never lowers
    it. What it is there for is off by whole nats.
    """
    return max(LOW_PRECISION_LIMIT, told or 0.0)


FEW_TOKENS = 64  # of fewer, one that rounding moves by a lot decides the mean


def check_own_policy(agent: str, differences: Sequence[float], sampling: Sampling, limit: float) -> None:
    """Refuse responses whose log-probabilities are too far from the learner's to be of the same policy.

    An engine that has proven its weights with a few tokens may still go wrong in a batch of another size.
    ``differences`` are log pi_sampler - log pi_learner per token, at the weights that sampled. Of a sampler
    none come here that are not finite; a learner's are left to ``learning.max_bad_updates``.
    """
    count = max(1, len(differences))
    if sum(map(abs, differences)) / count <= _allowed(limit, count, sampling):
        return  # as always: a GPU waits for this
    gaps = [abs(difference) for difference in differences if math.isfinite(difference)]
    if not gaps:
        return
    mean, allowed = sum(gaps) / len(gaps), _allowed(limit, len(gaps), sampling)
    if mean <= allowed:
        return
    raise EngineMismatchError(
        f"agent {agent!r}: its own responses of this step do not come from its policy: the log-probabilities "
        f"they were sampled with differ from the learner's by {mean:.3g} nats per token on average (at most "
        f"{max(gaps):.3g}, over {len(gaps)} tokens), allowed are {allowed:.3g}. It learnt nothing from them, "
        "and nothing of this step was saved: hacrl resume goes on from the last checkpoint. Whatever said "
        "them computes something else than the learner, as happens with a wrong kernel or with processors "
        "limited by CUDA_MPS_ACTIVE_THREAD_PERCENTAGE. If that is vLLM, try "
        f"agents.{agent}.engine=transformers; if it is only a matter of precision, raise "
        f"agents.{agent}.vllm.max_logprob_gap"
    )


def _allowed(limit: float, tokens: int, sampling: Sampling) -> float:
    """The limit, as far as these tokens can be held to it.

    Both sides count temperature, top-k and top-p, but logits are divided by the temperature, and so is their
    rounding. Greedy tokens are drawn with probability 1, whatever the policy: they say nothing. Fewer than 64
    tokens may differ by as much in all as 64 may.
    """
    if sampling.temperature == 0:
        return math.inf
    return limit / min(1.0, sampling.temperature) * max(1.0, FEW_TOKENS / tokens)
