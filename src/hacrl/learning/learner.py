"""One agent's updates of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hacrl.agents.agent import Agent
from hacrl.agents.logprobs import response_logprobs
from hacrl.agents.reference import make_reference
from hacrl.algorithms.importance import sequence_ratio
from hacrl.algorithms.methods import Method
from hacrl.errors import TrainingError
from hacrl.learning.checkpointing import checkpointed_layers
from hacrl.learning.minibatches import micro_batches, minibatches
from hacrl.learning.optimizer import MasterWeightAdamW
from hacrl.learning.settings import LearningSettings
from hacrl.types import LearnerSample, LossBatch, LossTerms, Sampling


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
    sampler_gaps: list[float] = field(default_factory=list)  # |learner - sampler| log-probability per token

    @property
    def updates(self) -> int:
        """Parameter updates made."""
        return len(self.losses)


class Learner:
    """Turns samples into parameter updates of one agent."""

    def __init__(
        self,
        agent: Agent,
        method: Method,
        settings: LearningSettings,
        sampling: Sampling,
        lr: float | None = None,
    ) -> None:
        self.agent = agent
        self.method = method
        self._settings = settings
        self._sampling = sampling
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
        for updates_done, minibatch in enumerate(batches):
            self._update(minibatch, updates_done, stats)
        return stats

    def _update(self, minibatch: Sequence[LearnerSample], updates_done: int, stats: LearnStats) -> None:
        active = [sample for sample in minibatch if self._carries_signal(sample)]
        stats.skipped += len(minibatch) - len(active)
        self.optimizer.zero_gradients()
        loss_sum = 0.0
        for micro_batch in micro_batches(active, self._settings.micro_batch_tokens):
            with checkpointed_layers(self.agent.model):
                batch = self.loss_batch(micro_batch, updates_done)
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

    def _carries_signal(self, sample: LearnerSample) -> bool:
        return sample.advantage != 0 or (self._reference is not None and sample.is_own)

    def loss_batch(self, samples: Sequence[LearnerSample], updates_done: int) -> LossBatch:
        """One micro-batch as tensors: a forward pass of this agent, and of the reference if there is one."""
        device = self.agent.device
        pairs = [(sample.prompt_ids, sample.response_ids) for sample in samples]
        logprobs_BT, mask_BT = response_logprobs(self.agent.model, pairs, self._sampling, device)
        reference_BT = None
        if self._reference is not None:
            with self._reference.policy() as reference:
                reference_BT, _ = response_logprobs(reference, pairs, self._sampling, device)
        behaviour_BT = torch.zeros_like(logprobs_BT)
        for row, sample in enumerate(samples):
            if sample.behaviour_logprobs is not None:
                behaviour_BT[row, : len(sample.behaviour_logprobs)] = torch.tensor(sample.behaviour_logprobs)

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return LossBatch(
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
        own_BT = batch.mask_BT & batch.is_own_B.unsqueeze(-1)
        gaps = (batch.logprobs_BT.detach() - batch.behaviour_logprobs_BT).abs()[own_BT]
        stats.sampler_gaps += gaps.tolist()
