"""The library against a plain-Python implementation written from the paper, on random prompts."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from hacrl.algorithms.advantage import Normaliser
from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.methods import Method, make_method
from hacrl.config.schema import HacpoSettings

from . import independent
from .batches import Row, make_batch

TRACKER_OPTIONS = ("window", "floor", "ratio_min", "ratio_max", "measure")


@dataclass
class Case:
    """One prompt of one learner: everything both implementations take."""

    learner: str
    history: list[dict[str, list[float]]]
    rewards: dict[str, list[float]]
    responses: dict[str, list[dict]]
    updates_done: int
    options: dict


def random_options(rng: random.Random) -> dict:
    return {
        # capability
        "window": rng.randint(1, 4),
        "floor": rng.choice([1e-8, 0.05]),
        "ratio_min": rng.choice([0.1, 0.7]),
        "ratio_max": rng.choice([10.0, 1.4]),
        "measure": rng.choice(["mean_reward", "positive_share"]),
        # advantage
        "unbiased": rng.random() < 0.5,
        "epsilon": rng.choice([0.0, 1e-6, 0.3]),
        "capability_baseline": rng.random() < 0.7,
        "cross_baseline": rng.choice(["source", "learner"]),
        "baseline_overshoot": rng.choice(["own_mean", "keep"]),
        "max_reward": rng.choice([1.0, 0.6]),
        "discrepancy": rng.random() < 0.7,
        # loss
        "clip_low": rng.choice([0.0003, 0.1]),
        "clip_high": rng.choice([0.0004, 0.15]),
        "kl_coefficient": rng.choice([0.0, 0.2]),
        "ratio_length": rng.choice(["source", "own"]),
        "alpha": rng.choice([0.0, 1.0, 2.5, 3.0]),
        "cross_clip": rng.random() < 0.75,
        "delta": rng.choice([0.2, 0.1, 0.4]),
        "delta_step": rng.choice([0.0, 0.01, 0.025]),
        "cross_upper": rng.choice([1.0, 1.05]),
    }


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    agents = [f"agent{index}" for index in range(rng.randint(1, 4))]
    learner = rng.choice(agents)
    skill = {agent: rng.choice([0.0, 0.2, 0.5, 0.9]) for agent in agents}

    def reward(agent: str) -> float:
        success = float(rng.random() < skill[agent])
        return rng.choice([success, success, 0.5 * success, -0.25])

    history = [
        {agent: [reward(agent) for _ in range(rng.randint(2, 6))] for agent in agents}
        for _ in range(rng.randint(1, 6))
    ]
    rewards = {agent: [reward(agent) for _ in range(rng.randint(1, 5))] for agent in agents}
    options = random_options(rng)

    def response(agent: str) -> dict:
        tokens = rng.randint(1, 4)
        source_length = tokens if agent == learner else rng.randint(1, 5)
        logprobs = [-rng.uniform(0.2, 2.0) for _ in range(tokens)]
        mean = sum(logprobs) / tokens
        # a shift per source token, so that s falls below, into and above every clip interval
        shift = rng.uniform(-0.1, 0.1) if agent == learner else rng.uniform(-0.2, 0.5)
        own_mean = options["ratio_length"] == "own"
        source_mean = (mean if own_mean else sum(logprobs) / source_length) + shift
        return {
            "logprobs": logprobs,
            "source_logprob": source_mean * source_length,
            "source_length": source_length,
            "reference": [value + rng.uniform(-0.6, 0.6) for value in logprobs],
        }

    responses = {agent: [response(agent) for _ in rewards[agent]] for agent in agents}
    return Case(learner, history, rewards, responses, rng.randint(0, 3), options)


def method_of(options: dict) -> Method:
    taken = {key: value for key, value in options.items() if key not in TRACKER_OPTIONS}
    normaliser = Normaliser(unbiased=taken.pop("unbiased"), epsilon=taken.pop("epsilon"))
    settings = HacpoSettings(reward_range=(0.0, taken.pop("max_reward")), **taken)
    return make_method(settings, normaliser=normaliser)


def tracker_of(case: Case) -> CapabilityTracker:
    tracker = CapabilityTracker(list(case.rewards), **{key: case.options[key] for key in TRACKER_OPTIONS})
    for step in case.history:
        tracker.record(step)
    return tracker


def library_objective(case: Case) -> tuple[float, dict[tuple[str, int], list[float]]]:
    """J(k) from the library, and its gradient for every token of every response (source, i)."""
    tracker, method = tracker_of(case), method_of(case.options)
    advantages = method.advantages(case.rewards, case.learner, tracker.ratio)
    places = [(source, i) for source, group in case.responses.items() for i in range(len(group))]
    rows = [
        Row(
            case.responses[source][i]["logprobs"],
            case.responses[source][i]["source_logprob"],
            advantages[source][i],
            source == case.learner,
            case.responses[source][i]["source_length"],
            case.responses[source][i]["reference"],
        )
        for source, i in places
    ]
    batch = make_batch(rows, updates_done=case.updates_done)
    objective_B = -method.loss(batch).loss_B
    total = objective_B[batch.is_own_B].mean()
    if not batch.is_own_B.all():
        total = total + objective_B[~batch.is_own_B].mean()
    (grad,) = torch.autograd.grad(total, batch.logprobs_BT)
    return total.item(), {place: grad[b].tolist() for b, place in enumerate(places)}


def independent_objective(case: Case, stopped=None) -> float:
    capability = independent.capabilities(case.history, case.options)
    return independent.objective(
        case.learner, case.rewards, capability, case.responses, case.updates_done, case.options, stopped
    )


def test_capability_ratios() -> None:
    for seed in range(100):
        case = random_case(seed)
        tracker = tracker_of(case)
        capability = independent.capabilities(case.history, case.options)
        for k, j in itertools.product(case.rewards, repeat=2):
            expected = independent.omega(k, j, capability, case.options)
            assert tracker.ratio(k, j) == pytest.approx(expected, rel=1e-12)


def test_advantages() -> None:
    for seed in range(300):
        case = random_case(seed)
        capability = independent.capabilities(case.history, case.options)

        def ratio(k: str, j: str, capability=capability, options=case.options) -> float:
            return independent.omega(k, j, capability, options)

        got = method_of(case.options).advantages(case.rewards, case.learner, ratio)
        for source, values in case.rewards.items():
            expected = [
                independent.advantage(case.learner, source, i, case.rewards, capability, case.options)
                for i in range(len(values))
            ]
            assert got[source] == pytest.approx(expected, rel=1e-10, abs=1e-12), f"seed {seed}"


def test_objective() -> None:
    for seed in range(300):
        case = random_case(seed)
        expected = independent_objective(case)
        assert library_objective(case)[0] == pytest.approx(expected, rel=1e-10, abs=1e-12), f"seed {seed}"


def test_gradient_against_central_differences() -> None:
    step, nonzero, zero = 1e-6, 0, 0
    for seed in range(60):
        case = random_case(seed)
        _, gradients = library_objective(case)
        stopped = {
            (source, i): independent.stopped_factor(response, case.updates_done, case.options)
            for source, group in case.responses.items()
            for i, response in enumerate(group)
        }
        for (source, i), gradient in gradients.items():
            logprobs = case.responses[source][i]["logprobs"]
            for t, centre in enumerate(logprobs):
                logprobs[t] = centre + step
                above = independent_objective(case, stopped)
                logprobs[t] = centre - step
                below = independent_objective(case, stopped)
                logprobs[t] = centre
                expected = (above - below) / (2 * step)
                assert gradient[t] == pytest.approx(expected, rel=1e-5, abs=1e-7), f"seed {seed}"
                nonzero, zero = nonzero + (abs(expected) > 1e-6), zero + (expected == 0.0)
            assert gradient[len(logprobs) :] == [0.0] * (len(gradient) - len(logprobs))
    assert nonzero > 300  # the comparison must not be one of zeros
    assert zero > 300  # and must have clipped responses in it
