"""log pi_k of given responses: one forward pass over right-padded prompt + response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hacrl.agents.sampling import token_logprobs
from hacrl.types import Sampling

TokenPair = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids


def response_logprobs(
    model: Any, pairs: Sequence[TokenPair], sampling: Sampling, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of response tokens under the sampling distribution, and their mask.

    Padding stands behind the last token, where a causal model cannot see it: no attention mask needed.
    Logits are computed from the shortest prompt's last token on, never over the prompts themselves.
    """
    starts = torch.tensor([len(prompt) for prompt, _ in pairs], device=device)
    lengths = torch.tensor([len(response) for _, response in pairs], device=device)
    total, width = int((starts + lengths).max()), int(lengths.max())
    input_ids = torch.zeros(len(pairs), total, dtype=torch.long)
    for row, (prompt, response) in enumerate(pairs):
        input_ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
    input_ids = input_ids.to(device)

    first = int(starts.min()) - 1  # the position that predicts the earliest response token
    logits = model(input_ids=input_ids, logits_to_keep=total - first, use_cache=False).logits
    targets_BS = input_ids[:, first + 1 :]
    logprobs_BS = token_logprobs(logits[:, :-1], targets_BS, sampling)

    offsets_BT = (starts - first - 1).unsqueeze(1) + torch.arange(width, device=device)
    mask_BT = torch.arange(width, device=device) < lengths.unsqueeze(1)
    logprobs_BT = logprobs_BS.gather(1, offsets_BT.clamp(max=logprobs_BS.shape[1] - 1))
    return logprobs_BT.masked_fill(~mask_BT, 0.0), mask_BT
