"""Optimizers of a few small tensors, on a pretended device: the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hacrl.training.optimizer import MasterWeightAdamW
from tests.support.late_transfers import LateTransfers

CPU = torch.device("cpu")
HALF, FULL = torch.bfloat16, torch.float32


def transfers() -> LateTransfers:
    return LateTransfers(CPU)


def parameters(dtypes: Sequence[torch.dtype]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype)) for dtype in dtypes]


def update(optimizer: MasterWeightAdamW, given: Sequence[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_gradients()
    for value in given:
        gradient = torch.randn(5, 3, generator=generator).to(value.dtype)
        (value * gradient).sum().backward()
    optimizer.clip_gradients(1.0)
    optimizer.step()


def adamw(given: Sequence[Tensor]) -> MasterWeightAdamW:
    return MasterWeightAdamW(given, 1e-2, (0.9, 0.999), 0.1)


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
