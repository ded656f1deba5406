"""How far log-probabilities of the same tokens may be apart if whoever said them has the agent's policy."""

from __future__ import annotations

import torch

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
