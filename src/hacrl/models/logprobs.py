"""log pi_k of given responses: one forward pass over prompts and responses.

They are laid end to end, and nothing is computed for padding or twice for a prompt: on a GPU always,
elsewhere if that saves enough. Otherwise rows are padded on the right, where a causal model cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hacrl.models import lm_head as output_layer
from hacrl.models.device import upload
from hacrl.models.lm_head import logprobs_in_pieces, plain_model, separate_head
from hacrl.models.packing import (
    LossMasks,
    TokenPair,
    can_be_ragged,
    has_fused_attention,
    has_tree_attention,
    pack,
    packed_tokens,
    padded_tokens,
    ragged,
)
from hacrl.models.sampling import token_logprobs
from hacrl.types import Sampling

WORTH_PACKING = 0.8  # of the padded tokens, where attention has no kernel for packed ones


def packs(model: Any, pairs: Sequence[TokenPair]) -> bool:
    """Whether these responses are laid end to end."""
    if has_fused_attention(model):
        return True
    few = packed_tokens(pairs) <= WORTH_PACKING * padded_tokens(pairs)
    return few and can_be_ragged(model)


def response_logprobs(
    model: Any,
    pairs: Sequence[TokenPair],
    sampling: Sampling,
    device: torch.device,
    loss_masks: LossMasks = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, T) of response tokens under the sampling distribution, and their mask.

    ``loss_masks`` says which response tokens are wanted; the others are context, 0 and not in the mask.

    Nothing in here waits for the device: what it is given can be prepared while it computes something else.
    """
    compute = packed_logprobs if packs(model, pairs) else padded_logprobs
    mask_BT = upload(response_mask(pairs, loss_masks), device)
    return compute(model, pairs, sampling, device, loss_masks), mask_BT


def response_mask(pairs: Sequence[TokenPair], loss_masks: LossMasks = None) -> Tensor:
    """Return (B, T) on the CPU: True for response tokens, as far as ``loss_masks`` wants them."""
    lengths = torch.tensor([len(response) for _, response in pairs])
    mask_BT = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    if loss_masks is not None:
        for row, loss_mask in enumerate(loss_masks):
            mask_BT[row, : len(loss_mask)] = torch.tensor(loss_mask, dtype=torch.bool)
    return mask_BT


def packed_logprobs(
    model: Any,
    pairs: Sequence[TokenPair],
    sampling: Sampling,
    device: torch.device,
    loss_masks: LossMasks = None,
) -> Tensor:
    """(B, T), all sequences in one row."""
    packed = pack(pairs, device, has_tree_attention(model), loss_masks)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    with ragged(model):
        head = separate_head(model)
        if head is None:
            logits = model(**packed.inputs, logits_to_keep=packed.before).logits[0]
            logprobs_N = token_logprobs(logits, packed.targets, sampling)
        else:
            hidden = plain_model(model).base_model(**packed.inputs).last_hidden_state[0]
            logprobs_N = logprobs_in_pieces(
                head, hidden.index_select(0, packed.before), packed.targets, sampling, vocabulary
            )
    return _spread(logprobs_N, response_mask(pairs, loss_masks))


def padded_logprobs(
    model: Any,
    pairs: Sequence[TokenPair],
    sampling: Sampling,
    device: torch.device,
    loss_masks: LossMasks = None,
) -> Tensor:
    """(B, T), a row for each sequence."""
    mask_BT = response_mask(pairs, loss_masks)
    starts = torch.tensor([len(prompt) for prompt, _ in pairs])
    total = max(len(prompt) + len(response) for prompt, response in pairs)
    input_ids = torch.zeros(len(pairs), total, dtype=torch.long)
    for row, (prompt, response) in enumerate(pairs):
        input_ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])

    first = int(starts.min()) - 1  # the position that predicts the earliest response token
    offsets_BT = (starts - first - 1).unsqueeze(1) + torch.arange(mask_BT.shape[1])
    vocabulary = model.get_output_embeddings().weight.shape[0]
    many = len(pairs) * (total - first) * vocabulary > output_layer.MOST_LOGITS
    head = separate_head(model) if many else None
    if head is not None:
        inputs = {"input_ids": upload(input_ids, device), "use_cache": False}
        hidden = plain_model(model).base_model(**inputs).last_hidden_state
        rows, columns = mask_BT.nonzero(as_tuple=True)
        places = offsets_BT[rows, columns] + first  # of the token before
        targets = upload(input_ids[rows, places + 1], device)
        logprobs_N = logprobs_in_pieces(
            head, hidden[upload(rows, device), upload(places, device)], targets, sampling, vocabulary
        )
        return _spread(logprobs_N, mask_BT)

    # Logits are computed from the shortest prompt's last token on, never over the prompts themselves.
    ids = upload(input_ids, device)
    logits = model(input_ids=ids, logits_to_keep=total - first, use_cache=False).logits
    logprobs_BS = token_logprobs(logits[:, :-1], ids[:, first + 1 :], sampling)
    places_BT = upload(offsets_BT.clamp(max=logprobs_BS.shape[1] - 1), device)
    return logprobs_BS.gather(1, places_BT).masked_fill(~upload(mask_BT, device), 0.0)


def _spread(logprobs_N: Tensor, mask_BT: Tensor) -> Tensor:
    """One list of tokens as rows of responses, 0 elsewhere; the mask is in the machine's memory."""
    device = logprobs_N.device
    rows, columns = mask_BT.nonzero(as_tuple=True)
    empty = torch.zeros(mask_BT.shape, dtype=logprobs_N.dtype, device=device)
    return empty.index_put((upload(rows, device), upload(columns, device)), logprobs_N)
