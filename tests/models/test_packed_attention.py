"""Attention over packed sequences without a kernel: padded in groups of similar length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from hacrl.models.attention import packed as attention
from hacrl.models.attention.packed import SequenceBounds, packed_attention

# queries and keys of each sequence: prompts, responses to a prompt of 20 tokens, and one without a prompt
SIZES = [(20, 20), (3, 23), (2, 22), (1, 21), (20, 20), (4, 24), (3, 23), (9, 9)]
HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3


def given(seed: int = 0) -> tuple[list[Tensor], SequenceBounds]:
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (sum(counts) for counts in zip(*SIZES, strict=True))
    states = [
        torch.randn(tokens, heads, WIDTH, generator=generator, requires_grad=True)
        for tokens, heads in ((queries, HEADS), (keys, KEY_HEADS), (keys, KEY_HEADS))
    ]
    starts = [pad(torch.tensor(counts).cumsum(0), (1, 0)).int() for counts in zip(*SIZES, strict=True)]
    return states, SequenceBounds(starts[0], starts[1], 20, 24)


def one_by_one(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """Compute each query over all keys up to its own, in a loop."""
    found, first_query, first_key = [], 0, 0
    for queries, keys in SIZES:
        for number in range(queries):
            own = first_key + keys - queries + number
            first = first_key if window < 0 else max(first_key, own - window)
            for head in range(HEADS):
                shared = head // (HEADS // KEY_HEADS)
                scores = key[first : own + 1, shared] @ query[first_query + number, head] * SCALE
                found.append(scores.softmax(0) @ value[first : own + 1, shared])
        first_query, first_key = first_query + queries, first_key + keys
    return torch.stack(found).view(-1, HEADS, WIDTH)


@pytest.mark.parametrize("window", [-1, 4])
def test_every_query_sees_its_own_sequence_up_to_itself(window: int) -> None:
    states, segments = given()
    found, expected = packed_attention(*states, segments, SCALE, window), one_by_one(*states, window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    gradients = [torch.autograd.grad((out * weights).sum(), states) for out in (found, expected)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def test_prompts_and_responses_are_padded_separately(monkeypatch) -> None:
    """Together they would be 8 rows of 20 queries and 24 keys: 3,840 scores a head."""
    states, segments = given()
    padded: list[tuple[int, int, int]] = []
    plainly = attention.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *others: Tensor, **options) -> Tensor:
        padded.append((query.shape[0], query.shape[2], key.shape[2]))
        return plainly(query, key, *others, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    packed_attention(*states, segments, SCALE, -1)
    # 16 to 31 queries; 2 and 3; 1; 4 to 7; 8 to 15
    assert padded == [(2, 20, 20), (3, 3, 23), (1, 1, 21), (1, 4, 24), (1, 9, 9)]
    assert sum(rows * queries * keys for rows, queries, keys in padded) == 800 + 207 + 21 + 96 + 81
