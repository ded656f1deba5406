"""Attention of a learning pass: our kernels, where responses read their prompt, against torch's with copies.

    python benchmarks/tree_attention.py

In bfloat16, heads 128 wide: many responses to few prompts, long ones to a single prompt, and sequences that
share nothing; with 16 query heads and 8 of keys, or 12 and 2. FLOPs are those of the scores that are needed,
2 products forward and 5 backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from timing import best_of
from torch import Tensor

from hacrl.models.attention.key_copies import KeyCopies, copied_keys
from hacrl.models.attention.packed import SequenceBounds, packed_attention
from hacrl.models.attention.prefix_tree import PrefixTree
from hacrl.models.attention.tree_attention import tree_attention
from hacrl.models.packing import pack

HEADS = ((16, 8), (12, 2))  # of queries, and of keys
WIDTH = 128
SCALE = WIDTH**-0.5
ROUNDS = 20
GPU = torch.device("cuda")
_DRAW = random.Random(0)
CASES = {  # tokens of prompts, and of the responses to each
    "8 prompts of 160, 16 responses of 170 to 340": [
        (160, [_DRAW.randint(170, 340) for _ in range(16)]) for _ in range(8)
    ],
    "1 prompt of 160, 16 responses of 2,048": [(160, [2048] * 16)],
    "16 sequences of 1,152": [(128, [1024]) for _ in range(16)],
}


def main() -> None:
    """Every case with every kind of heads."""
    for name, case in CASES.items():
        for heads in HEADS:
            print(f"{name}; {heads[0]} and {heads[1]} heads", flush=True)
            _compare(case, heads)


def _compare(case: list[tuple[int, list[int]]], heads: tuple[int, int]) -> None:
    """Milliseconds of either way, forward and backward."""
    pairs = [
        ((number + 1,) * prompt, (1,) * response)
        for number, (prompt, responses) in enumerate(case)
        for response in responses
    ]
    tree, inputs = pack(pairs, GPU, as_tree=True).inputs["tree"], pack(pairs, GPU).inputs
    segments = SequenceBounds(
        inputs["cu_seq_lens_q"], inputs["cu_seq_lens_k"], inputs["max_length_q"], inputs["max_length_k"]
    )
    tokens, flops = len(tree.positions), 2 * _scores(tree) * heads[0] * WIDTH
    times = {
        "tree": _milliseconds(tokens, heads, partial(_in_tree, tree)),
        "copies": _milliseconds(tokens, heads, partial(_with_copies, segments, inputs["key_copies"])),
    }
    for way, (forward, backward) in times.items():
        print(
            f"  {way:7} forward {forward:.3f} ms ({2 * flops / forward / 1e9:.0f} TFLOP/s)  "
            f"backward {backward:.3f} ms ({5 * flops / backward / 1e9:.0f} TFLOP/s)"
        )
    print(f"  copies / tree: {sum(times['copies']) / sum(times['tree']):.2f}", flush=True)


def _in_tree(tree: PrefixTree, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return tree_attention(query, key, value, tree, SCALE, -1)


def _with_copies(
    segments: SequenceBounds, shared: KeyCopies | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    if shared is not None:
        key, value = copied_keys(key, shared), copied_keys(value, shared)
    return packed_attention(query, key, value, segments, SCALE, -1)


def _milliseconds(tokens: int, heads: tuple[int, int], attend: Callable[..., Tensor]) -> tuple[float, float]:
    states = [
        torch.randn(tokens, count, WIDTH, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]
    out = attend(*states)
    gradient = torch.randn_like(out)

    def backward() -> None:
        for _ in range(ROUNDS):
            torch.autograd.grad(out, states, gradient, retain_graph=True)

    with torch.no_grad():
        forward_s = best_of(3, lambda: [attend(*states) for _ in range(ROUNDS)])
    return forward_s / ROUNDS * 1e3, best_of(3, backward) / ROUNDS * 1e3


def _scores(tree: PrefixTree) -> float:
    """Pairs of tokens of which one sees the other."""
    found = 0.0
    for own, end, trunk, trunk_end, _ in tree.sequences.view(-1, 5).tolist():
        length = end - own
        found += length * (trunk_end - trunk) + length * (length + 1) / 2
    return found


if __name__ == "__main__":
    main()
