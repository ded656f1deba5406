"""Samples whose ratio to the learner's policy is chosen, and updates written out in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hacrl.models.agent import Agent
from hacrl.types import LearnerSample, Sampling
from tests.support.forward import plain_logprobs

SAMPLING = Sampling(16)
PROMPTS = [(4, 21), (16, 5, 6, 13, 4, 7, 17, 15, 5, 21), (10, 14, 7, 21)]
RESPONSES = [(10, 1), (4, 13, 12, 18, 20, 1), (5,), (8, 9, 10, 11, 12, 3, 4, 5), (19, 1), (7, 7, 7)]


def sample(
    agent: Agent,
    which: int,
    ratio: float,
    advantage: float,
    own: bool = True,
    retokenised: bool = False,
    sampling: Sampling = SAMPLING,
) -> LearnerSample:
    """Return response ``which`` with a chosen ratio s of the learner's policy to its source."""
    prompt, response = PROMPTS[which % len(PROMPTS)], RESPONSES[which]
    with torch.no_grad():
        logprobs = plain_logprobs(agent.model, prompt, response, sampling).tolist()
    behaviour = tuple(
        value - math.log(ratio) for value in logprobs
    )  # every token's ratio is s, so is its mean
    return LearnerSample(
        prompt_ids=prompt,
        response_ids=response,
        behaviour_logprobs=None if retokenised else behaviour,
        behaviour_logprob=math.fsum(behaviour),
        source_length=len(response),
        source=agent.name if own else "other",
        is_own=own,
        advantage=advantage,
    )


def gspo_mean_loss(model, samples: Sequence[LearnerSample], low: float, high: float) -> Tensor:
    """Return -mean(min(s A, clip(s) A)), one sequence at a time."""
    losses = []
    for sample in samples:
        logprob = plain_logprobs(model, sample.prompt_ids, sample.response_ids, SAMPLING).sum()
        s = torch.exp((logprob - sample.behaviour_logprob) / sample.source_length)
        losses.append(-torch.min(s * sample.advantage, s.clamp(1 - low, 1 + high) * sample.advantage))
    return torch.stack(losses).mean()


class PlainAdamW:
    """AdamW with gradient clipping, as its paper writes it."""

    def __init__(
        self, model, lr: float, betas: tuple[float, float], weight_decay: float, max_norm: float
    ) -> None:
        self.parameters = list(model.parameters())
        self.lr, self.betas, self.weight_decay, self.max_norm = lr, betas, weight_decay, max_norm
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0

    def step(self, loss: Tensor) -> float:
        """Make one update; return the gradient norm before clipping."""
        gradients = torch.autograd.grad(loss, self.parameters)
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
        shrink = min(1.0, self.max_norm / (norm + 1e-6))
        self.steps += 1
        b1, b2 = self.betas
        with torch.no_grad():
            for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
                g = g * shrink
                m.mul_(b1).add_(g, alpha=1 - b1)
                v.mul_(b2).add_(g * g, alpha=1 - b2)
                m_hat, v_hat = m / (1 - b1**self.steps), v / (1 - b2**self.steps)
                p.mul_(1 - self.lr * self.weight_decay)
                p.sub_(self.lr * m_hat / (v_hat.sqrt() + 1e-8))
        return norm


def weights(agent: Agent) -> dict[str, Tensor]:
    """Return a copy of all weights."""
    return {name: value.clone() for name, value in agent.model.state_dict().items()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference over all weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def gradients(agent: Agent) -> list[Tensor]:
    """Return the last update's gradients, after clipping."""
    return [parameter.grad.clone() for parameter in agent.model.parameters()]


def gradients_of(agent: Agent, loss: Callable[[], Tensor]) -> list[Tensor]:
    """Return the gradients of an independently written loss."""
    return list(torch.autograd.grad(loss(), list(agent.model.parameters())))
