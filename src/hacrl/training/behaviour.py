"""The probabilities that a response had at its source, as a loss reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hacrl.models.device import copy_to_device
from hacrl.types import LearnerSample


def sequence_behaviour(samples: Sequence[LearnerSample], logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return log pi_j_old(y), (B,).

    Where the source does not say, the learner's own present log-probability takes its place: the ratio is 1.
    Methods that weigh responses by the ratio get no such samples.
    """
    known = [sample.behaviour_logprob for sample in samples]
    numbers = [0.0 if logprob is None else logprob for logprob in known]
    behaviour_B = copy_to_device(numbers, logprobs_BT.device, torch.float32)
    if None not in known:
        return behaviour_B
    own_B = logprobs_BT.detach().masked_fill(~mask_BT, 0.0).sum(dim=-1).float()
    own_B = own_B.masked_fill(own_B.isinf(), 0.0)  # impossible under top-k or top-p
    is_known_B = copy_to_device([logprob is not None for logprob in known], logprobs_BT.device)
    return torch.where(is_known_B, behaviour_B, own_B)


def token_behaviour(sample: LearnerSample) -> Sequence[float]:
    """Return the source's log-probabilities aligned with the response: 0 for observations; () if unknown."""
    logprobs = sample.behaviour_logprobs
    if logprobs is None or len(logprobs) == len(sample.loss_mask):
        return logprobs or ()
    remaining = iter(logprobs)
    return [next(remaining) if is_action else 0.0 for is_action in sample.loss_mask]
