"""The corrected gradient in expectation: all responses of a tiny policy, enumerated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GrpoSettings, GspoSettings, HacpoSettings, NaiveSettings
from hacrl.types import LossBatch

STOP = 2
# Two letters and a stop, two tokens at most: these are all responses there are.
RESPONSES = [(STOP,), (0, 0), (0, 1), (0, STOP), (1, 0), (1, 1), (1, STOP)]
ADVANTAGES = [0.9, -1.1, 0.4, 2.0, -0.6, 1.3, -1.7]
SINGLE = [(0,), (1,), (STOP,)]  # all there are of one token


@dataclass(frozen=True)
class Policy:
    """Logits of the first token (row 2) and of the second after each letter (rows 0 and 1)."""

    logits: Tensor

    def logprobs(self, response: tuple[int, ...]) -> Tensor:
        """Per token."""
        befores = (2, *response[:-1])
        rows = torch.log_softmax(self.logits, dim=-1)
        return torch.stack([rows[before, token] for before, token in zip(befores, response, strict=True)])


def policies() -> tuple[Policy, Policy]:
    """The learner's, whose logits are the parameters, and the sampler's, which is rather far from it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
    return Policy(logits.requires_grad_()), Policy((logits + noise).detach())


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def batch_of(learner: Policy, responses: list[tuple[int, ...]], advantages: list[float]) -> LossBatch:
    logprobs = padded([learner.logprobs(response) for response in responses])
    lengths = torch.tensor([len(response) for response in responses])
    return LossBatch(
        logprobs_BT=logprobs,
        mask_BT=torch.arange(logprobs.shape[1]) < lengths.unsqueeze(-1),
        behaviour_logprobs_BT=logprobs.detach(),
        behaviour_logprob_B=logprobs.detach().sum(dim=-1),
        source_length_B=lengths.double(),
        advantages_B=torch.tensor(advantages, dtype=torch.float64),
        is_own_B=torch.ones(len(responses), dtype=torch.bool),
        updates_done=0,
    )


def expected_gradient(learner: Policy, batch: LossBatch, probabilities_B: Tensor, settings) -> Tensor:
    """Of the mean loss when responses come with these probabilities."""
    loss = (probabilities_B * make_method(settings).loss(batch).loss_B).sum()
    return torch.autograd.grad(loss, learner.logits, retain_graph=True)[0]


def on_policy_gradient(learner: Policy, responses: list[tuple[int, ...]], advantages: list[float]) -> Tensor:
    """- E_old[ A(y) / |y| * grad log pi(y) ], every response by itself."""
    total = torch.zeros_like(learner.logits)
    for response, advantage in zip(responses, advantages, strict=True):
        logprob = learner.logprobs(response).sum()
        (score,) = torch.autograd.grad(logprob, learner.logits)
        total -= logprob.detach().exp() * advantage / len(response) * score
    return total


def probabilities(policy: Policy, responses: list[tuple[int, ...]]) -> Tensor:
    chances = torch.stack([policy.logprobs(response).sum().exp() for response in responses]).detach()
    assert float(chances.sum()) == pytest.approx(1.0)  # all there are
    return chances


@pytest.mark.parametrize("settings", [GspoSettings(), NaiveSettings(), HacpoSettings()], ids=lambda s: s.name)
def test_sequence_weights_give_the_on_policy_gradient(settings) -> None:
    learner, sampler = policies()
    target = on_policy_gradient(learner, RESPONSES, ADVANTAGES)
    plain = batch_of(learner, RESPONSES, ADVANTAGES)
    sampled_BT = padded([sampler.logprobs(response) for response in RESPONSES])
    corrected = replace(plain, sampler_logprobs_BT=sampled_BT)
    chances = probabilities(sampler, RESPONSES)
    got = expected_gradient(learner, corrected, chances, settings)
    torch.testing.assert_close(got, target, rtol=1e-12, atol=1e-15)
    # what it would be otherwise: without the weight, and with the weight cut off
    unweighted = expected_gradient(learner, plain, chances, settings)
    truncated = expected_gradient(learner, replace(corrected, mismatch_cap=1.0), chances, settings)
    assert float((unweighted - target).abs().max()) > 0.01
    assert float((truncated - target).abs().max()) > 0.01


def test_token_weights_are_exact_for_one_token_and_not_for_two() -> None:
    learner, sampler = policies()
    for responses, error in ((SINGLE, 0.0), (RESPONSES, 0.01)):
        advantages = ADVANTAGES[: len(responses)]
        target = on_policy_gradient(learner, responses, advantages)
        plain = batch_of(learner, responses, advantages)
        sampled_BT = padded([sampler.logprobs(response) for response in responses])
        corrected = replace(plain, sampler_logprobs_BT=sampled_BT)
        got = expected_gradient(learner, corrected, probabilities(sampler, responses), GrpoSettings())
        difference = float((got - target).abs().max())
        assert difference > error if error else difference < 1e-14
