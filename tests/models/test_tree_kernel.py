"""The kernels of prefix-tree attention, run by Triton's interpreter, so that no GPU is needed."""

from __future__ import annotations

import pytest
import torch

from tests.support.interpreted import interpreted

CHECK = """
import torch
import hacrl.models.attention.prefix_tree as tree_module
from hacrl.models.attention import kernels as tree_kernel
from hacrl.models.attention import reference
from tests.models.prefix_trees import tree_of

torch.manual_seed(0)
tree_module.MIN_QUERIES_PER_TASK = 70  # so that few queries already make several tasks
tokens, tree = tree_of([(70, [66, 1, 64]), (3, []), (65, []), (1, [2, 2]), (5, [80])])
assert (tree.partial_sums, len(tree.reductions)) == (3 + 2 + 2, 4 * (3 + 2))


def turned(states):  # heads first, as in models
    return states.transpose(0, 1).contiguous().transpose(0, 1)


def among_others(states):  # a view of wider rows
    return torch.cat([states, states, states], 1)[:, states.shape[1] : 2 * states.shape[1]]


for heads, key_heads, width, window in ((4, 2, 64, -1), (3, 3, 40, 20), (3, 1, 16, 0)):
    gradient, query, key, value = plain = [
        torch.randn(tokens, count, width) for count in (heads, heads, key_heads, key_heads)
    ]
    odd = [among_others(gradient), turned(query), key.contiguous(), among_others(value)]
    found = []
    for functions, given in ((reference, plain), (tree_kernel, odd)):
        out, sums = functions.forward(*given[1:], tree, 0.2, window)
        found.append((out, *functions.backward(*given, out, sums, tree, 0.2, window)))
    for exact, kernels in zip(*found, strict=True):
        torch.testing.assert_close(kernels, exact, rtol=1e-4, atol=1e-5)
print("all the same")
"""


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels themselves")
def test_kernels_agree_with_the_reference() -> None:
    interpreted(CHECK)
