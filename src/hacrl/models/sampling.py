"""The sampling distribution: logits after temperature, top-k and top-p.

The sampler and the learner use the same functions. So a response has the same probability under both, as long
as their weights are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.models.compile import compiled_if_enabled
from hacrl.models.keyed_noise import exponential_noise
from hacrl.types import Sampling


def sampling_logits(logits: Tensor, sampling: Sampling, keep_ids: Tensor | None = None) -> Tensor:
    """Return logits over (..., V) in float32 after temperature, then top-k, then top-p.

    ``keep_ids`` (...) are never removed: after an update a sampled token may no longer be among the learner's
    top k, but still needs a probability.
    """
    logits = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        logits = logits / sampling.temperature
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return logits
    kept = logits.masked_fill(_outside_top_k(logits, sampling.top_k), -torch.inf)
    removed = kept.isneginf() | _outside_top_p(kept, sampling.top_p)
    if keep_ids is not None:
        removed = removed.scatter(-1, keep_ids.unsqueeze(-1), False)
    return logits.masked_fill(removed, -torch.inf)


def _outside_top_k(logits: Tensor, top_k: int) -> Tensor:
    if top_k == 0 or top_k >= logits.shape[-1]:
        return torch.zeros_like(logits, dtype=torch.bool)
    return logits < logits.topk(top_k, dim=-1).values[..., -1:]


def _outside_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Return which tokens to remove: the more likely tokens already have a probability of at least top_p."""
    if top_p == 1.0:
        return torch.zeros_like(logits, dtype=torch.bool)
    descending, order = logits.sort(dim=-1, descending=True)
    probabilities = descending.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)


def token_logprobs(logits: Tensor, token_ids: Tensor, sampling: Sampling) -> Tensor:
    """Return each token's log-probability under the sampling distribution: (..., V), (...) -> (...)."""
    logits = sampling_logits(logits, sampling, keep_ids=token_ids)
    chosen = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)


def draw(
    logits: Tensor, sampling: Sampling, generator: torch.Generator, keys_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row; return it and its log-probability, (B, V) -> (B,), (B,).

    With ``keys_B`` a row's token depends on its logits and its key alone, and the generator is not used.

    Greedy tokens have probability 1. A row of non-finite logits gives a non-finite log-probability. This
    function never waits for the device.
    """
    if sampling.temperature == 0:
        values, token_ids = logits.float().max(dim=-1)
        return token_ids, values - values  # 0, or nan for a value that is not finite
    if keys_B is None:
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator)
    else:
        noise = exponential_noise(keys_B, logits.shape[-1])
    pick = _pick if sampling.top_k or sampling.top_p < 1 else compiled_if_enabled(_pick)
    token_ids, logprobs = pick(logits, noise, sampling)
    return token_ids, logprobs


def _pick(logits: Tensor, noise: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample by an exponential race: a token wins probability / noise with its own probability."""
    logprobs = sampling_logits(logits, sampling).log_softmax(dim=-1)
    token_ids = (logprobs.exp() / noise).argmax(dim=-1)
    return token_ids, logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
