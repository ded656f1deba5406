"""Theorem 4.1 by simulation: E[mu_k] is agent k's own expected reward, if omega does not depend on the batch.

What the theorem does and does not say, as these tests show:

- With fixed capability ratios equal to the ratios of expected rewards, mu_k has the right mean, however
  many responses each agent gives. Without the ratios (omega = 1) it has the mean of all agents.
- If difficulty scales all agents' chances by the same factor (probabilities proportional across agents),
  this holds at every difficulty. If it does not, e.g. when two agents of equal capability are good at
  different prompts, omega cannot know: mu_k still has the right mean over all prompts, but on each kind
  of prompt it is off, here by 0.4 of 0.9. It is then an average, not a prompt's, baseline.
- The default of replacing a baseline above the largest reward by the agent's own mean cuts off one side
  of mu_k's distribution, so for a strong agent the mean falls below the theorem's. The theorem is about
  ``overshoot="keep"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hacrl.algorithms.advantage import (
    capability_aware_baseline,
    equal_capability,
    ratio_of_sums_baseline,
)
from hacrl.algorithms.capability import FLOOR, RATIO_MAX, RATIO_MIN, Capabilities

Z_999 = 3.2905  # two-sided 99.9% of the normal distribution
PROMPTS = 8_000


def ratio_of(expected: dict[str, float]) -> Callable[[str, str], float]:
    return lambda k, j: expected[k] / expected[j]


def simulate(
    rng: np.random.Generator,
    chances: dict[str, np.ndarray],
    responses: dict[str, int],
    learner: str,
    ratio: Callable[[str, str], float],
    overshoot: str = "keep",
) -> np.ndarray:
    """mu_k of every prompt; ``chances`` holds each agent's success probability per prompt."""
    drawn = {
        agent: (rng.random((len(p), responses[agent])) < p[:, None]).astype(float).tolist()
        for agent, p in chances.items()
    }
    number = len(chances[learner])
    return np.array(
        [
            capability_aware_baseline({agent: drawn[agent][i] for agent in drawn}, learner, ratio, overshoot)
            for i in range(number)
        ]
    )


def half_width(values: np.ndarray) -> float:
    """Half the 99.9% confidence interval of the mean."""
    return Z_999 * values.std(ddof=1) / math.sqrt(len(values))


CHANCE = {"strong": 0.7, "middle": 0.35, "weak": 0.1}


@pytest.mark.parametrize(
    "responses",
    [
        {"strong": 8, "middle": 8, "weak": 8},
        {"strong": 2, "middle": 9, "weak": 4},
        {"strong": 16, "middle": 1, "weak": 1},
    ],
)
@pytest.mark.parametrize("learner", list(CHANCE))
def test_baseline_is_the_agents_own_expected_reward(responses: dict[str, int], learner: str) -> None:
    rng = np.random.default_rng([41, responses["strong"], list(CHANCE).index(learner)])
    chances = {agent: np.full(PROMPTS, p) for agent, p in CHANCE.items()}
    values = simulate(rng, chances, responses, learner, ratio_of(CHANCE))
    assert abs(values.mean() - CHANCE[learner]) < half_width(values)
    # a wrong ratio must not pass for lack of data: the interval is a small part of the expected reward
    assert half_width(values) < 0.1 * CHANCE[learner]


@pytest.mark.parametrize("learner", list(CHANCE))
def test_without_the_capability_ratio_it_is_the_mean_of_all(learner: str) -> None:
    rng = np.random.default_rng(42)
    chances = {agent: np.full(PROMPTS, p) for agent, p in CHANCE.items()}
    values = simulate(rng, chances, dict.fromkeys(CHANCE, 8), learner, equal_capability)
    # (0.7 + 0.35 + 0.1) / 3 = 0.3833: off by 0.317, 0.033 and 0.283
    mean_of_all = 1.15 / 3
    assert abs(values.mean() - mean_of_all) < half_width(values)
    assert abs(values.mean() - CHANCE[learner]) > 8 * half_width(values)


SCALE = {"strong": 0.9, "middle": 0.45, "weak": 0.15}


@pytest.mark.parametrize("learner", list(SCALE))
def test_proportional_chances_are_right_at_every_difficulty(learner: str) -> None:
    rng = np.random.default_rng(43)
    ease = rng.random(PROMPTS)  # P(success) = scale * ease: harder for all by the same factor
    chances = {agent: scale * ease for agent, scale in SCALE.items()}
    responses = {"strong": 4, "middle": 8, "weak": 6}
    values = simulate(rng, chances, responses, learner, ratio_of(SCALE))
    for part in (ease < 1 / 3, (ease >= 1 / 3) & (ease < 2 / 3), ease >= 2 / 3, ease >= 0.0):
        error = values[part] - chances[learner][part]
        assert abs(error.mean()) < half_width(error)
    # omega = 1: everywhere the mean of all, 0.5 * ease, instead of the learner's
    plain = simulate(rng, chances, responses, learner, equal_capability) - chances[learner]
    assert abs(plain.mean() - (0.5 - SCALE[learner]) * ease.mean()) < half_width(plain)
    assert abs(plain.mean()) > 5 * half_width(plain)


def test_different_strengths_are_right_on_average_only() -> None:
    rng = np.random.default_rng(44)
    kind = np.arange(PROMPTS) % 2 == 0
    # equal capability 0.5, so omega = 1; one is good at even prompts, the other at odd ones
    chances = {"even": np.where(kind, 0.9, 0.1), "odd": np.where(kind, 0.1, 0.9)}
    values = simulate(rng, chances, {"even": 8, "odd": 8}, "even", ratio_of({"even": 0.5, "odd": 0.5}))
    assert abs(values.mean() - 0.5) < half_width(values)
    # on even prompts (0.9 + 0.1) / 2 = 0.5 where the agent's own chance is 0.9
    assert abs(values[kind].mean() - 0.5) < half_width(values[kind])
    assert abs((values[kind] - chances["even"][kind]).mean() + 0.4) < half_width(values[kind])


def test_falling_back_to_the_own_mean_is_biased() -> None:
    # p = 0.9 and 0.3, omega(a, b) = 3, G = 2, mu = (m_a + 3 m_b) / 2:
    #   m_b = 0 (.49): m_a / 2, mean 0.45
    #   m_b = 1/2 (.42): m_a = 0 (.01): 0.75; 1/2 (.18): 1, kept; 1 (.81): 1.25 -> own mean 1.   mean 0.9975
    #   m_b = 1 (.09): at least 1.5 -> own mean, mean 0.9
    # E = .49 * .45 + .42 * .9975 + .09 * .9 = 0.72045, below 0.9
    chance = {"a": 0.9, "b": 0.3}
    chances = {agent: np.full(PROMPTS, p) for agent, p in chance.items()}
    responses = {"a": 2, "b": 2}
    kept = simulate(np.random.default_rng(45), chances, responses, "a", ratio_of(chance))
    replaced = simulate(np.random.default_rng(45), chances, responses, "a", ratio_of(chance), "own_mean")
    assert abs(kept.mean() - 0.9) < half_width(kept)
    assert abs(replaced.mean() - 0.72045) < half_width(replaced)


# Success rates of the learner and of its partner, and E[mu] of the paper's baseline, clamp included:
# (p_k + omega * p_j) / 2 with omega = p_k / p_j, at least 0.1 and at most 10.
EXTREMES = [
    (0.7, 0.0, 0.35),  # omega = 10: (0.7 + 0) / 2, half of what it should be
    (0.7, 0.01, 0.4),  # omega = 70, clamped to 10: (0.7 + 0.1) / 2
    (0.7, 1.0, 0.7),
    (0.0, 0.7, 0.035),  # omega = 0.1: (0 + 0.07) / 2
    (0.01, 0.7, 0.04),  # omega = 1/70, clamped to 0.1: (0.01 + 0.07) / 2
    (1.0, 0.7, 1.0),
    (1.0, 0.0, 0.5),
    (0.01, 0.01, 0.01),
    (0.0, 0.0, 0.0),  # capabilities are floored: omega = 1
]


@pytest.mark.parametrize(("own", "partner", "of_the_paper"), EXTREMES)
def test_both_baselines_at_extreme_capabilities(own: float, partner: float, of_the_paper: float) -> None:
    rng = np.random.default_rng([46, int(100 * own), int(100 * partner)])
    chance = {"a": own, "b": partner}
    capabilities = {agent: max(p, FLOOR) for agent, p in chance.items()}
    drawn = {agent: (rng.random((PROMPTS, 8)) < p).astype(float).tolist() for agent, p in chance.items()}
    prompts = [{agent: drawn[agent][i] for agent in drawn} for i in range(PROMPTS)]

    sums = np.array([ratio_of_sums_baseline(rewards, "a", capabilities) for rewards in prompts])
    assert abs(sums.mean() - own) <= half_width(sums) + 1e-6  # the floor's share

    ratio = Capabilities(capabilities, RATIO_MIN, RATIO_MAX).ratio
    paper = np.array([capability_aware_baseline(rewards, "a", ratio, "keep") for rewards in prompts])
    assert abs(paper.mean() - of_the_paper) <= half_width(paper) + 1e-6
    if of_the_paper != own:
        assert abs(paper.mean() - own) > 5 * half_width(paper)  # the test can tell
