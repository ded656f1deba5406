"""Pack prompts and responses into one row of tokens for a forward pass, with each shared prompt only once.

All responses to a prompt attend to the same keys and values, which are computed once. For 8 responses as long
as their prompt this is 9 parts of work instead of 16.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import pad

from hacrl.models.attention.key_copies import KeyCopies, plan_key_copies
from hacrl.models.attention.packed import CacheSlots, SequenceBounds
from hacrl.models.attention.prefix_tree import PrefixTree, build_tree, concatenated_ranges
from hacrl.models.device import copy_to_device

TokenPair = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids
LossMasks = Sequence[Sequence[bool]] | None  # per pair and response token: whether it is wanted; None: all


class _AttentionInputs(TypedDict, total=False):
    """Attention metadata: which tokens attend to which."""

    tree: PrefixTree
    bounds: SequenceBounds
    key_copies: KeyCopies


@dataclass(frozen=True)
class Packed:
    """The model's inputs for packed sequences, and where the wanted response tokens are in them."""

    inputs: dict[str, Any]
    before: Tensor  # (N,) indices of the tokens before the wanted response tokens, in the pairs' order
    targets: Tensor  # (N,) the wanted response tokens


def packed_tokens(pairs: Sequence[TokenPair]) -> int:
    """Return the number of tokens of a packed forward pass over these pairs."""
    prompts = {tuple(prompt) for prompt, _ in pairs}
    return sum(map(len, prompts)) + sum(len(response) for _, response in pairs)


def padded_tokens(pairs: Sequence[TokenPair]) -> int:
    """Return the number of tokens of a forward pass over padded rows, one per pair."""
    return len(pairs) * max(len(prompt) + len(response) for prompt, response in pairs)


def pack(
    pairs: Sequence[TokenPair], device: torch.device, as_tree: bool = False, loss_masks: LossMasks = None
) -> Packed:
    """Pack each prompt, followed by its responses.

    Attention shares prompts through a prefix tree (``as_tree``), or through copies of their keys and values.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt), []).append(number)
    tokens = array("q")  # torch reads the buffer at once; it would read a list number by number
    sequences: list[tuple[int, int, int, int]] = []  # prefix start and length, own start and length
    prompt_ends = [0] * len(pairs)  # index of the token before a response
    starts = [0] * len(pairs)  # index of a response's first token

    def add(ids: Sequence[int], prefix: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Add a sequence that attends to a prefix and to itself; return its start and length."""
        own = (len(tokens), len(ids))
        tokens.extend(ids)
        sequences.append((*prefix, *own))
        return own

    for prompt, numbers in groups.items():
        if len(numbers) == 1:  # nothing to share: prompt and response are one sequence
            (number,) = numbers
            start, _ = add((*prompt, *pairs[number][1]))
            prompt_ends[number], starts[number] = start + len(prompt) - 1, start + len(prompt)
            continue
        shared_prompt = add(prompt)
        for number in numbers:
            prompt_ends[number] = sum(shared_prompt) - 1
            starts[number], _ = add(pairs[number][1], shared_prompt)

    prefix_start, prefix_length, own_start, own_length = torch.tensor(sequences).unbind(1)
    if as_tree:
        tree = build_tree(own_start, own_length, prefix_start, prefix_length)
        attention: _AttentionInputs = {"tree": tree.moved(partial(copy_to_device, device=device))}
    else:
        attention = {
            "bounds": SequenceBounds(
                _starts(own_length, device),
                _starts(prefix_length + own_length, device),
                int(own_length.max()),
                int((prefix_length + own_length).max()),
            )
        }
        if len(groups) < len(pairs):
            copied_tokens = concatenated_ranges(
                torch.stack([prefix_length, own_length], 1).flatten(),
                torch.stack([prefix_start, own_start], 1).flatten(),
            )
            attention["key_copies"] = plan_key_copies(copied_tokens, len(tokens), device)
    ids = torch.frombuffer(tokens, dtype=torch.int64)
    lengths = torch.tensor([len(response) for _, response in pairs])
    indices, before = _wanted_tokens(lengths, starts, prompt_ends, loss_masks)
    positions = concatenated_ranges(own_length, prefix_length)
    inputs = model_inputs(copy_to_device(ids, device), copy_to_device(positions, device), **attention)
    return Packed(inputs, copy_to_device(before, device), copy_to_device(ids[indices], device))


def _wanted_tokens(
    lengths: Tensor, starts: Sequence[int], prompt_ends: Sequence[int], loss_masks: LossMasks
) -> tuple[Tensor, Tensor]:
    """Return the indices of the wanted response tokens and of the tokens before them, (N,) each."""
    indices = concatenated_ranges(lengths, torch.tensor(starts))
    is_first = concatenated_ranges(lengths) == 0
    before = torch.where(is_first, torch.tensor(prompt_ends).repeat_interleave(lengths), indices - 1)
    if loss_masks is None:
        return indices, before
    wanted = torch.tensor([value for loss_mask in loss_masks for value in loss_mask], dtype=torch.bool)
    return indices[wanted], before[wanted]


def whole_sequences(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, SequenceBounds]:
    """Pack sequences that share nothing. Return their tokens, the tokens' positions, and the bounds."""
    lengths = [len(sequence) for sequence in sequences]
    tokens = copy_to_device([token for sequence in sequences for token in sequence], device)
    all_lengths = torch.tensor(lengths)
    positions = copy_to_device(concatenated_ranges(all_lengths), device)
    # two tensors: a compiler would treat one tensor for both as a special case
    query_starts, key_starts = _starts(all_lengths, device), _starts(all_lengths, device)
    return tokens, positions, SequenceBounds(query_starts, key_starts, max(lengths), max(lengths))


def model_inputs(
    tokens: Tensor,
    positions: Tensor,
    bounds: SequenceBounds | None = None,
    key_copies: KeyCopies | None = None,
    tree: PrefixTree | None = None,
    slots: CacheSlots | None = None,
) -> dict[str, Any]:
    """Return the keywords to call a model with: always the same ones, or torch.compile would recompile."""
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "cu_seq_lens_q": bounds.query_starts if bounds else None,
        "cu_seq_lens_k": bounds.key_starts if bounds else None,
        "max_length_q": bounds.max_queries if bounds else None,
        "max_length_k": bounds.max_keys if bounds else None,
        "key_copies": key_copies,
        "tree": tree,
        "slots": slots,
        "use_cache": False,
    }


def _starts(lengths: Tensor, device: torch.device) -> Tensor:
    """Return where each sequence begins, and where the last one ends."""
    return copy_to_device(pad(lengths.cumsum(0), (1, 0)), device, torch.int32)
