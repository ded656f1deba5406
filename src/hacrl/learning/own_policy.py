"""An agent's own responses must come from its policy: whoever said them may have computed something else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hacrl.errors import ForeignRolloutsError
from hacrl.types import Sampling

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
    raise ForeignRolloutsError(
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
