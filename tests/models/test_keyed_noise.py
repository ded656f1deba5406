"""Noise by hashing: the published hash functions, the exponential distribution, and nothing of the batch."""

from __future__ import annotations

import math

import torch

from hacrl.models.keyed_noise import exponential_noise, token_keys
from hacrl.models.sampling import draw
from hacrl.types import Sampling

M64, M32 = 2**64 - 1, 2**32 - 1


def splitmix64(seed: int, position: int) -> int:
    """In whole numbers: the output of the generator after ``position`` + 1 steps."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def noise_of(key: int, token: int) -> float:
    """In whole numbers up to the logarithm."""
    bits = ((key & M32) + token * 0x9E3779B9) & M32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & M32
    bits ^= bits >> 15
    bits = ((bits ^ (key >> 32)) * 0x846CA68B) & M32
    bits ^= bits >> 16
    return -math.log1p(-((bits & 0x7FFFFFFF) + 0.5) / 2**31)


def test_keys_are_splitmix64() -> None:
    # Seed 0: the first outputs of the published generator.
    assert [splitmix64(0, n) for n in range(2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    seeds = [0, 1, 2**62 + 12345, 2**63 - 1]
    for position in (0, 1, 1000):
        found = token_keys(torch.tensor(seeds), position)
        assert [key & M64 for key in found.tolist()] == [splitmix64(seed, position) for seed in seeds]
    several = token_keys(torch.tensor(seeds), torch.tensor([0, 5, 7, 9]))
    expected = [splitmix64(seed, position) for seed, position in zip(seeds, (0, 5, 7, 9), strict=True)]
    assert [key & M64 for key in several.tolist()] == expected


def test_noise_is_that_of_whole_numbers() -> None:
    keys = token_keys(torch.tensor([3, 2**61]), torch.tensor([4, 0]))
    noise = exponential_noise(keys, 1000)
    for row, key in enumerate(keys.tolist()):
        expected = torch.tensor([noise_of(key & M64, token) for token in range(1000)])
        torch.testing.assert_close(noise[row], expected, rtol=1e-4, atol=1e-7)


def test_noise_is_exponentially_distributed_and_independent() -> None:
    noise = exponential_noise(token_keys(torch.arange(64), 3), 16384).double()
    count = noise.numel()
    assert abs(float(noise.mean()) - 1) < 5 / math.sqrt(count)  # standard deviation 1
    assert abs(float(noise.square().mean()) - 2) < 5 * math.sqrt(20 / count)  # E x^2 = 2, Var x^2 = 20
    for quantile in (1e-4, 0.01, 0.5, 0.99):
        share = float((noise < -math.log1p(-quantile)).double().mean())
        assert abs(share - quantile) < 5 * math.sqrt(quantile * (1 - quantile) / count)
    centred = noise - 1
    for one, other in (
        (centred[:, 1:], centred[:, :-1]),  # neighbouring tokens
        (centred[1:], centred[:-1]),  # neighbouring seeds
        (centred, exponential_noise(token_keys(torch.arange(64), 4), 16384).double() - 1),  # next position
    ):
        assert abs(float((one * other).mean())) < 5 / math.sqrt(one.numel())
    assert not torch.equal(noise[0], noise[1])


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, seeds = torch.randn(6, 50), torch.arange(6) * 7
    keys = token_keys(seeds, 2)
    token_ids, logprobs = draw(logits, Sampling(1), torch.Generator(), keys)
    for row in range(6):
        alone = draw(logits[row : row + 1], Sampling(1), torch.Generator(), keys[row : row + 1])
        assert (alone[0].item(), alone[1].item()) == (token_ids[row].item(), logprobs[row].item())


def test_tokens_are_as_frequent_as_they_are_likely() -> None:
    draws, sampling = 40_000, Sampling(1, temperature=0.7, top_k=6)
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -9.0]])
    likely = (logits[0, :6] / 0.7).softmax(0)
    token_ids, _ = draw(
        logits.expand(draws, 7), sampling, torch.Generator(), token_keys(torch.arange(draws), 0)
    )
    counts = token_ids.bincount(minlength=7)
    assert counts[6] == 0
    for token, p in enumerate(likely.tolist()):
        assert abs(int(counts[token]) - draws * p) < 5 * math.sqrt(draws * p * (1 - p))
