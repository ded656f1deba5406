"""Prompts and responses laid end to end for one forward pass, a prompt once for all responses to it.

The keys and values of a shared prompt are handed to the attention of each of its responses; all else of it is
computed once. With 8 responses as long as their prompt, that is 9 parts of work instead of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hacrl.agents.attention import Segments, Slots
from hacrl.agents.shared_keys import Shared, share
from hacrl.agents.upload import upload

TokenPair = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids


@dataclass(frozen=True)
class Packed:
    """What the model is called with, and where in it the responses are."""

    inputs: dict[str, Any]
    before: Tensor  # (N,) places of the tokens before the response tokens of all pairs, in the pairs' order
    targets: Tensor  # (N,) the response tokens


def packed_tokens(pairs: Sequence[TokenPair]) -> int:
    """Tokens of a forward pass over these pairs."""
    prompts = {tuple(prompt) for prompt, _ in pairs}
    return sum(map(len, prompts)) + sum(len(response) for _, response in pairs)


def padded_tokens(pairs: Sequence[TokenPair]) -> int:
    """The same, in rows of equal length."""
    return len(pairs) * max(len(prompt) + len(response) for prompt, response in pairs)


def pack(pairs: Sequence[TokenPair], device: torch.device) -> Packed:
    """Prompt after prompt, each followed by its responses."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt), []).append(number)
    tokens: list[int] = []
    positions: list[int] = []
    keys: list[int] = []  # places of the keys that each sequence sees, one sequence after the other
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    before: list[list[int]] = [[] for _ in pairs]

    def add(ids: Sequence[int], seen: range) -> range:
        """A sequence that sees these places, then itself; returns its own."""
        own = range(len(tokens), len(tokens) + len(ids))
        tokens.extend(ids)
        positions.extend(range(len(seen), len(seen) + len(ids)))
        keys.extend((*seen, *own))
        query_lengths.append(len(own))
        key_lengths.append(len(seen) + len(own))
        return own

    for prompt, numbers in groups.items():
        if len(numbers) == 1:  # nobody to share with
            response = pairs[numbers[0]][1]
            whole = add((*prompt, *response), range(0))
            before[numbers[0]] = list(whole[len(prompt) - 1 : -1])
            continue
        places = add(prompt, range(0))
        for number in numbers:
            own = add(pairs[number][1], places)
            before[number] = [places[-1], *own][: len(own)]

    segments = Segments(
        _starts(query_lengths, device), _starts(key_lengths, device), max(query_lengths), max(key_lengths)
    )
    shared = share(keys, len(tokens), device) if len(groups) < len(pairs) else None
    inputs = model_inputs(upload(tokens, device), upload(positions, device), segments, shared)
    targets = [token for _, response in pairs for token in response]
    return Packed(
        inputs,
        upload([place for places in before for place in places], device),
        upload(targets, device),
    )


def whole_sequences(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Segments]:
    """Sequences that share nothing: their tokens in one row, the tokens' positions, and where each begins."""
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    queries, keys = _starts(lengths, device), _starts(lengths, device)  # one for both would be compiled apart
    return tokens, positions, Segments(queries, keys, max(lengths), max(lengths))


def model_inputs(
    tokens: Tensor,
    positions: Tensor,
    segments: Segments | None = None,
    shared_keys: Shared | None = None,
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
        "slots": slots,
        "use_cache": False,
    }


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return upload([0, *accumulate(lengths)], device, torch.int32)
