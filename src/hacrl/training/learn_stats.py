"""Statistics of one learner's updates in a step, read from the device without making it wait."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hacrl.algorithms.alignment import Alignment
from hacrl.algorithms.importance import sequence_ratio
from hacrl.algorithms.kl import k3_divergence
from hacrl.models.device import HostCopy
from hacrl.models.rank_group import Ranks
from hacrl.training.batching import needed_tokens
from hacrl.training.old_policy import sampler_differences
from hacrl.types import LearnerSample, LossBatch, LossTerms

Result = TypeVar("Result")
_DECIMALS = 4  # of the log-probabilities that are kept for people to read


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


@dataclass(frozen=True, slots=True)
class SampleNumbers:
    """The numbers of one sample in one update."""

    ratio: float
    clipped_below: float  # share of the response without gradient because its ratio is too low
    clipped_above: float  # ... too high
    by_source_length: float  # the ratio by source length,
    by_own_length: float  # and by own length, whichever the loss uses
    weight: float  # for the sampler's mismatch
    capped: float
    gradient: float  # sum over tokens of |dL/d log pi|
    policy_kl: float  # KL(pi_old || pi_k) per token; means nothing for other agents' responses
    reference_kl: float  # KL(pi_k || pi_reference) per token; 0 without a reference

    @property
    def clipped(self) -> float:
        """Share of the response without gradient because of clipping."""
        return self.clipped_below + self.clipped_above


class MicroBatchResult:
    """The numbers of one micro-batch, on their way from the device.

    Make it after the backward pass. It keeps no tensor that the backward pass needed. The log-probabilities
    of ``batch`` must retain their gradient.

    ``packed``: whether a prompt was computed once for all of its responses. ``screened``: whether the
    log-probabilities come from a forward pass without gradients (``training/screening.py``).
    """

    @torch.no_grad()
    def __init__(
        self,
        samples: Sequence[LearnerSample],
        loss: Tensor,
        batch: LossBatch,
        terms: LossTerms,
        *,
        packed: bool,
        screened: bool = False,
    ) -> None:
        self.samples = samples
        self.packed = packed
        self.screened = screened
        self.updates_done = batch.updates_done
        self.has_sampler_weights = batch.sampler_logprobs_BT is not None
        self.has_reference = batch.reference_logprobs_BT is not None
        # only before the first update has the learner the weights that sampled
        self.has_sampling_weights = batch.updates_done == 0
        gradient_BT = batch.logprobs_BT.grad
        assert gradient_BT is not None, "the log-probabilities did not retain their gradient"
        old_BT, new_BT, reference_BT = (
            batch.behaviour_logprobs_BT,
            batch.logprobs_BT,
            batch.reference_logprobs_BT,
        )
        numbers = (  # in the order of SampleNumbers
            terms.ratio_B,
            terms.clipped_below_B,
            terms.clipped_above_B,
            sequence_ratio(batch, "source"),
            sequence_ratio(batch, "own"),
            terms.weight_B,
            terms.capped_B,
            gradient_BT.abs().sum(dim=-1),
            k3_divergence(old_BT, new_BT, batch.mask_BT),
            torch.zeros_like(terms.ratio_B)
            if reference_BT is None
            else k3_divergence(new_BT, reference_BT, batch.mask_BT),
        )
        self._numbers = HostCopy(loss, torch.stack(numbers, dim=-1), batch.logprobs_BT)

    def read(self) -> tuple[float, list[SampleNumbers], Tensor]:
        """Wait for the device; return the part of the update's loss, samples' numbers and log-probabilities.

        Log-probabilities are (B, T).
        """
        loss, numbers, logprobs_BT = self._numbers.wait()
        return float(loss), [SampleNumbers(*row) for row in numbers.tolist()], logprobs_BT


@dataclass(frozen=True, slots=True)
class FirstUse:
    """One sample in the first update of the step that used it."""

    numbers: SampleNumbers
    token_logprobs: tuple[float, ...]  # learner's, one per response token, rounded


@dataclass
class SourceStats:
    """One source's samples in one learner's updates: one number per use of a sample."""

    ratios: list[float] = field(default_factory=list)
    clipped_below: list[float] = field(default_factory=list)
    clipped_above: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)  # sum over tokens of |dL/d log pi|
    source_length_ratios: list[float] = field(default_factory=list)  # both definitions of s (eq. 11),
    own_length_ratios: list[float] = field(default_factory=list)  # whichever the loss uses
    tokens: int = 0  # that the loss saw, counted at every use
    # computed in forward passes, prompts included, and the part of it for responses that had a gradient
    pass_tokens: int = 0
    gradient_tokens: int = 0

    @property
    def clipped(self) -> list[float]:
        """Share of each response without gradient because of clipping."""
        return [below + above for below, above in zip(self.clipped_below, self.clipped_above, strict=True)]

    def record(self, sample: LearnerSample, numbers: SampleNumbers) -> None:
        """Append the numbers of one use of a sample."""
        self.ratios.append(numbers.ratio)
        self.clipped_below.append(numbers.clipped_below)
        self.clipped_above.append(numbers.clipped_above)
        self.gradients.append(numbers.gradient)
        self.source_length_ratios.append(numbers.by_source_length)
        self.own_length_ratios.append(numbers.by_own_length)
        self.tokens += sample.loss_tokens

    def add(self, other: SourceStats) -> None:
        """Append the numbers of a further update."""
        self.ratios += other.ratios
        self.clipped_below += other.clipped_below
        self.clipped_above += other.clipped_above
        self.gradients += other.gradients
        self.source_length_ratios += other.source_length_ratios
        self.own_length_ratios += other.own_length_ratios
        self.tokens += other.tokens
        self.pass_tokens += other.pass_tokens
        self.gradient_tokens += other.gradient_tokens


@dataclass
class OwnStats:
    """Numbers of a learner's own responses alone: one per use of a sample."""

    policy_kls: list[float] = field(default_factory=list)
    reference_kls: list[float] = field(default_factory=list)  # only with a reference
    later_clipped: list[float] = field(default_factory=list)  # from the step's second update on
    # w and the share of each response that was cut down to the cap; only if differences are corrected
    sampler_weights: list[float] = field(default_factory=list)
    sampler_capped: list[float] = field(default_factory=list)

    def record(self, numbers: SampleNumbers, result: MicroBatchResult) -> None:
        """Append the numbers of one use of an own response."""
        self.policy_kls.append(numbers.policy_kl)
        if result.updates_done:
            self.later_clipped.append(numbers.clipped)
        if result.has_reference:
            self.reference_kls.append(numbers.reference_kl)
        if result.has_sampler_weights:
            self.sampler_weights.append(numbers.weight)
            self.sampler_capped.append(numbers.capped)

    def add(self, other: OwnStats) -> None:
        """Append the numbers of a further update."""
        self.policy_kls += other.policy_kls
        self.reference_kls += other.reference_kls
        self.later_clipped += other.later_clipped
        self.sampler_weights += other.sampler_weights
        self.sampler_capped += other.sampler_capped


@dataclass
class LearnStats:
    """What one learner did in one step, or in one attempt at an update."""

    losses: list[float] = field(default_factory=list)  # one per update
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0  # of all updates of the step
    skipped: int = 0  # samples without advantage, never run through the model
    screened: int = 0  # uses of samples that a forward pass tested for a gradient
    screened_out: int = 0  # those of them without a gradient, which had no backward pass
    sources: dict[str, SourceStats] = field(default_factory=lambda: defaultdict(SourceStats))
    first_uses: dict[tuple[str, str, int, int | None], FirstUse] = field(
        default_factory=dict
    )  # by rollout_key
    # log pi_sampler - log pi_old per own token, both at the weights before the first update
    sampler_differences: list[float] = field(default_factory=list)
    own: OwnStats = field(default_factory=OwnStats)
    # cosine between the gradients of own and of others' responses, in one update; None: not compared
    alignment: float | None = None
    alignments: dict[str, Alignment] = field(default_factory=dict)  # by source, at the first update
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
        loss, rows, logprobs_BT = result.read()
        for sample, numbers in zip(result.samples, rows, strict=True):
            self.sources[sample.source].record(sample, numbers)
            if sample.is_own:
                self.own.record(numbers, result)
        self._count_tokens(result, rows)
        self._keep_first_uses(result.samples, rows, logprobs_BT)
        if result.has_sampling_weights:
            self.sampler_differences += sampler_differences(result.samples, logprobs_BT)
        return loss

    def _count_tokens(self, result: MicroBatchResult, rows: Sequence[SampleNumbers]) -> None:
        """Count what was computed for responses with and without a gradient."""
        with_gradient = [
            sample for sample, numbers in zip(result.samples, rows, strict=True) if numbers.gradient != 0
        ]
        if result.screened:
            self.screened += len(rows)
            self.screened_out += len(rows) - len(with_gradient)
        for source in {sample.source for sample in result.samples}:
            numbers = self.sources[source]
            numbers.pass_tokens += _tokens_of(source, result.samples, result.packed)
            numbers.gradient_tokens += _tokens_of(source, with_gradient, result.packed)

    def _keep_first_uses(
        self, samples: Sequence[LearnerSample], rows: Sequence[SampleNumbers], logprobs_BT: Tensor
    ) -> None:
        """Keep the numbers of samples that no update of the step has used before."""
        keys = [sample.rollout_key for sample in samples]
        if all(key in self.first_uses for key in keys):
            return
        rounded_BT = torch.round(logprobs_BT.double(), decimals=_DECIMALS).tolist()
        for key, sample, numbers, logprobs_T in zip(keys, samples, rows, rounded_BT, strict=True):
            if key not in self.first_uses:
                self.first_uses[key] = FirstUse(numbers, tuple(logprobs_T[: len(sample.response_ids)]))

    def add(self, update: LearnStats) -> None:
        """Add the numbers of an update that was made."""
        self.losses += update.losses
        self.grad_norms += update.grad_norms
        self.skipped += update.skipped
        self.screened += update.screened
        self.screened_out += update.screened_out
        for source, numbers in update.sources.items():
            self.sources[source].add(numbers)
        self.first_uses = {**update.first_uses, **self.first_uses}
        self.sampler_differences += update.sampler_differences
        self.own.add(update.own)
        if update.alignment is not None:
            self.alignment = update.alignment
        self.alignments = {**update.alignments, **self.alignments}

    def of_all_ranks(self, ranks: Ranks) -> LearnStats:
        """Return the numbers of an update from all ranks together, which are the same on every rank.

        The ranks' losses are parts of a sum. Every rank has counted the same skipped samples.
        """
        if not ranks.is_group:
            return self
        merged = LearnStats()
        for data in ranks.gather(json.dumps(self._as_json()).encode()):
            merged.add(_from_json(json.loads(data)))
        merged.losses, merged.skipped = [sum(merged.losses)], self.skipped
        return merged

    def _as_json(self) -> dict[str, Any]:
        """Return plain values; JSON keeps every digit of a number, and those that are not finite."""
        first_uses = [
            [key, astuple(first.numbers), first.token_logprobs] for key, first in self.first_uses.items()
        ]
        return {
            **{entry.name: getattr(self, entry.name) for entry in fields(self)},
            "sources": {source: asdict(numbers) for source, numbers in self.sources.items()},
            "own": asdict(self.own),
            "first_uses": first_uses,
            "alignments": {},  # they are measured over all ranks
        }

    def add_bad(self, update: LearnStats) -> None:
        """Count an update that was left out; keep its finite sampler differences."""
        self.bad_updates += 1
        self.skipped += update.skipped
        self.sampler_differences += [gap for gap in update.sampler_differences if math.isfinite(gap)]


def _tokens_of(source: str, samples: Sequence[LearnerSample], packed: bool) -> int:
    return needed_tokens([sample for sample in samples if sample.source == source], packed)


def _from_json(data: dict[str, Any]) -> LearnStats:
    """Return the statistics that :meth:`LearnStats._as_json` wrote."""
    sources = {source: SourceStats(**numbers) for source, numbers in data["sources"].items()}
    first_uses = {
        tuple(key): FirstUse(SampleNumbers(*numbers), tuple(logprobs))
        for key, numbers, logprobs in data["first_uses"]
    }
    return LearnStats(
        **{**data, "sources": sources, "own": OwnStats(**data["own"]), "first_uses": first_uses}
    )
