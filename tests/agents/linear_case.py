"""Hidden states and a small output layer, computed by hand, by autograd and exactly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hacrl.agents.linear_logprobs import linear_logprobs
from hacrl.agents.output_layer import logprobs_in_pieces
from hacrl.types import Sampling

TOKENS, WIDTH, VOCABULARY = 13, 24, 40
ALL, SOME, ONE = 10**6, 5 * VOCABULARY, 1  # logits at a time: 13, 5 + 4 + 4, or 13 times one token's


class Case:
    """Hidden states, a weight, targets and a gradient that comes from above."""

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
        found = logprobs_in_pieces(self.head, self.hidden, self.targets, sampling, VOCABULARY)
        return found.detach(), *torch.autograd.grad(found, (self.hidden, self.weight), self.above)

    def exactly(self, temperature: float = 1.0, rounded: bool = False) -> tuple[Tensor, ...]:
        """In float64, if wanted from the logits as they are in 16 bits; the gradient of logits as well."""
        hidden, weight = self.hidden.detach().double(), self.weight.detach().double()
        logits = (hidden @ weight.T).to(self.weight.dtype).double() if rounded else hidden @ weight.T
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
        chosen = nn.functional.one_hot(self.targets, VOCABULARY)
        above = self.above.double().unsqueeze(1) / (temperature or 1.0)
        gradient = above * (chosen - logprobs.exp())
        return (logprobs * chosen).sum(-1), gradient @ weight, gradient.T @ hidden, gradient
