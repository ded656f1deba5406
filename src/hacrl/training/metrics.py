"""What a run reports: the numbers of every step, and the accuracy of every agent in an evaluation.

Equal runs give equal reports, so reports contain no times.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hacrl.engines.base import SyncReport
from hacrl.rollouts.groups import rewards_that_count
from hacrl.training.asynchronous.staleness import Staleness
from hacrl.training.episode_metrics import EpisodesReport, episodes_report
from hacrl.training.learn_stats import LearnStats
from hacrl.training.learnt import learnt_rollouts
from hacrl.training.samples import LearnerSamples
from hacrl.types import LearntRollout, Verdict, VerifiedRollout


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One agent alone on held-out problems: mean over problems of the mean reward, and its standard error."""

    mean: float
    stderr: float  # over problems: samples of one problem are not independent
    problems: int
    samples: int  # per problem


@dataclass(frozen=True)
class RewardReport:
    """One reward function's values in one step, before weights."""

    mean: float | None  # None: the function applied to no response
    std: float | None  # of a sample: divided by n - 1; None: fewer than two values
    rollouts: int  # that the function applied to


@dataclass(frozen=True)
class RolloutReport:
    """One agent's responses in one step. Rewards are those of responses whose environment did not fail."""

    reward: float  # mean
    verdicts: dict[str, int]
    response_tokens: float  # mean
    stopped: float  # share that ended with a stop token or a stop string
    rollouts: int
    rewards: dict[str, RewardReport] = field(default_factory=dict)  # by reward function
    logged: dict[str, float] = field(default_factory=dict)  # what reward functions gave to log_metric
    tokens: int = 0  # generated in all
    # Estimate of the policy's entropy in nats per token: the mean of -log pi over all sampled tokens. Its
    # expected value is the mean entropy of the distributions that they were drawn from. None: no token
    entropy: float | None = None
    all_right: float = 0.0  # share of prompts whose responses all have the same reward, above the lowest
    all_wrong: float = 0.0  # share of prompts whose responses all have the lowest reward
    replaced: int = 0  # prompts of the step without variance that rollout.resample replaced
    episodes: EpisodesReport | None = None  # None: the task has no environments
    unanswered: int = 0  # responses that an endpoint did not give


@dataclass(frozen=True)
class SourceReport:
    """One source's samples in one learner's updates."""

    used: int  # sample uses over all passes
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    ratio_by_source_length: float  # mean of s = (pi_k / pi_j)^(1/|y|), |y| in the source's tokens (the paper)
    ratio_by_own_length: float  # mean of s from per-token means, each in its own tokens (public code)
    clipped: float  # share without gradient because of clipping
    clipped_below: float  # the part of it whose ratio was below the clip range
    clipped_above: float  # the part of it whose ratio was above the clip range
    gradient: float  # share of the step's gradient: of the sum of |dL/d log pi| over all tokens
    tokens: int = 0  # that the loss saw, counted at every use


@dataclass(frozen=True)
class RetokeniseReport:
    """One source's rollouts of one step that were retokenised for the learner."""

    rollouts: int  # successfully
    round_trip: float  # share of attempts whose tokens decode to the same text
    length_ratio: float  # learner's tokens per source token, mean


@dataclass(frozen=True)
class LearnReport:
    """One learner's updates in one step."""

    updates: int  # made
    loss: float  # mean over the updates made
    grad_norm: float  # mean over the updates made, before clipping
    skipped: int  # zero-advantage samples
    dropped: dict[str, dict[str, int]]  # source -> reason -> rollouts
    # Sampler against learner, both at the weights before the first update, per own token; None: no sample
    sampler_gap: float | None  # mean |difference of log-probabilities|
    sampler_gap_max: float | None
    sampler_kl: float | None  # mean of sampler's - learner's: estimates KL(sampler || learner)
    # Importance weights that correct the difference; None: it was not corrected
    sampler_weight: float | None  # mean weight of own responses
    sampler_capped: float | None  # share of them whose weight was cut down to learning.mismatch_cap
    sources: dict[str, SourceReport]
    retokenised: dict[str, RetokeniseReport]  # by source; only sources with another tokenizer
    bad_updates: int = 0  # left out because their loss or gradient was not finite
    oom_retries: int = 0  # attempts at an update that were repeated because memory ran out
    screened: int = 0  # uses of samples that a forward pass tested for a gradient
    screened_out: int = 0  # those of them without a gradient, which had no backward pass
    learning_rate: float = 0.0  # of the step's updates, after warm-up and schedule
    tokens: int = 0  # that the loss saw, counted at every use
    # KL per token of own responses, at every use of them; None: there was none
    policy_kl: float | None = None  # KL(old policy || policy) within the step
    reference_kl: float | None = None  # KL(policy || reference); also None without a reference
    own_clipped_later: float | None = None  # share of own responses clipped from the second update on
    # cosine between the gradients of own and of others' responses in the step's first update that has both;
    # None: there is none
    gradient_alignment: float | None = None
    baseline: float | None = None  # mu of own responses, mean over prompts; None: the method does not say
    without_signal: float = 0.0  # share of prompts in which every advantage is zero
    # source -> rollouts not learnt from because of learning.max_cross_rollouts
    left_out: dict[str, int] = field(default_factory=dict)
    # Where the method asks for trust, by source: cosine between its gradient and the learner's own at the
    # step's first update, and whether the learner trusted the source in this step (1 or 0).
    alignment: dict[str, float] = field(default_factory=dict)
    trusted: dict[str, int] = field(default_factory=dict)
    probe_tokens: int = 0  # of sources that are not trusted, run to measure their gradients only
    notes: tuple[str, ...] = ()  # sentences for the user; no part of the metrics
    learnt: tuple[LearntRollout, ...] = ()  # for the rollout log; no part of the metrics


NOTHING_LEARNT = LearnReport(  # of a frozen agent
    updates=0,
    loss=0.0,
    grad_norm=0.0,
    skipped=0,
    dropped={},
    sampler_gap=None,
    sampler_gap_max=None,
    sampler_kl=None,
    sampler_weight=None,
    sampler_capped=None,
    sources={},
    retokenised={},
)


@dataclass(frozen=True)
class AsynchronousReport:
    """What an asynchronous run adds to one learner's step."""

    staleness: dict[str, Staleness] = field(default_factory=dict)  # by source
    mixed: float = 0.0  # share of own rollouts that more than one policy version sampled
    missing: dict[str, int] = field(default_factory=dict)  # source -> rollouts that were not waited for
    late: dict[str, int] = field(default_factory=dict)  # source -> rollouts of earlier steps that teach now
    too_late: dict[str, int] = field(default_factory=dict)  # source -> rollouts that never teach


@dataclass(frozen=True)
class AgentReport:
    """One agent in one step."""

    capability: float
    policy_version: int
    rollout: RolloutReport
    learning: LearnReport
    engine: SyncReport | None = None  # None: the engine shares the learner's weights
    capability_ratios: dict[str, float] = field(default_factory=dict)  # omega(agent, other), by other agent
    asynchronous: AsynchronousReport | None = None  # None: the run is synchronous


@dataclass(frozen=True)
class StepReport:
    """One step of all agents."""

    step: int  # counted from 1
    agents: dict[str, AgentReport]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values, without notes."""
        plain = asdict(self)
        for agent in plain["agents"].values():
            del agent["learning"]["notes"], agent["learning"]["learnt"]
            if agent["asynchronous"] is None:
                del agent["asynchronous"]
            if agent["rollout"]["episodes"] is None:
                del agent["rollout"]["episodes"]
        return plain


def accuracy_of(rewards_per_problem: Sequence[Sequence[float]]) -> Accuracy:
    """Return the accuracy from every problem's rewards; all problems have equally many."""
    means = [math.fsum(rewards) / len(rewards) for rewards in rewards_per_problem]
    count = len(means)
    mean = math.fsum(means) / count
    variance = math.fsum((value - mean) ** 2 for value in means) / (count - 1) if count > 1 else 0.0
    return Accuracy(mean, math.sqrt(variance / count), count, len(rewards_per_problem[0]))


def accuracy_by_problem(verified: Sequence[VerifiedRollout], samples: int) -> Accuracy:
    """Return the accuracy of verified rollouts, ``samples`` per problem.

    Of an endpoint, some may be missing. Problems that it never answered are left out.
    """
    by_problem: dict[str, list[float]] = {}
    for rollout in verified:
        by_problem.setdefault(rollout.rollout.problem.id, []).append(rollout.reward)
    return replace(accuracy_of(list(by_problem.values())), samples=samples)


def rollout_report(
    rollouts: Sequence[VerifiedRollout], min_reward: float = 0.0, replaced: int = 0, asked: int | None = None
) -> RolloutReport:
    """Summarise one agent's verified rollouts; ``min_reward`` is the lowest possible reward.

    ``asked``: responses that were asked for; None: all of them are there.
    """
    logprobs = [logprob for verified in rollouts for logprob in verified.rollout.token_logprobs]
    by_problem: dict[str, set[float]] = {}
    for verified in rollouts:
        if not verified.rollout.has_failed:
            by_problem.setdefault(verified.rollout.problem.id, set()).add(verified.reward)
    uniform = [values.pop() for values in by_problem.values() if len(values) == 1]
    return RolloutReport(
        reward=mean(rewards_that_count(rollouts)),
        verdicts=dict(sorted(Counter(verified.verdict.label for verified in rollouts).items())),
        response_tokens=mean(verified.rollout.num_tokens for verified in rollouts),
        stopped=mean(verified.rollout.finish_reason != "length" for verified in rollouts),
        rollouts=len(rollouts),
        rewards=_rewards_by_function([verified.verdict for verified in rollouts]),
        logged=_means_by_name([verified.verdict.metrics for verified in rollouts]),
        tokens=sum(verified.rollout.num_tokens for verified in rollouts),
        entropy=_mean_if_any([-logprob for logprob in logprobs if math.isfinite(logprob)]),
        all_right=sum(reward > min_reward for reward in uniform) / max(1, len(by_problem)),
        all_wrong=sum(reward <= min_reward for reward in uniform) / max(1, len(by_problem)),
        replaced=replaced,
        episodes=episodes_report(rollouts),
        unanswered=0 if asked is None else asked - len(rollouts),
    )


def _rewards_by_function(verdicts: Sequence[Verdict]) -> dict[str, RewardReport]:
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.rewards)
    reports = {}
    for name in names:
        found = [value for verdict in verdicts if (value := verdict.rewards.get(name)) is not None]
        reports[name] = RewardReport(
            _mean_if_any(found), statistics.stdev(found) if len(found) > 1 else None, len(found)
        )
    return reports


def _means_by_name(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for record in records for name in record})
    return {name: mean(record[name] for record in records if name in record) for name in names}


def learn_report(learner: str, stats: LearnStats, samples: LearnerSamples) -> LearnReport:
    """Summarise one learner's updates."""
    gradient = math.fsum(value for source in stats.sources.values() for value in source.gradients)
    dropped: dict[str, dict[str, int]] = {}
    for (source, reason), count in sorted(samples.dropped.items()):
        dropped.setdefault(source, {})[reason] = count
    sources = {
        source: SourceReport(
            used=len(values.ratios),
            ratio_mean=mean(values.ratios),
            ratio_min=min(values.ratios),
            ratio_max=max(values.ratios),
            ratio_by_source_length=mean(values.source_length_ratios),
            ratio_by_own_length=mean(values.own_length_ratios),
            clipped=mean(values.clipped),
            clipped_below=mean(values.clipped_below),
            clipped_above=mean(values.clipped_above),
            gradient=math.fsum(values.gradients) / gradient if gradient else 0.0,
            tokens=values.tokens,
        )
        for source, values in sorted(stats.sources.items())
    }
    return LearnReport(
        updates=stats.updates,
        loss=mean(stats.losses),
        grad_norm=mean(stats.grad_norms),
        skipped=stats.skipped,
        screened=stats.screened,
        screened_out=stats.screened_out,
        dropped=dropped,
        sampler_gap=_mean_if_any(stats.sampler_gaps),
        sampler_gap_max=max(stats.sampler_gaps, default=None),
        sampler_kl=_mean_if_any(stats.sampler_differences),
        sampler_weight=_mean_if_any(stats.own.sampler_weights),
        sampler_capped=_mean_if_any(stats.own.sampler_capped),
        sources=sources,
        retokenised=_retokenised(samples),
        learning_rate=stats.learning_rate,
        bad_updates=stats.bad_updates,
        oom_retries=stats.oom_retries,
        tokens=sum(source.tokens for source in sources.values()),
        policy_kl=_mean_if_any(stats.own.policy_kls),
        reference_kl=_mean_if_any(stats.own.reference_kls),
        own_clipped_later=_mean_if_any(stats.own.later_clipped),
        gradient_alignment=stats.alignment,
        baseline=_mean_if_any(samples.baselines),
        without_signal=mean(not has_signal for has_signal in samples.has_signal),
        left_out=dict(sorted(samples.left_out.items())),
        alignment={source: measured.cosine for source, measured in sorted(stats.alignments.items())},
        probe_tokens=sum(s.loss_tokens for s in samples.samples if s.is_probe and s.advantage),
        trusted={source: int(source in samples.trusted) for source in sorted(stats.alignments)},
        notes=tuple(stats.notes),
        learnt=learnt_rollouts(learner, stats, samples),
    )


def _retokenised(samples: LearnerSamples) -> dict[str, RetokeniseReport]:
    reports = {}
    failed = {
        source: count for (source, reason), count in samples.dropped.items() if reason == "not_representable"
    }
    for source in sorted(samples.length_ratios.keys() | failed.keys()):
        ratios = samples.length_ratios.get(source, [])
        attempts = len(ratios) + failed.get(source, 0)
        reports[source] = RetokeniseReport(len(ratios), len(ratios) / attempts, mean(ratios))
    return reports


def _mean_if_any(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def mean(values: Iterable[float]) -> float:
    """Return the mean, or 0 if there are no values."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else 0.0
