"""Statistics of one learner's updates in a step, read from the device without making it wait."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hacrl.algorithms.importance import sequence_ratio
from hacrl.models.device import HostCopy
from hacrl.training.old_policy import sampler_differences
from hacrl.types import LearnerSample, LossBatch, LossTerms

Result = TypeVar("Result")


class DeferredReader(Generic[Result]):
    """Passes each result to ``read`` when the next one is added: by then the device has the next to work on.

    Call :meth:`finish` to read the last result.
    """

    def __init__(self, read: Callable[[Result], object]) -> None:
        self._read = read
        self._unread: list[Result] = []  # at most one

    def add(self, result: Result) -> None:
        """Read the result before, and keep this one, which the device may not have computed yet."""
        self.finish()
        self._unread.append(result)

    def finish(self) -> None:
        """Read what has not been read."""
        while self._unread:
            self._read(self._unread.pop())


class MicroBatchResult:
    """The numbers of one micro-batch, on their way from the device.

    It keeps no tensor that the backward pass needed.
    """

    @torch.no_grad()
    def __init__(
        self, samples: Sequence[LearnerSample], loss: Tensor, batch: LossBatch, terms: LossTerms
    ) -> None:
        self.samples = samples
        self.has_sampler_weights = batch.sampler_logprobs_BT is not None
        numbers = (
            terms.ratio_B,
            terms.clipped_B,
            sequence_ratio(batch, "source"),
            sequence_ratio(batch, "own"),
            terms.weight_B,
            terms.capped_B,
        )
        # only before the first update has the learner the weights that sampled
        logprobs = [batch.logprobs_BT] if batch.updates_done == 0 else []
        self._numbers = HostCopy(loss, torch.stack(numbers), *logprobs)

    def read(self) -> tuple[float, list[list[float]], Tensor | None]:
        """Wait for the numbers and return loss, per-sample numbers and log-probabilities.

        The loss is the micro-batch's part of the update's loss. The per-sample numbers are ratio, clipped,
        ratio by source length, ratio by own length, weight and capped. Log-probabilities are (B, T), or None
        if an update came before.
        """
        loss, numbers_6B, *logprobs_BT = self._numbers.wait()
        return float(loss), numbers_6B.tolist(), logprobs_BT[0] if logprobs_BT else None


@dataclass
class SourceStats:
    """One source's samples in one learner's updates: one number per use of a sample."""

    ratios: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    source_length_ratios: list[float] = field(default_factory=list)  # both definitions of s (eq. 11),
    own_length_ratios: list[float] = field(default_factory=list)  # whichever the loss uses

    def add(self, other: SourceStats) -> None:
        """Append the numbers of a further update."""
        self.ratios += other.ratios
        self.clipped += other.clipped
        self.source_length_ratios += other.source_length_ratios
        self.own_length_ratios += other.own_length_ratios


@dataclass
class LearnStats:
    """What one learner did in one step, or in one attempt at an update."""

    losses: list[float] = field(default_factory=list)  # one per update
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0  # of all updates of the step
    skipped: int = 0  # samples without advantage, never run through the model
    sources: dict[str, SourceStats] = field(default_factory=lambda: defaultdict(SourceStats))
    # log pi_sampler - log pi_old per own token, both at the weights before the first update
    sampler_differences: list[float] = field(default_factory=list)
    # w of own responses and the share of each that was cut down to the cap; only if differences are corrected
    sampler_weights: list[float] = field(default_factory=list)
    sampler_capped: list[float] = field(default_factory=list)
    bad_updates: int = 0  # left out because their loss or gradient was not finite
    oom_retries: int = 0  # attempts at an update that were repeated because memory ran out
    notes: list[str] = field(default_factory=list)  # sentences for the user

    @property
    def sampler_gaps(self) -> list[float]:
        """The absolute values of the sampler differences."""
        return [abs(difference) for difference in self.sampler_differences]

    @property
    def updates(self) -> int:
        """The number of updates made."""
        return len(self.losses)

    @property
    def is_finite(self) -> bool:
        """Whether all losses and gradient norms are finite, so that the weights may be updated."""
        return all(map(math.isfinite, [*self.losses, *self.grad_norms]))

    def record(self, result: MicroBatchResult) -> float:
        """Add the numbers of one micro-batch; return its part of the update's loss."""
        loss, numbers, logprobs_BT = result.read()
        rows = zip(result.samples, *numbers, strict=True)
        for sample, ratio, clipped, by_source, by_own, weight, capped in rows:
            source = self.sources[sample.source]
            source.ratios.append(ratio)
            source.clipped.append(clipped)
            source.source_length_ratios.append(by_source)
            source.own_length_ratios.append(by_own)
            if result.has_sampler_weights and sample.is_own:
                self.sampler_weights.append(weight)
                self.sampler_capped.append(capped)
        if logprobs_BT is not None:
            self.sampler_differences += sampler_differences(result.samples, logprobs_BT)
        return loss

    def add(self, update: LearnStats) -> None:
        """Add the numbers of an update that was made."""
        self.losses += update.losses
        self.grad_norms += update.grad_norms
        self.skipped += update.skipped
        for source, numbers in update.sources.items():
            self.sources[source].add(numbers)
        self.sampler_differences += update.sampler_differences
        self.sampler_weights += update.sampler_weights
        self.sampler_capped += update.sampler_capped

    def add_bad(self, update: LearnStats) -> None:
        """Count an update that was left out; keep its finite sampler differences."""
        self.bad_updates += 1
        self.skipped += update.skipped
        self.sampler_differences += [gap for gap in update.sampler_differences if math.isfinite(gap)]
