"""Make the tensors of one micro-batch: a forward pass of the agent, and what is known of the old policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hacrl.config.schema import LearningSettings
from hacrl.models.agent import Agent
from hacrl.models.device import copy_to_device
from hacrl.models.logprobs import response_logprobs
from hacrl.models.packing import TokenPair
from hacrl.models.reference_policy import ReferencePolicy
from hacrl.training.batching import loss_masks, token_pairs
from hacrl.training.behaviour import sequence_behaviour, token_behaviour
from hacrl.training.old_policy import OldPolicyLogprobs
from hacrl.types import LearnerSample, LossBatch, Sampling

# What a rank computes while others have more micro-batches: their collectives need all ranks.
IDLE_PAIRS: tuple[TokenPair, ...] = (((0, 0), (0,)),)


class LossBatches:
    """Runs an agent's forward passes and makes loss batches of them.

    ``recomputes_old``: whether pi_old of own responses is the learner's; ``rescores``: of others' responses.
    """

    def __init__(
        self,
        agent: Agent,
        sampling: Sampling,
        settings: LearningSettings,
        reference: ReferencePolicy | None,
        *,
        recomputes_old: bool,
        rescores: bool,
    ) -> None:
        self._agent = agent
        self._sampling = sampling
        self._mismatch_cap = settings.mismatch_cap
        self._reference = reference
        self._recomputes_old = recomputes_old
        self._rescores = rescores

    def logprobs(self, samples: Sequence[LearnerSample], model: Any = None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (B, T) by ``model`` or the agent's own, and the loss mask (B, T)."""
        model = self._agent.model if model is None else model
        pairs, masks = token_pairs(samples), loss_masks(samples)
        return response_logprobs(model, pairs, self._sampling, self._agent.device, masks)

    def idle_forward(self, *, with_reference: bool) -> Tensor:
        """Take part in the other ranks' forward pass; return log-probabilities that mean nothing."""
        logprobs_BT = self._idle_logprobs(self._agent.model)
        if with_reference and self._reference is not None:
            with self._reference.policy() as reference:
                self._idle_logprobs(reference)
        return logprobs_BT

    def _idle_logprobs(self, model: Any) -> Tensor:
        return response_logprobs(model, IDLE_PAIRS, Sampling(1), self._agent.device)[0]

    def no_old_policy(self) -> OldPolicyLogprobs:
        """Return an empty memory of the responses whose pi_old this learner computes."""
        return OldPolicyLogprobs(own=self._recomputes_old, cross=self._rescores)

    def make(
        self,
        samples: Sequence[LearnerSample],
        updates_done: int,
        old: OldPolicyLogprobs,
        mean_tokens: float | None = None,
    ) -> LossBatch:
        """Return one micro-batch as tensors, after a forward pass of the agent and of the reference, if any.

        ``old`` must hold pi_old of the responses it covers if an update of the step was made.
        """
        device = self._agent.device
        logprobs_BT, mask_BT = self.logprobs(samples)
        reference_BT = None
        if self._reference is not None:
            with self._reference.policy() as reference:
                reference_BT, _ = self.logprobs(samples, reference)
        behaviour = [token_behaviour(sample) for sample in samples]
        longest = logprobs_BT.shape[1]
        behaviour_BT = torch.tensor(
            [[*row, *[0.0] * (longest - len(row))] for row in behaviour], dtype=logprobs_BT.dtype
        )

        def column(values: list[float]) -> Tensor:
            return copy_to_device(values, device, torch.float32)

        batch = LossBatch(
            logprobs_BT=logprobs_BT,
            mask_BT=mask_BT,
            behaviour_logprobs_BT=copy_to_device(behaviour_BT, device),
            behaviour_logprob_B=sequence_behaviour(samples, logprobs_BT, mask_BT),
            source_length_B=column([sample.source_length for sample in samples]),
            advantages_B=column([sample.advantage for sample in samples]),
            is_own_B=copy_to_device([sample.is_own for sample in samples], device),
            updates_done=updates_done,
            reference_logprobs_BT=reference_BT,
            mean_tokens=mean_tokens,
            max_tokens=self._sampling.max_new_tokens,
        )
        if self._recomputes_old or self._rescores:
            return self._with_old_policy(batch, samples, old)
        return batch

    def _with_old_policy(
        self, batch: LossBatch, samples: Sequence[LearnerSample], old: OldPolicyLogprobs
    ) -> LossBatch:
        """Return the batch with this learner's pi_old in the rows that it is computed of.

        If these are own rows, the sampler's numbers are kept separately.
        """
        if batch.updates_done == 0:
            old.remember(samples, batch.logprobs_BT)
        old_BT = old.replace(batch.behaviour_logprobs_BT, samples)
        covered_B = copy_to_device([old.covers(sample) for sample in samples], self._agent.device)
        length_B = batch.mask_BT.sum(dim=-1).to(batch.source_length_B.dtype)
        batch = replace(
            batch,
            behaviour_logprobs_BT=old_BT,
            behaviour_logprob_B=torch.where(covered_B, old_BT.sum(dim=-1), batch.behaviour_logprob_B),
            source_length_B=torch.where(covered_B, length_B, batch.source_length_B),
            sampler_logprobs_BT=batch.behaviour_logprobs_BT if self._recomputes_old else None,
        )
        if self._recomputes_old:
            return replace(batch, mismatch_cap=self._mismatch_cap)
        return batch
