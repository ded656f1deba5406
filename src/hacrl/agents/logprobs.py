"""log pi_k of given responses: one forward pass over right-padded prompt + response.

Logits over a large vocabulary would take most of a learner's memory. Where they would be many, the output
layer is applied to a piece of the response tokens at a time, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hacrl.agents.sampling import token_logprobs
from hacrl.types import Sampling

TokenPair = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids
MOST_LOGITS = 2**26  # that exist at a time: 256 MiB in float32, a few times that with what is made of them
_HEADS: WeakKeyDictionary[Any, Callable[[Tensor], Tensor] | None] = WeakKeyDictionary()


def response_logprobs(
    model: Any, pairs: Sequence[TokenPair], sampling: Sampling, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of response tokens under the sampling distribution, and their mask.

    Padding stands behind the last token, where a causal model cannot see it: no attention mask needed.
    """
    starts = torch.tensor([len(prompt) for prompt, _ in pairs], device=device)
    lengths = torch.tensor([len(response) for _, response in pairs], device=device)
    total, width = int((starts + lengths).max()), int(lengths.max())
    input_ids = torch.zeros(len(pairs), total, dtype=torch.long)
    for row, (prompt, response) in enumerate(pairs):
        input_ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
    input_ids = input_ids.to(device)

    first = int(starts.min()) - 1  # the position that predicts the earliest response token
    offsets_BT = (starts - first - 1).unsqueeze(1) + torch.arange(width, device=device)
    mask_BT = torch.arange(width, device=device) < lengths.unsqueeze(1)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    head = _separate_head(model) if len(pairs) * (total - first) * vocabulary > MOST_LOGITS else None
    if head is not None:
        places_BT = offsets_BT + first  # of the token before
        logprobs_BT = _in_pieces(model, head, input_ids, places_BT, mask_BT, sampling, vocabulary)
        return logprobs_BT, mask_BT

    # Logits are computed from the shortest prompt's last token on, never over the prompts themselves.
    logits = model(input_ids=input_ids, logits_to_keep=total - first, use_cache=False).logits
    logprobs_BS = token_logprobs(logits[:, :-1], input_ids[:, first + 1 :], sampling)
    logprobs_BT = logprobs_BS.gather(1, offsets_BT.clamp(max=logprobs_BS.shape[1] - 1))
    return logprobs_BT.masked_fill(~mask_BT, 0.0), mask_BT


def _in_pieces(
    model: Any,
    head: Callable[[Tensor], Tensor],
    input_ids: Tensor,
    places_BT: Tensor,
    mask_BT: Tensor,
    sampling: Sampling,
    vocabulary: int,
) -> Tensor:
    """The response tokens of all rows as one list, a piece of which has logits at a time."""
    hidden = _plain(model).base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    rows, columns = mask_BT.nonzero(as_tuple=True)
    places = places_BT[rows, columns]
    hidden_N, targets_N = hidden[rows, places], input_ids[rows, places + 1]

    def logprobs_of(piece: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(head(piece), targets, sampling)

    size = max(1, MOST_LOGITS // vocabulary)
    pieces = [
        checkpoint(logprobs_of, piece, targets, use_reentrant=False, preserve_rng_state=False)
        for piece, targets in zip(torch.split(hidden_N, size), torch.split(targets_N, size), strict=True)
    ]
    return torch.zeros(mask_BT.shape, dtype=pieces[0].dtype, device=hidden.device).index_put(
        (rows, columns), torch.cat(pieces)
    )


def _plain(model: Any) -> Any:
    """The Hugging Face model itself; adapters are inside of it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _separate_head(model: Any) -> Callable[[Tensor], Tensor] | None:
    """From hidden states to logits, if for this model that is its output layer and nothing else.

    Some architectures scale or cap their logits. Whether this one does is seen by trying, once.
    """
    if model not in _HEADS:
        head = _plain(model).get_output_embeddings()
        with torch.no_grad():
            probe = torch.arange(1, 5, device=model.device).unsqueeze(0)
            whole = model(input_ids=probe, use_cache=False).logits
            apart = head(_plain(model).base_model(input_ids=probe, use_cache=False).last_hidden_state)
            same = whole.shape == apart.shape and torch.allclose(whole, apart, rtol=1e-3, atol=1e-3)
        _HEADS[model] = head if same else None
    return _HEADS[model]
