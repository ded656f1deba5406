"""Prompts and responses laid end to end for one forward pass, a prompt once for all responses to it.

The keys and values of a shared prompt are seen by the attention of each of its responses, and computed once.
With 8 responses as long as their prompt, that is 9 parts of work instead of 16.
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

from hacrl.agents.attention import Segments, Slots
from hacrl.agents.shared_keys import Shared, share
from hacrl.agents.tree import Tree, plant, ranges
from hacrl.agents.upload import upload

TokenPair = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids
LossMasks = Sequence[Sequence[bool]] | None  # per pair and response token: whether it is wanted; None: all


class _Told(TypedDict, total=False):
    """What attention is told of who sees whom."""

    tree: Tree
    segments: Segments
    shared_keys: Shared


@dataclass(frozen=True)
class Packed:
    """What the model is called with, and where in it the responses are."""

    inputs: dict[str, Any]
    before: Tensor  # (N,) places of the tokens before the wanted response tokens, in the pairs' order
    targets: Tensor  # (N,) the wanted response tokens


def packed_tokens(pairs: Sequence[TokenPair]) -> int:
    """Tokens of a forward pass over these pairs."""
    prompts = {tuple(prompt) for prompt, _ in pairs}
    return sum(map(len, prompts)) + sum(len(response) for _, response in pairs)


def padded_tokens(pairs: Sequence[TokenPair]) -> int:
    """The same, in rows of equal length."""
    return len(pairs) * max(len(prompt) + len(response) for prompt, response in pairs)


def pack(
    pairs: Sequence[TokenPair], device: torch.device, as_tree: bool = False, loss_masks: LossMasks = None
) -> Packed:
    """Prompt after prompt, each followed by its responses.

    Attention is told of a tree, or of keys that are handed out to all who see them.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt), []).append(number)
    tokens = array("q")  # torch reads it as it is; numbers of a list it would read one by one
    sequences: list[tuple[int, int, int, int]] = []  # what each sees first, and itself: (place, length) twice
    prompt_ends = [0] * len(pairs)  # place of the token before a response
    starts = [0] * len(pairs)  # of a response

    def add(ids: Sequence[int], seen: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """A sequence that sees these places, then itself; returns its own."""
        own = (len(tokens), len(ids))
        tokens.extend(ids)
        sequences.append((*seen, *own))
        return own

    for prompt, numbers in groups.items():
        if len(numbers) == 1:  # nobody to share with
            (number,) = numbers
            start, _ = add((*prompt, *pairs[number][1]))
            prompt_ends[number], starts[number] = start + len(prompt) - 1, start + len(prompt)
            continue
        shared_prompt = add(prompt)
        for number in numbers:
            prompt_ends[number] = sum(shared_prompt) - 1
            starts[number], _ = add(pairs[number][1], shared_prompt)

    seen_place, seen_length, own_place, own_length = torch.tensor(sequences).unbind(1)
    if as_tree:
        planted = plant(own_place, own_length, seen_place, seen_length)
        told: _Told = {"tree": planted.moved(partial(upload, device=device))}
    else:
        told = {
            "segments": Segments(
                _starts(own_length, device),
                _starts(seen_length + own_length, device),
                int(own_length.max()),
                int((seen_length + own_length).max()),
            )
        }
        if len(groups) < len(pairs):
            keys = ranges(
                torch.stack([seen_length, own_length], 1).flatten(),
                torch.stack([seen_place, own_place], 1).flatten(),
            )
            told["shared_keys"] = share(keys, len(tokens), device)
    ids = torch.frombuffer(tokens, dtype=torch.int64)
    lengths = torch.tensor([len(response) for _, response in pairs])
    places, before = _wanted_places(lengths, starts, prompt_ends, loss_masks)
    positions = ranges(own_length, seen_length)
    inputs = model_inputs(upload(ids, device), upload(positions, device), **told)
    return Packed(inputs, upload(before, device), upload(ids[places], device))


def _wanted_places(
    lengths: Tensor, starts: Sequence[int], prompt_ends: Sequence[int], loss_masks: LossMasks
) -> tuple[Tensor, Tensor]:
    """Return the places of the wanted response tokens and of the tokens before them, (N,) each."""
    places = ranges(lengths, torch.tensor(starts))
    is_first = ranges(lengths) == 0
    before = torch.where(is_first, torch.tensor(prompt_ends).repeat_interleave(lengths), places - 1)
    if loss_masks is None:
        return places, before
    wanted = torch.tensor([one for loss_mask in loss_masks for one in loss_mask], dtype=torch.bool)
    return places[wanted], before[wanted]


def whole_sequences(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Segments]:
    """Sequences that share nothing: their tokens in one row, the tokens' positions, and where each begins."""
    lengths = [len(sequence) for sequence in sequences]
    tokens = upload([token for sequence in sequences for token in sequence], device)
    all_lengths = torch.tensor(lengths)
    positions = upload(ranges(all_lengths), device)
    # one for both would be compiled apart
    queries, keys = _starts(all_lengths, device), _starts(all_lengths, device)
    return tokens, positions, Segments(queries, keys, max(lengths), max(lengths))


def model_inputs(
    tokens: Tensor,
    positions: Tensor,
    segments: Segments | None = None,
    shared_keys: Shared | None = None,
    tree: Tree | None = None,
    slots: Slots | None = None,
) -> dict[str, Any]:
    """What a model is called with, and its attention told. Always the same keywords: compilers mind."""
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "cu_seq_lens_q": segments.queries if segments else None,
        "cu_seq_lens_k": segments.keys if segments else None,
        "max_length_q": segments.most_queries if segments else None,
        "max_length_k": segments.most_keys if segments else None,
        "shared_keys": shared_keys,
        "tree": tree,
        "slots": slots,
        "use_cache": False,
    }


def _starts(lengths: Tensor, device: torch.device) -> Tensor:
    """Where each begins, and where the last one ends."""
    return upload(pad(lengths.cumsum(0), (1, 0)), device, torch.int32)
