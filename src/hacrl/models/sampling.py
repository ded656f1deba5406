"""From logits to the distribution that is really sampled from.

The sampler and the learner use the same function, so that a response has the same probability under
both as long as the weights are the same, whatever the temperature, top-k and top-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.models.compile import compiled_if_wanted
from hacrl.types import Sampling


def sampling_logits(logits: Tensor, sampling: Sampling, keep_ids: Tensor | None = None) -> Tensor:
    """Logits over (..., V) after temperature, then top-k, then top-p, in float32.

    ``keep_ids`` (...) are tokens that stay in the support in any case: a learner whose weights have
    moved may no longer have a sampled token among its top k, and must still give it a probability.
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
    """Tokens that more likely ones, with top_p of the probability or more, come before."""
    if top_p == 1.0:
        return torch.zeros_like(logits, dtype=torch.bool)
    descending, order = logits.sort(dim=-1, descending=True)
    probabilities = descending.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)


def token_logprobs(logits: Tensor, token_ids: Tensor, sampling: Sampling) -> Tensor:
    """log-probability of each given token under the sampling distribution: (..., V), (...) -> (...)."""
    logits = sampling_logits(logits, sampling, keep_ids=token_ids)
    chosen = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability; (B, V) -> (B,), (B,). Greedy tokens have probability 1.

    Nothing in here waits for the device. A row that is not finite has a log-probability that is not.
    """
    if sampling.temperature == 0:
        values, token_ids = logits.float().max(dim=-1)
        return token_ids, values - values  # 0, but not for a number that is not finite
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator)
    pick = _pick if sampling.top_k or sampling.top_p < 1 else compiled_if_wanted(_pick)
    token_ids, logprobs = pick(logits, noise, sampling)
    return token_ids, logprobs


def _pick(logits: Tensor, noise: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The largest of probability / noise, with exponential noise, is drawn with that probability."""
    logprobs = sampling_logits(logits, sampling).log_softmax(dim=-1)
    token_ids = (logprobs.exp() / noise).argmax(dim=-1)
    return token_ids, logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
