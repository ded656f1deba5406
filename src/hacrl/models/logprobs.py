"""Log-probabilities log pi_k of given responses, from one forward pass over prompts and responses.

Sequences are packed, so that nothing is computed for padding and every shared prompt only once: always where
a fused attention kernel exists, elsewhere if it saves enough. Otherwise rows are padded on the right, where
causal attention does not see the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from hacrl.models import lm_head as output_layer
from hacrl.models.device import copy_to_device
from hacrl.models.lm_head import chunked_logprobs, run_as_forward, separate_head, without_adapters
from hacrl.models.packing import LossMasks, TokenPair, pack, packed_tokens, padded_tokens
from hacrl.models.packing_support import (
    has_fused_attention,
    has_tree_attention,
    packed_sequences,
    supports_packing,
)
from hacrl.models.rank_guard import guarded_head
from hacrl.models.sampling import token_logprobs
from hacrl.models.sharding import sharding_of
from hacrl.types import Sampling

MAX_PACKED_SHARE = 0.8  # of the padded tokens: without a fused kernel, sequences are packed below this share


def uses_packing(model: Any, pairs: Sequence[TokenPair]) -> bool:
    """Return whether these prompts and responses are packed into one row."""
    if has_fused_attention(model):
        return True
    saves_enough = packed_tokens(pairs) <= MAX_PACKED_SHARE * padded_tokens(pairs)
    return saves_enough and supports_packing(model)


def response_logprobs(
    model: Any,
    pairs: Sequence[TokenPair],
    sampling: Sampling,
    device: torch.device,
    loss_masks: LossMasks = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of response tokens under the sampling distribution, and the mask; (B, T).

    ``loss_masks`` says which response tokens are wanted. The others are context: their log-probability is 0,
    and they are not in the mask. This function never waits for the device.
    """
    compute = packed_logprobs if uses_packing(model, pairs) else padded_logprobs
    mask_BT = copy_to_device(response_mask(pairs, loss_masks), device)
    return compute(model, pairs, sampling, device, loss_masks), mask_BT


def response_mask(pairs: Sequence[TokenPair], loss_masks: LossMasks = None) -> Tensor:
    """Return (B, T) on the CPU: True for the response tokens that ``loss_masks`` wants."""
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
    """Return (B, T), computed with all sequences packed into one row."""
    packed = pack(pairs, device, has_tree_attention(model), loss_masks)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    with packed_sequences(model):
        head = separate_head(model)
        if head is None:
            logits = model(**packed.inputs, logits_to_keep=packed.before).logits[0]
            logprobs_N = token_logprobs(logits, packed.targets, sampling)
        else:

            def compute() -> Tensor:
                hidden = without_adapters(model).base_model(**packed.inputs).last_hidden_state[0]
                return guarded_head(
                    head,
                    hidden.index_select(0, packed.before),
                    lambda wanted: chunked_logprobs(head, wanted, packed.targets, sampling, vocabulary),
                )

            logprobs_N = run_as_forward(model, compute)
    return _scatter_to_rows(logprobs_N, response_mask(pairs, loss_masks))


def padded_logprobs(
    model: Any,
    pairs: Sequence[TokenPair],
    sampling: Sampling,
    device: torch.device,
    loss_masks: LossMasks = None,
) -> Tensor:
    """Return (B, T), computed with one padded row per sequence."""
    mask_BT = response_mask(pairs, loss_masks)
    starts = torch.tensor([len(prompt) for prompt, _ in pairs])
    total = max(len(prompt) + len(response) for prompt, response in pairs)
    input_ids = torch.zeros(len(pairs), total, dtype=torch.long)
    for row, (prompt, response) in enumerate(pairs):
        input_ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])

    first = int(starts.min()) - 1  # the position that predicts the earliest response token
    offsets_BT = (starts - first - 1).unsqueeze(1) + torch.arange(mask_BT.shape[1])
    vocabulary = model.get_output_embeddings().weight.shape[0]
    in_chunks = len(pairs) * (total - first) * vocabulary > output_layer.MAX_LOGITS
    head = separate_head(model) if in_chunks else None
    if head is not None:
        inputs = {"input_ids": copy_to_device(input_ids, device), "use_cache": False}
        rows, columns = mask_BT.nonzero(as_tuple=True)
        before = offsets_BT[rows, columns] + first  # columns of the tokens before the wanted ones
        targets = copy_to_device(input_ids[rows, before + 1], device)

        def compute() -> Tensor:
            hidden = without_adapters(model).base_model(**inputs).last_hidden_state
            hidden_N = hidden[copy_to_device(rows, device), copy_to_device(before, device)]
            return guarded_head(
                head,
                hidden_N,
                lambda wanted: chunked_logprobs(head, wanted, targets, sampling, vocabulary),
            )

        return _scatter_to_rows(run_as_forward(model, compute), mask_BT)

    # Logits are computed only from the last token of the shortest prompt on.
    ids = copy_to_device(input_ids, device)
    logits = model(input_ids=ids, use_cache=False, **_keep_logits(model, total - first)).logits
    logits = logits[:, first - total :]  # a model's own code may not know logits_to_keep
    logprobs_BS = token_logprobs(logits[:, :-1], ids[:, first + 1 :], sampling)
    columns_BT = copy_to_device(offsets_BT.clamp(max=logprobs_BS.shape[1] - 1), device)
    return logprobs_BS.gather(1, columns_BT).masked_fill(~copy_to_device(mask_BT, device), 0.0)


def _keep_logits(model: Any, last: int) -> dict[str, int]:
    """Return the keyword for logits of the last positions only, if the model has it."""
    knows = "logits_to_keep" in signature(without_adapters(model).forward).parameters
    return {"logits_to_keep": last} if knows else {}


def _scatter_to_rows(logprobs_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Return (B, T) with the N values where the mask is set, 0 elsewhere. The mask is on the CPU."""
    device = logprobs_N.device
    rows, columns = mask_BT.nonzero(as_tuple=True)
    empty = torch.zeros(mask_BT.shape, dtype=logprobs_N.dtype, device=device)
    return empty.index_put((copy_to_device(rows, device), copy_to_device(columns, device)), logprobs_N)


def plain_logprobs(
    model: Any, pairs: Sequence[TokenPair], sampling: Sampling, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what :func:`response_logprobs` returns, computed in rows and without hacrl's kernels."""
    return padded_logprobs(model, pairs, sampling, device), response_mask(pairs).to(device)


@contextmanager
def checking_pass(
    model: Any, pairs: Sequence[TokenPair], sampling: Sampling, *, plain: bool = False
) -> Iterator[None]:
    """Within the block, compute log-probabilities of these pairs once, without gradients.

    All ranks of a sharded model take part in the pass: rank 0 announces it to the others.
    """
    sharding = sharding_of(model)
    if sharding is None:
        with torch.inference_mode():
            yield
        return
    listed = [[list(prompt), list(response)] for prompt, response in pairs]
    sharding.group.announce(
        "checking_pass", lambda: {"pairs": listed, "sampling": asdict(sampling), "plain": plain}
    )
    # FSDP2 keeps the memory that a layer was gathered into: tensors of inference mode could not be trained
    with sharding.group.together(), torch.no_grad():
        yield
