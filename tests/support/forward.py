"""Plain reference log-probabilities: one sequence, no padding, no cache, transformers' logits warpers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hacrl.types import Sampling


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return (N, V) logits after transformers' own temperature, top-k and top-p."""
    if sampling.temperature != 1.0:
        logits = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1.0:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits


def plain_logprobs(
    model, prompt_ids: Sequence[int], response_ids: Sequence[int], sampling: Sampling
) -> Tensor:
    """Return each response token's log-probability, (T,), with gradient."""
    logits = model(input_ids=torch.tensor([[*prompt_ids, *response_ids]]), use_cache=False).logits[0]
    picked = []
    for t, token in enumerate(response_ids):
        row = warped(logits[len(prompt_ids) + t - 1].unsqueeze(0), sampling)[0]
        picked.append(torch.log_softmax(row, dim=-1)[token])
    return torch.stack(picked)
