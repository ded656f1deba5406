"""What a learner saw and did in one step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hacrl.agents.download import Download
from hacrl.algorithms.importance import sequence_ratio
from hacrl.learning.old_policy import sampler_differences
from hacrl.types import LearnerSample, LossBatch, LossTerms


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
        self._numbers = Download(loss, torch.stack(numbers), *logprobs)

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
