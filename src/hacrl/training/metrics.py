"""What a learner saw and did in one step.

What happened in a step, as plain numbers: equal runs give equal reports, so no times are in here.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from hacrl.algorithms.importance import sequence_ratio
from hacrl.engines.base import SyncReport
from hacrl.models.device import HostCopy
from hacrl.training.old_policy import sampler_differences
from hacrl.training.samples import LearnerSamples
from hacrl.types import LearnerSample, LossBatch, LossTerms, VerifiedRollout


class PassResult:
    """What one micro-batch showed. The numbers are on their way here while the device goes on."""

    @torch.no_grad()
    def __init__(
        self, samples: Sequence[LearnerSample], loss: Tensor, batch: LossBatch, terms: LossTerms
    ) -> None:
        """Nothing of what the backward pass needed is kept."""
        self.samples = samples
        self.is_corrected = batch.sampler_logprobs_BT is not None  # own responses have a weight
        numbers = (
            terms.ratio_B,
            terms.clipped_B,
            sequence_ratio(batch, "source"),
            sequence_ratio(batch, "own"),
            terms.weight_B,
            terms.capped_B,
        )
        # only if no update came before are the learner's weights the sampler's
        logprobs = [batch.logprobs_BT] if batch.updates_done == 0 else []
        self._numbers = HostCopy(loss, torch.stack(numbers), *logprobs)

    def read(self) -> tuple[float, list[list[float]], Tensor | None]:
        """Its part of the update's loss; ratio, clipped, ratio by source length and by own length, weight and
        capped of every sample; and (B, T) log-probabilities if no update came before. Waits for them.
        """
        loss, numbers_6B, *logprobs_BT = self._numbers.wait()
        return float(loss), numbers_6B.tolist(), logprobs_BT[0] if logprobs_BT else None


@dataclass
class SourceStats:
    """What became of one source's samples in a learner's updates."""

    ratios: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    source_length_ratios: list[float] = field(default_factory=list)  # both definitions of s (eq. 11),
    own_length_ratios: list[float] = field(default_factory=list)  # whichever the loss uses

    def add(self, other: SourceStats) -> None:
        """Those of a further update."""
        self.ratios += other.ratios
        self.clipped += other.clipped
        self.source_length_ratios += other.source_length_ratios
        self.own_length_ratios += other.own_length_ratios


@dataclass
class LearnStats:
    """What one learner did in one step, or would do in one update."""

    losses: list[float] = field(default_factory=list)  # one per update
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0  # samples without advantage, never run through the model
    sources: dict[str, SourceStats] = field(default_factory=lambda: defaultdict(SourceStats))
    # log pi_sampler - log pi_old per own token, both at the weights before the first update
    sampler_differences: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # w of own responses where the difference is corrected
    capped: list[float] = field(default_factory=list)  # how much of each had its w cut down to the cap
    bad_updates: int = 0  # left out because their loss or gradient was not finite
    oom_retries: int = 0  # updates begun again because memory ran out
    notes: list[str] = field(default_factory=list)  # sentences for the user

    @property
    def sampler_gaps(self) -> list[float]:
        """The differences' sizes."""
        return [abs(difference) for difference in self.sampler_differences]

    @property
    def updates(self) -> int:
        """Parameter updates made."""
        return len(self.losses)

    @property
    def is_finite(self) -> bool:
        """Whether weights may be moved by this."""
        return all(map(math.isfinite, [*self.losses, *self.grad_norms]))

    def record(self, result: PassResult) -> float:
        """One micro-batch; returns its part of the loss."""
        loss, numbers, logprobs_BT = result.read()
        rows = zip(result.samples, *numbers, strict=True)
        for sample, ratio, clipped, by_source, by_own, weight, capped in rows:
            source = self.sources[sample.source]
            source.ratios.append(ratio)
            source.clipped.append(clipped)
            source.source_length_ratios.append(by_source)
            source.own_length_ratios.append(by_own)
            if result.is_corrected and sample.is_own:
                self.weights.append(weight)
                self.capped.append(capped)
        if logprobs_BT is not None:
            self.sampler_differences += sampler_differences(result.samples, logprobs_BT)
        return loss

    def add(self, update: LearnStats) -> None:
        """An update that was made."""
        self.losses += update.losses
        self.grad_norms += update.grad_norms
        self.skipped += update.skipped
        for source, seen in update.sources.items():
            self.sources[source].add(seen)
        self.sampler_differences += update.sampler_differences
        self.weights += update.weights
        self.capped += update.capped

    def add_bad(self, update: LearnStats) -> None:
        """An update that was left out: of its numbers, those that say something all the same."""
        self.bad_updates += 1
        self.skipped += update.skipped
        self.sampler_differences += [gap for gap in update.sampler_differences if math.isfinite(gap)]


@dataclass(frozen=True)
class RolloutReport:
    """One agent's responses of one step."""

    reward: float  # mean
    verdicts: dict[str, int]
    response_tokens: float  # mean
    stopped: float  # share that ended by itself
    rollouts: int


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


@dataclass(frozen=True)
class RetokeniseReport:
    """One source's rollouts of one step that had to be written in the learner's tokens."""

    rollouts: int  # that could be
    round_trip: float  # share of those tried that came back as the same text
    length_ratio: float  # learner's tokens per source token, mean


@dataclass(frozen=True)
class LearnReport:
    """One learner's updates of one step."""

    updates: int  # that were made
    loss: float  # mean over these
    grad_norm: float  # mean over these, before clipping
    skipped: int  # zero-advantage samples
    dropped: dict[str, dict[str, int]]  # source -> reason -> rollouts
    # Sampler against learner, both at the weights before the first update, per own token; None: no sample.
    sampler_gap: float | None  # mean |difference of log-probabilities|
    sampler_gap_max: float | None
    sampler_kl: float | None  # mean of sampler's - learner's: estimates KL(sampler || learner)
    # How the difference was corrected; None: not at all.
    sampler_weight: float | None  # mean weight of own responses
    sampler_capped: float | None  # share of them whose weight was cut down to learning.mismatch_cap
    sources: dict[str, SourceReport]
    retokenised: dict[str, RetokeniseReport]  # by source; those with the learner's tokenizer are not in here
    bad_updates: int = 0  # left out because their loss or gradient was not finite
    oom_retries: int = 0  # updates begun again because memory ran out
    # source -> rollouts not learnt from because of learning.max_cross_rollouts
    left_out: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AgentReport:
    """One agent in one step."""

    capability: float
    policy_version: int
    rollout: RolloutReport
    learning: LearnReport
    engine: SyncReport | None = None  # if it has weights of its own


@dataclass(frozen=True)
class StepReport:
    """One step of all agents."""

    step: int  # counted from 1
    agents: dict[str, AgentReport]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def rollout_report(rollouts: Sequence[VerifiedRollout]) -> RolloutReport:
    """Summary of one agent's verified rollouts."""
    return RolloutReport(
        reward=mean(verified.reward for verified in rollouts),
        verdicts=dict(sorted(Counter(verified.verdict.label for verified in rollouts).items())),
        response_tokens=mean(verified.rollout.num_tokens for verified in rollouts),
        stopped=mean(verified.rollout.finish_reason == "stop" for verified in rollouts),
        rollouts=len(rollouts),
    )


def learn_report(stats: LearnStats, samples: LearnerSamples) -> LearnReport:
    """Summary of one learner's updates."""
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
        )
        for source, values in sorted(stats.sources.items())
    }
    return LearnReport(
        updates=stats.updates,
        loss=mean(stats.losses),
        grad_norm=mean(stats.grad_norms),
        skipped=stats.skipped,
        dropped=dropped,
        sampler_gap=_mean_if_any(stats.sampler_gaps),
        sampler_gap_max=max(stats.sampler_gaps, default=None),
        sampler_kl=_mean_if_any(stats.sampler_differences),
        sampler_weight=_mean_if_any(stats.weights),
        sampler_capped=_mean_if_any(stats.capped),
        sources=sources,
        retokenised=_retokenised(samples),
        bad_updates=stats.bad_updates,
        oom_retries=stats.oom_retries,
        left_out=dict(sorted(samples.left_out.items())),
    )


def _retokenised(samples: LearnerSamples) -> dict[str, RetokeniseReport]:
    reports = {}
    lost = {source: count for (source, why), count in samples.dropped.items() if why == "not_representable"}
    for source in sorted(samples.length_ratios.keys() | lost.keys()):
        ratios = samples.length_ratios.get(source, [])
        tried = len(ratios) + lost.get(source, 0)
        reports[source] = RetokeniseReport(len(ratios), len(ratios) / tried, mean(ratios))
    return reports


def _mean_if_any(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def mean(values: Iterable[float]) -> float:
    """Mean, 0 for nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else 0.0
