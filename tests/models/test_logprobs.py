"""One padded forward pass against one plain forward pass per sequence."""

from __future__ import annotations

import pytest
import torch

from hacrl.models.agent import Agent
from hacrl.models.logprobs import response_logprobs
from hacrl.types import Sampling
from tests.support.forward import plain_logprobs
from tests.support.tiny import absolute_agent, char_agent, pair_agent, sharpened

CPU = torch.device("cpu")
PAIRS = [  # prompts and responses, short and long in every combination
    ((5, 6, 7), (8, 9, 10, 11, 1)),
    ((5,), (8,)),
    ((4, 5, 6, 7, 8, 9, 10), (11, 1)),
    ((9, 3), (4, 4, 4, 12, 13, 14, 15, 16)),
    ((4, 5, 6, 7, 8, 9, 10), (3, 12, 20, 21, 5, 6, 7, 8, 1)),
]


@pytest.fixture(params=[char_agent, pair_agent, absolute_agent])
def agent(request: pytest.FixtureRequest) -> Agent:
    return sharpened(request.param())


@pytest.mark.parametrize("sampling", [Sampling(8), Sampling(8, temperature=0.6), Sampling(8, 1.7)])
def test_equals_one_plain_forward_pass_per_sequence(agent: Agent, sampling: Sampling) -> None:
    logprobs_BT, mask_BT = response_logprobs(agent.model, PAIRS, sampling, CPU)
    for row, (prompt, response) in enumerate(PAIRS):
        expected = plain_logprobs(agent.model, prompt, response, sampling)
        torch.testing.assert_close(logprobs_BT[row, : len(response)], expected, atol=2e-5, rtol=1e-5)
        assert mask_BT[row].tolist() == [True] * len(response) + [False] * (9 - len(response))
        assert logprobs_BT[row, len(response) :].tolist() == [0.0] * (9 - len(response))


def test_padding_and_other_rows_do_not_leak(agent: Agent) -> None:
    together, _ = response_logprobs(agent.model, PAIRS, Sampling(8), CPU)
    others = [PAIRS[0], ((3,) * 20, (7,) * 25), ((3,), (7, 7))]
    among_others, _ = response_logprobs(agent.model, others, Sampling(8), CPU)
    alone, _ = response_logprobs(agent.model, PAIRS[:1], Sampling(8), CPU)
    torch.testing.assert_close(together[0, :5], alone[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(among_others[0, :5], alone[0], atol=2e-5, rtol=1e-5)


def gradients(agent: Agent, total: torch.Tensor) -> list[torch.Tensor]:
    parameters = list(agent.model.parameters())
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def test_gradient_is_that_of_the_response_tokens_alone(agent: Agent) -> None:
    sampling = Sampling(8, temperature=1.3)
    logprobs_BT, _ = response_logprobs(agent.model, PAIRS, sampling, CPU)
    single = sum(plain_logprobs(agent.model, prompt, response, sampling).sum() for prompt, response in PAIRS)
    actual, expected = gradients(agent, logprobs_BT.sum()), gradients(agent, single)
    scale = max(g.abs().max().item() for g in expected)
    assert scale > 0.1
    for mine, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5 * scale, rtol=1e-4)


def test_a_token_outside_the_top_k_still_has_a_probability(agent: Agent) -> None:
    """After an update a learner must not give -inf to earlier samples."""
    prompt = (5, 6, 7)
    logits = agent.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    logprobs_BT, _ = response_logprobs(agent.model, [(prompt, (worst,))], Sampling(1, top_k=1), CPU)
    # a support of two: log(e^w / (e^w + e^b)) = -log(1 + e^(b - w))
    expected = -torch.log1p((logits[best] - logits[worst]).exp())
    torch.testing.assert_close(logprobs_BT[0, 0], expected, atol=1e-4, rtol=1e-4)
