"""A small output layer, its log-probabilities by several methods, and hooks that record created tensors."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hacrl.models.lm_head import chunked_logprobs, linear_logprobs
from hacrl.types import Sampling

TOKENS, WIDTH, VOCABULARY = 13, 24, 40
ALL, SOME, ONE = 10**6, 5 * VOCABULARY, 1  # logits in a chunk: of 13 tokens, of 5 + 4 + 4, or of one


def set_spare_memory(monkeypatch: pytest.MonkeyPatch, spare: int) -> list[torch.device]:
    """Pretend that devices have this spare memory; return the list of devices that are queried."""
    asked: list[torch.device] = []

    def found(device: torch.device) -> int:
        asked.append(device)
        return spare

    monkeypatch.setattr("hacrl.models.lm_head.spare_memory", found)
    return asked


class Case:
    """Hidden states, a weight, targets and the gradient of the log-probabilities."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS, width: int = WIDTH) -> None:
        random = torch.Generator().manual_seed(tokens)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight.data = torch.randn(VOCABULARY, width, generator=random).div(3).to(dtype)
        self.hidden = torch.randn(tokens, width, generator=random).mul(2).to(dtype).requires_grad_()
        self.targets = torch.randint(VOCABULARY, (tokens,), generator=random)
        self.above = torch.randn(tokens, generator=random)

    @property
    def weight(self) -> Tensor:
        return self.head.weight

    def by_hand(self, temperature: float = 1.0, most: int = SOME) -> tuple[Tensor, Tensor, Tensor]:
        found = linear_logprobs(self.hidden, self.weight, self.targets, temperature, most)
        return found.detach(), *torch.autograd.grad(found, (self.hidden, self.weight), self.above)

    def by_autograd(self, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
        found = chunked_logprobs(self.head, self.hidden, self.targets, sampling, VOCABULARY)
        return found.detach(), *torch.autograd.grad(found, (self.hidden, self.weight), self.above)

    def exactly(self, temperature: float = 1.0, rounded: bool = False) -> tuple[Tensor, ...]:
        """Compute in float64, optionally from logits rounded to 16 bits; return the logits' gradient, too."""
        hidden, weight = self.hidden.detach().double(), self.weight.detach().double()
        logits = (hidden @ weight.T).to(self.weight.dtype).double() if rounded else hidden @ weight.T
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        chosen = nn.functional.one_hot(self.targets, VOCABULARY)
        above = self.above.double().unsqueeze(1) / (temperature or 1.0)
        gradient = above * (chosen - logprobs.exp())
        return (logprobs * chosen).sum(-1), gradient @ weight, gradient.T @ hidden, gradient


class Products(TorchDispatchMode):
    """Records the shapes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        if function.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.shapes.append(tuple(found.shape))
        return found


class Alive(TorchDispatchMode):
    """Records operations that make tensors as large as a chunk's logits, and how many exist after each."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.made, self.largest = dtype, [], 0
        self.counts: list[int] = []
        self._alive: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        found = function(*arguments, **(keywords or {}))
        alive = [one() for one in self._alive]
        known = {one.untyped_storage().data_ptr() for one in alive if one is not None}
        for one in found if isinstance(found, tuple | list) else [found]:
            if one.dim() == 2 and VOCABULARY in one.shape and WIDTH not in one.shape:
                self.largest = max(self.largest, one.numel())
                if one.dtype == self.dtype and one.untyped_storage().data_ptr() not in known:
                    self.made.append(function.overloadpacket.__name__)
                    self._alive.append(weakref.ref(one))
        self.counts.append(self.now)
        return found

    @property
    def now(self) -> int:
        self._alive = [one for one in self._alive if one() is not None]
        return len(self._alive)

    @property
    def most(self) -> int:
        return max(self.counts)
