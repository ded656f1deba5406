"""The HACPO objective of one learner for one prompt, in plain Python with loops.

Written from the paper's formulas as noted in ``paper.md``, not from the library, and kept naive on
purpose: no tensors, no shared helpers, every sum spelt out. ``options`` is a dict named like the table
of choices (``alpha``, ``delta``, ``cross_baseline``, ...). Only the standard library is used.
"""

from __future__ import annotations

import math


def capabilities(history: list[dict[str, list[float]]], options: dict) -> dict[str, float]:
    """Eq. 8: P_k of every agent from all steps' rewards so far, oldest step first."""
    result = {}
    for agent in history[0]:
        total = 0.0
        recent = history[-options["window"] :]
        for step in recent:
            step_sum = 0.0
            for reward in step[agent]:
                if options["measure"] == "positive_share":
                    step_sum += 1.0 if reward > 0 else 0.0
                else:
                    step_sum += reward
            step_capability = step_sum / len(step[agent])
            if step_capability < options["floor"]:
                step_capability = options["floor"]
            total += step_capability
        result[agent] = total / len(recent)
    return result


def omega(k: str, j: str, capability: dict[str, float], options: dict) -> float:
    """Eq. 9: P_k / P_j, kept within its range."""
    value = capability[k] / capability[j]
    if value < options["ratio_min"]:
        return options["ratio_min"]
    if value > options["ratio_max"]:
        return options["ratio_max"]
    return value


def baseline(k: str, rewards: dict[str, list[float]], capability: dict[str, float], options: dict) -> float:
    """Eq. 6: mu_k; every agent's mean counts equally."""
    total = 0.0
    for j in rewards:
        w = omega(k, j, capability, options) if options["capability_baseline"] else 1.0
        for reward in rewards[j]:
            total += w * reward / len(rewards[j])
    mu = total / len(rewards)
    if mu > options["max_reward"] and options["baseline_overshoot"] == "own_mean":
        mu = 0.0
        for reward in rewards[k]:
            mu += reward / len(rewards[k])
    return mu


def advantage(
    k: str, j: str, i: int, rewards: dict[str, list[float]], capability: dict[str, float], options: dict
) -> float:
    """Eq. 7 and 10: what response i of source j is worth to learner k."""
    everything = []
    for agent in rewards:
        for reward in rewards[agent]:
            everything.append(reward)
    if all(reward == everything[0] for reward in everything):
        return 0.0
    mean = sum(everything) / len(everything)
    squares = 0.0
    for reward in everything:
        squares += (reward - mean) * (reward - mean)
    sigma = math.sqrt(squares / (len(everything) - (1 if options["unbiased"] else 0)))
    judge = k if options["cross_baseline"] == "learner" else j
    value = (rewards[j][i] - baseline(judge, rewards, capability, options)) / (sigma + options["epsilon"])
    if j != k and options["discrepancy"]:
        value = omega(j, k, capability, options) * value
    return value


def ratio(response: dict, options: dict) -> float:
    """Eq. 11: s. A response holds the learner's ``logprobs``, ``source_logprob`` and ``source_length``."""
    learner = 0.0
    for logprob in response["logprobs"]:
        learner += logprob
    if options["ratio_length"] == "own":
        return math.exp(
            learner / len(response["logprobs"]) - response["source_logprob"] / response["source_length"]
        )
    return math.exp((learner - response["source_logprob"]) / response["source_length"])


def cross_clip(s: float, updates_done: int, options: dict) -> float:
    """Eq. 13, 14."""
    if not options["cross_clip"]:
        return s
    low = 1.0 - options["delta"] + updates_done * options["delta_step"]
    return min(max(s, low), options["cross_upper"])


def stopped_factor(response: dict, updates_done: int, options: dict) -> float:
    """Eq. 12: the factor under the stop-gradient."""
    s = ratio(response, options)
    return cross_clip(s, updates_done, options) ** options["alpha"]


def response_objective(
    is_own: bool, response: dict, value: float, updates_done: int, options: dict, stopped: float | None = None
) -> float:
    """Eq. 47-53 for one response of advantage ``value``. ``stopped`` holds the stopped factor fixed."""
    s = ratio(response, options)
    if not is_own:
        factor = stopped_factor(response, updates_done, options) if stopped is None else stopped
        return cross_clip(s, updates_done, options) * factor * value
    clipped = min(max(s, 1.0 - options["clip_low"]), 1.0 + options["clip_high"])
    objective = min(s * value, clipped * value)
    if options["kl_coefficient"] > 0:
        penalty = 0.0
        for logprob, reference in zip(response["logprobs"], response["reference"], strict=True):
            r = math.exp(reference - logprob)
            penalty += r - math.log(r) - 1.0
        objective -= options["kl_coefficient"] * penalty / len(response["logprobs"])
    return objective


def objective(
    k: str,
    rewards: dict[str, list[float]],
    capability: dict[str, float],
    responses: dict[str, list[dict]],
    updates_done: int,
    options: dict,
    stopped: dict[tuple[str, int], float] | None = None,
) -> float:
    """J(k) = J_homo + J_hete, each a mean over its responses."""
    total_own, count_own, total_cross, count_cross = 0.0, 0, 0.0, 0
    for j in responses:
        for i, response in enumerate(responses[j]):
            value = advantage(k, j, i, rewards, capability, options)
            held = None if stopped is None else stopped[(j, i)]
            term = response_objective(j == k, response, value, updates_done, options, held)
            if j == k:
                total_own, count_own = total_own + term, count_own + 1
            else:
                total_cross, count_cross = total_cross + term, count_cross + 1
    return total_own / count_own + (total_cross / count_cross if count_cross else 0.0)
