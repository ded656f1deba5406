"""Copies of shared prompts' keys, and sums of their gradients."""

from __future__ import annotations

import pytest
import torch

from hacrl.models.attention.key_copies import (
    KeyCopies,
    copied_keys,
    group_copies,
    plan_key_copies,
    sum_copies,
)

# a prompt of two tokens; the prompt and two responses of one and two tokens attend to it
PLACES = [0, 1, 0, 1, 2, 0, 1, 3, 4]


def test_group_copies_by_hand() -> None:
    order, starts = group_copies(torch.tensor(PLACES), 5)
    assert order.tolist() == [0, 2, 5, 1, 3, 6, 4, 7, 8]
    assert starts.tolist() == [0, 3, 6, 7, 8, 9]


def test_gradients_by_hand() -> None:
    order, starts = group_copies(torch.tensor(PLACES), 5)
    copies = torch.tensor([1.0, 2, 4, 8, 16, 32, 64, 128, 256]).view(9, 1, 1)
    assert sum_copies(copies, order, starts).flatten().tolist() == [1 + 4 + 32, 2 + 8 + 64, 16, 128, 256]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_equals_autograd(dtype) -> None:
    torch.manual_seed(0)
    places = torch.tensor(PLACES)
    shared = KeyCopies(places, *group_copies(places, 5))
    weights = torch.randn(9, 3, 4, dtype=dtype)
    found = []
    for how in (shared, KeyCopies(places)):
        states = torch.arange(60, dtype=dtype).view(5, 3, 4).requires_grad_()
        copies = copied_keys(states, how)
        (copies * weights).sum().backward()
        found.append((copies.detach(), states.grad))
    assert torch.equal(found[0][0], found[1][0])
    close = {"rtol": 0.02, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(found[0][1], found[1][1], **close)
    torch.library.opcheck(
        torch.ops.hacrl.copy_keys.default, (torch.randn(5, 3, 4, requires_grad=True), *shared)
    )


def test_a_cpu_does_not_group_copies() -> None:
    assert plan_key_copies(torch.tensor(PLACES), 5, torch.device("cpu"))[1:] == (None, None)
