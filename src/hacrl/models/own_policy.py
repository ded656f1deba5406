"""Check that an agent's own responses were sampled from its policy, by comparing log-probabilities.

The same tokens get slightly different log-probabilities from the sampler and from the learner. The limits
here separate rounding from a sampler that computes something else, e.g. with other weights or a wrong kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hacrl.errors import EngineMismatchError
from hacrl.types import Sampling

# Largest mean difference in nats per token. Rounding causes 1e-6 in float32 and 0.003 to 0.05 in bfloat16,
# wrong weights 1 to 10.
LIMITS = {torch.float32: 1e-3}
LOW_PRECISION_LIMIT = 0.15


def sync_check_limit(dtype: torch.dtype, configured: float | None) -> float:
    """Return the limit for the few tokens that are compared after a weight sync."""
    return LIMITS.get(dtype, LOW_PRECISION_LIMIT) if configured is None else configured


def rollout_limit(configured: float | None) -> float:
    """Return the limit for a step's responses, in any precision.

    A failed weight-sync check is repeated, but responses above this limit end the run. So float32 has no
    lower limit, because its kernels may round as coarsely as lower precisions (TF32). The configured value
    can only raise the limit. Responses of another policy differ by whole nats.
    """
    return max(LOW_PRECISION_LIMIT, configured or 0.0)


FEW_TOKENS = 64  # with fewer tokens, a single token with a large rounding error dominates the mean


def check_own_policy(agent: str, differences: Sequence[float], sampling: Sampling, limit: float) -> None:
    """Raise EngineMismatchError if the responses' log-probabilities differ too much from the learner's.

    An engine that passed the weight-sync check may still compute wrong numbers in a batch of another size.
    ``differences`` are log pi_sampler - log pi_learner per token, at the weights that sampled. The sampler's
    are finite; a learner's that are not are left to the learner.
    """
    count = max(1, len(differences))
    if sum(map(abs, differences)) / count <= _allowed(limit, count, sampling):
        return  # the usual case, kept fast: a GPU waits meanwhile
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
        "and nothing of this step was saved: hacrl resume goes on from the last checkpoint. The engine does "
        "not compute the same as the learner, as happens with a wrong kernel or with processors limited by "
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE. If the engine is vLLM, try "
        f"agents.{agent}.engine=transformers; if the difference is only one of precision, raise "
        f"agents.{agent}.vllm.max_logprob_gap"
    )


def _allowed(limit: float, tokens: int, sampling: Sampling) -> float:
    """Return the limit for this number of tokens and this sampling.

    Logits are divided by the temperature, and so is their rounding error. Greedy tokens have probability 1
    under any policy, so they have no limit. Fewer than 64 tokens may differ by as much in total as 64 may.
    """
    if sampling.temperature == 0:
        return math.inf
    return limit / min(1.0, sampling.temperature) * max(1.0, FEW_TOKENS / tokens)
