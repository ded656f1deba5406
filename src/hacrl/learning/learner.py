"""One agent's updates of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hacrl.agents.agent import Agent
from hacrl.agents.logprobs import response_logprobs
from hacrl.agents.lora import check_trainable
from hacrl.agents.reference import make_reference
from hacrl.algorithms.importance import sequence_ratio
from hacrl.algorithms.methods import Method
from hacrl.errors import TrainingError
from hacrl.learning.checkpointing import checkpointed_layers
from hacrl.learning.minibatches import micro_batches, minibatches
from hacrl.learning.old_policy import OldLogprobs, first_uses, sampler_differences, spread_out
from hacrl.learning.optimizer import MasterWeightAdamW
from hacrl.learning.settings import LearningSettings
from hacrl.types import LearnerSample, LossBatch, LossTerms, Sampling

GAP_SAMPLES = 8  # enough to see a sampler go wrong in a step from which nothing is learnt


@dataclass
class SourceStats:
    """What became of one source's samples in a learner's updates."""

    ratios: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    source_length_ratios: list[float] = field(default_factory=list)  # both definitions of s (eq. 11),
    own_length_ratios: list[float] = field(default_factory=list)  # whichever the loss uses


@dataclass
class LearnStats:
    """What one learner did in one step."""

    losses: list[float] = field(default_factory=list)  # one per update
    grad_norms: list[float] = field(default_factory=list)
    skipped: int = 0  # samples without advantage, never run through the model
    sources: dict[str, SourceStats] = field(default_factory=lambda: defaultdict(SourceStats))
    # log pi_sampler - log pi_old per own token, both at the weights before the first update
    sampler_differences: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # w of own responses where the difference is corrected
    capped: list[float] = field(default_factory=list)  # how much of each had its w cut down to the cap

    @property
    def sampler_gaps(self) -> list[float]:
        """The differences' sizes."""
        return [abs(difference) for difference in self.sampler_differences]

    @property
    def updates(self) -> int:
        """Parameter updates made."""
        return len(self.losses)


class Learner:
    """Turns samples into parameter updates of one agent.

    ``exact_sampler``: own rollouts come with the numbers this learner would compute, to float32 rounding.
    """

    def __init__(
        self,
        agent: Agent,
        method: Method,
        settings: LearningSettings,
        sampling: Sampling,
        lr: float | None = None,
        *,
        exact_sampler: bool = True,
    ) -> None:
        check_trainable(agent.model, agent.name)
        self.agent = agent
        self.method = method
        self._settings = settings
        self._sampling = sampling
        self._recomputes_old = settings.recomputes_old_policy(exact_sampler)
        self._reference = make_reference(agent.model) if method.needs_reference else None
        self.optimizer = MasterWeightAdamW(
            [parameter for parameter in agent.model.parameters() if parameter.requires_grad],
            lr=lr or settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )

    def learn(self, samples: Sequence[LearnerSample], updates: int, seed: int) -> LearnStats:
        """One update per mini-batch; ``u`` counts them within the step."""
        stats = LearnStats()
        settings = self._settings
        batches = minibatches(samples, updates, settings.epochs, settings.minibatch_order, seed)
        old = OldLogprobs()
        if batches:
            self._before_the_first_update(batches, old, stats)
        for updates_done, minibatch in enumerate(batches):
            self._update(minibatch, updates_done, old, stats)
        return stats

    def _before_the_first_update(
        self, batches: Sequence[Sequence[LearnerSample]], old: OldLogprobs, stats: LearnStats
    ) -> None:
        """Passes at the weights that sampled: for pi_old of later updates, and so that there is always a gap.

        Own responses of the first update are left out, since its own forward pass will do.
        """
        own = first_uses([sample for sample in minibatch if sample.is_own] for minibatch in batches)
        first, *later = [[sample for sample in samples if self._carries_signal(sample)] for samples in own]
        needed = later if self._recomputes_old else []
        if not first and not any(needed):
            needed = [spread_out([sample for samples in own for sample in samples], GAP_SAMPLES)]
        for samples in needed:
            for micro_batch in self._micro_batches(samples):
                with torch.no_grad():
                    logprobs_BT, _ = self._logprobs(micro_batch)
                old.remember(micro_batch, logprobs_BT)
                stats.sampler_differences += sampler_differences(micro_batch, logprobs_BT)

    def _update(
        self, minibatch: Sequence[LearnerSample], updates_done: int, old: OldLogprobs, stats: LearnStats
    ) -> None:
        active = [sample for sample in minibatch if self._carries_signal(sample)]
        stats.skipped += len(minibatch) - len(active)
        self.optimizer.zero_gradients()
        loss_sum = 0.0
        for micro_batch in self._micro_batches(active):
            with checkpointed_layers(self.agent.model):
                batch = self.loss_batch(micro_batch, updates_done, old)
                terms = self.method.loss(batch)
                # the mean is over the whole mini-batch: samples without signal count with loss 0
                loss = terms.loss_B.sum() / len(minibatch)
                loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            _record(stats, micro_batch, batch, terms)
        grad_norm = self.optimizer.clip_gradients(self._settings.max_grad_norm)
        self._check_finite(loss_sum, grad_norm, updates_done)
        self.optimizer.step()
        self.agent.policy_version += 1
        stats.losses.append(loss_sum)
        stats.grad_norms.append(grad_norm)

    def _micro_batches(self, samples: Sequence[LearnerSample]) -> Iterator[list[LearnerSample]]:
        """With a recomputed pi_old, own responses by themselves, as they were when it was computed.

        In low precision a response's log-probability depends on what it is batched with, by as much as
        the clip range is wide; in equal batches the ratio is exactly 1 until the weights move.
        """
        parts = [samples]
        if self._recomputes_old:
            parts = [[s for s in samples if s.is_own], [s for s in samples if not s.is_own]]
        for part in parts:
            yield from micro_batches(part, self._settings.micro_batch_tokens)

    def _carries_signal(self, sample: LearnerSample) -> bool:
        return sample.advantage != 0 or (self._reference is not None and sample.is_own)

    def _logprobs(self, samples: Sequence[LearnerSample], model: Any = None) -> tuple[Tensor, Tensor]:
        """(B, T) and mask, by this agent's model or the given one."""
        pairs = [(sample.prompt_ids, sample.response_ids) for sample in samples]
        model = self.agent.model if model is None else model
        return response_logprobs(model, pairs, self._sampling, self.agent.device)

    def loss_batch(
        self, samples: Sequence[LearnerSample], updates_done: int, old: OldLogprobs | None = None
    ) -> LossBatch:
        """One micro-batch as tensors: a forward pass of this agent, and of the reference if there is one.

        ``old`` knows pi_old of own responses if they are recomputed and an update has been made.
        """
        device = self.agent.device
        logprobs_BT, mask_BT = self._logprobs(samples)
        reference_BT = None
        if self._reference is not None:
            with self._reference.policy() as reference:
                reference_BT, _ = self._logprobs(samples, reference)
        behaviour_BT = torch.zeros_like(logprobs_BT)
        for row, sample in enumerate(samples):
            if sample.behaviour_logprobs is not None:
                behaviour_BT[row, : len(sample.behaviour_logprobs)] = torch.tensor(sample.behaviour_logprobs)

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        batch = LossBatch(
            logprobs_BT=logprobs_BT,
            mask_BT=mask_BT,
            behaviour_logprobs_BT=behaviour_BT.detach(),
            behaviour_logprob_B=column([sample.behaviour_logprob for sample in samples]),
            source_length_B=column([sample.source_length for sample in samples]),
            advantages_B=column([sample.advantage for sample in samples]),
            is_own_B=torch.tensor([sample.is_own for sample in samples], device=device),
            updates_done=updates_done,
            reference_logprobs_BT=reference_BT,
        )
        return self._with_old_policy(batch, samples, old or OldLogprobs()) if self._recomputes_old else batch

    def _with_old_policy(
        self, batch: LossBatch, samples: Sequence[LearnerSample], old: OldLogprobs
    ) -> LossBatch:
        """The batch with this learner's pi_old in own rows, and the sampler's beside it."""
        if batch.updates_done == 0:
            old.remember(samples, batch.logprobs_BT)
        old_BT = old.in_place_of(batch.behaviour_logprobs_BT, samples)
        return replace(
            batch,
            behaviour_logprobs_BT=old_BT,
            behaviour_logprob_B=torch.where(batch.is_own_B, old_BT.sum(dim=-1), batch.behaviour_logprob_B),
            sampler_logprobs_BT=batch.behaviour_logprobs_BT,
            mismatch_cap=self._settings.mismatch_cap,
        )

    def _check_finite(self, loss: float, grad_norm: float, updates_done: int) -> None:
        if not (torch.isfinite(torch.tensor(loss)) and torch.isfinite(torch.tensor(grad_norm))):
            raise TrainingError(
                f"agent {self.agent.name!r}: loss {loss} and gradient norm {grad_norm} at update "
                f"{updates_done + 1} of the step are not finite; the weights were left as they were. "
                "Lower learning.lr, or check the model's weights and dtype"
            )


def _record(stats: LearnStats, samples: Sequence[LearnerSample], batch: LossBatch, terms: LossTerms) -> None:
    rows = zip(samples, terms.ratio_B.tolist(), terms.clipped_B.tolist(), strict=True)
    for sample, ratio, clipped in rows:
        stats.sources[sample.source].ratios.append(ratio)
        stats.sources[sample.source].clipped.append(clipped)
    with torch.no_grad():
        by_source_B, by_own_B = sequence_ratio(batch, "source"), sequence_ratio(batch, "own")
    for sample, by_source, by_own in zip(samples, by_source_B.tolist(), by_own_B.tolist(), strict=True):
        stats.sources[sample.source].source_length_ratios.append(by_source)
        stats.sources[sample.source].own_length_ratios.append(by_own)
    if batch.updates_done == 0:  # only now are the learner's weights the sampler's
        stats.sampler_differences += sampler_differences(samples, batch.logprobs_BT)
    if batch.sampler_logprobs_BT is not None:
        stats.weights += terms.weight_B[batch.is_own_B].tolist()
        stats.capped += terms.capped_B[batch.is_own_B].tolist()
