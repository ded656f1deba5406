"""Bytes that a step moves on a cluster, by formula, for the placements of docs/scaling.md.

    python benchmarks/cluster_volumes.py

n agents give T = prompts x responses x mean length tokens each, and a learner learns from
T' = T x (1 + others' responses that are learnt / own responses). W weights, R ranks, M tokens of a rank's
micro-batch. docs/scaling.md has the formulas as a table; the constants are measured (``cluster_costs.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from cluster_costs import Costs, Lengths, Plan, micro_batch_tokens
from cluster_run import Sharing
from simulate_cluster import placements

LOG_BYTES = 38.3  # of a token in the rollout log (benchmarks/record_traffic.py)
LEARNT_BYTES = 8.6, 14.9  # of a token in the learnt log: the source's tokens, another tokenizer's
MOMENTS = 12  # bytes per trained weight in a checkpoint: master and two moments in float32


@dataclass(frozen=True)
class Volumes:
    """Bytes of a step of all agents, unless said otherwise."""

    collected: float  # rollouts, from the agents to the driver
    fetched: float  # rollouts, by all learners together
    log: float
    learnt_log: float
    driver_seconds: float  # of one core
    gathered: float  # by one rank of the agent with the most
    weights: float  # to the engines
    checkpoint: float  # to the driver, when it writes one


def mean_length(lengths: Lengths) -> float:
    """Return the mean of a lognormal that is cut at the longest response."""
    if lengths.sigma == 0:
        return min(lengths.median, lengths.longest)
    normal, spread = NormalDist(), lengths.sigma
    place = math.log(lengths.longest / lengths.median) / spread
    below = lengths.median * math.exp(spread * spread / 2) * normal.cdf(place - spread)
    return below + lengths.longest * (1 - normal.cdf(place))


def volumes(plans: Sequence[Plan], sharing: Sharing | None = None, costs: Costs | None = None) -> Volumes:
    """Return what a step moves."""
    sharing, costs = sharing or Sharing(), costs or Costs()
    tokens = {plan.name: plan.prompts * plan.responses * mean_length(plan.lengths) for plan in plans}
    collected = sum(tokens.values())
    learnt, learnt_log, gathered = 0.0, 0.0, 0.0
    for plan in plans:
        others = [other for other in plans if other is not plan] if sharing.cross else []
        responses = sum(other.responses for other in others)
        share = min(1.0, sharing.cap / responses) if sharing.cap is not None and responses else 1.0
        foreign = sum(tokens[other.name] for other in others if other.tokenizer != plan.tokenizer)
        own = tokens[plan.name] + share * (sum(tokens[other.name] for other in others) - foreign)
        learnt += own + share * foreign
        learnt_log += LEARNT_BYTES[0] * own + LEARNT_BYTES[1] * share * foreign
        micro_batch = plan.ranks * (plan.micro_batch or micro_batch_tokens(plan.model.parameters))
        computed = own + share * foreign + plan.prompts * plan.prompt_tokens
        passes = max(plan.updates, math.ceil(computed / micro_batch))
        one_pass = 8 * plan.model.parameters * (plan.ranks - 1) / plan.ranks
        gathered = max(gathered, passes * one_pass)
    per_rollout = costs.record_get + costs.log_write + costs.record_put
    return Volumes(
        collected=costs.record_bytes * collected,
        fetched=costs.record_bytes * collected * len(plans),
        log=LOG_BYTES * collected,
        learnt_log=learnt_log,
        driver_seconds=per_rollout * collected + (costs.record_get + costs.learnt_write) * learnt,
        gathered=gathered,
        weights=sum(2 * plan.model.parameters * plan.engines for plan in plans),
        checkpoint=sum(MOMENTS * plan.model.parameters for plan in plans),
    )


def main() -> None:
    """Print the table."""
    print(
        f"{'GB a step':42s}{'collected':>10s}{'fetched':>10s}{'log':>8s}{'learnt':>8s}{'driver, s':>11s}"
        f"{'gathered':>10s}{'weights':>9s}{'checkpoint':>12s}"
    )
    for name, (plans, sharing) in placements().items():
        one = volumes(plans, sharing)
        print(
            f"{name:42s}{one.collected / 1e9:10.3f}{one.fetched / 1e9:10.2f}{one.log / 1e9:8.2f}"
            f"{one.learnt_log / 1e9:8.2f}{one.driver_seconds:11.1f}{one.gathered / 1e9:10.0f}"
            f"{one.weights / 1e9:9.0f}{one.checkpoint / 1e9:12.0f}"
        )


if __name__ == "__main__":
    main()
