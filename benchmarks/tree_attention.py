"""Attention of a learning pass: our kernels, where responses read their prompt, against torch's with copies.

    python benchmarks/tree_attention.py

Two cases of 16 query heads and 8 of keys, 128 wide, in bfloat16: many responses to few prompts, and sequences
that share nothing. FLOPs are those of the scores that are needed, 2 products forward and 5 backward.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from timing import best_of
from torch import Tensor

from hacrl.agents.attention import Segments, packed_attention
from hacrl.agents.packing import pack
from hacrl.agents.shared_keys import Shared, handed_out
from hacrl.agents.tree import Tree
from hacrl.agents.tree_attention import tree_attention

HEADS, KEY_HEADS, WIDTH = 16, 8, 128
SCALE = WIDTH**-0.5
ROUNDS = 20
GPU = torch.device("cuda")
_DRAW = random.Random(0)
CASES = {  # tokens of prompts, and of the responses to each
    "8 prompts of 160, 16 responses of 170 to 340": [
        (160, [_DRAW.randint(170, 340) for _ in range(16)]) for _ in range(8)
    ],
    "16 sequences of 1,152": [(128, [1024]) for _ in range(16)],
}


def main() -> None:
    """Milliseconds of either, forward and backward."""
    for name, case in CASES.items():
        pairs = [
            ((number + 1,) * prompt, (1,) * response)
            for number, (prompt, responses) in enumerate(case)
            for response in responses
        ]
        told = pack(pairs, GPU, as_tree=True).inputs["tree"]
        inputs = pack(pairs, GPU).inputs
        segments = Segments(
            inputs["cu_seq_lens_q"], inputs["cu_seq_lens_k"], inputs["max_length_q"], inputs["max_length_k"]
        )
        scores = _scores(told)
        times = {
            "tree": _milliseconds(len(told.positions), lambda *states, tree=told: _in_tree(*states, tree)),
            "copies": _milliseconds(
                len(told.positions),
                lambda *states, cut=segments, keys=inputs["shared_keys"]: _with_copies(*states, cut, keys),
            ),
        }
        print(name)
        for way, (forward, backward) in times.items():
            flops = [2 * products * scores * HEADS * WIDTH for products in (2, 5)]
            print(
                f"  {way:7} forward {forward:.3f} ms ({flops[0] / forward / 1e9:.0f} TFLOP/s)  "
                f"backward {backward:.3f} ms ({flops[1] / backward / 1e9:.0f} TFLOP/s)"
            )
        print(f"  copies / tree: {sum(times['copies']) / sum(times['tree']):.2f}", flush=True)


def _in_tree(query: Tensor, key: Tensor, value: Tensor, tree: Tree) -> Tensor:
    return tree_attention(query, key, value, tree, SCALE, -1)


def _with_copies(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, shared: Shared | None
) -> Tensor:
    if shared is not None:
        key, value = handed_out(key, shared), handed_out(value, shared)
    return packed_attention(query, key, value, segments, SCALE, -1)


def _milliseconds(tokens: int, attend: Callable[..., Tensor]) -> tuple[float, float]:
    states = [
        torch.randn(tokens, heads, WIDTH, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    out = attend(*states)
    gradient = torch.randn_like(out)

    def backward() -> None:
        for _ in range(ROUNDS):
            torch.autograd.grad(out, states, gradient, retain_graph=True)

    with torch.no_grad():
        forward_s = best_of(3, lambda: [attend(*states) for _ in range(ROUNDS)])
    return forward_s / ROUNDS * 1e3, best_of(3, backward) / ROUNDS * 1e3


def _scores(tree: Tree) -> float:
    """Pairs of tokens of which one sees the other."""
    found = 0.0
    for own, end, trunk, trunk_end, _ in tree.sequences.view(-1, 5).tolist():
        length = end - own
        found += length * (trunk_end - trunk) + length * (length + 1) / 2
    return found


if __name__ == "__main__":
    main()
