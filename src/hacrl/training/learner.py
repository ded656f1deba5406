"""One agent's updates of one step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hacrl.algorithms.methods import Method
from hacrl.config.schema import FEW_TOKENS, LearningSettings
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.compile import compiled, compiles_by_default, is_compile_error
from hacrl.models.compile_trial import find_compile_problem
from hacrl.models.device import (
    HostCopy,
    copy_to_device,
    current_device,
    free_failed_attempt,
    is_out_of_memory,
)
from hacrl.models.logprobs import response_logprobs, uses_packing
from hacrl.models.lora import check_trainable
from hacrl.models.own_policy import check_own_policy
from hacrl.models.packing import packed_tokens
from hacrl.models.packing_support import packed_sequences
from hacrl.models.reference_policy import make_reference
from hacrl.training.batching import TokenBudget, loss_masks, minibatches, token_pairs
from hacrl.training.deferred import ReadLater
from hacrl.training.gradient_checkpointing import checkpointed_layers
from hacrl.training.metrics import LearnStats, PassResult
from hacrl.training.offload import Transfers
from hacrl.training.old_policy import OldLogprobs, first_uses, sampler_differences, spread_out
from hacrl.training.optimizer import MasterWeightAdamW
from hacrl.types import LearnerSample, LossBatch, Sampling

MAX_BAD_UPDATES = 5  # in a row with a loss or gradient that is not finite; then the run ends
GAP_SAMPLES = 8  # enough to see a sampler go wrong in a step from which nothing is learnt


@dataclass
class _Step:
    """A step under way."""

    batches: list[list[LearnerSample]]  # one per update
    stats: LearnStats = field(default_factory=LearnStats)
    old: OldLogprobs = field(default_factory=OldLogprobs)


class Learner:
    """Turns samples into parameter updates of one agent.

    Memory that runs out and numbers that are not finite cost an attempt or an update, not the run.
    ``exact_sampler``: own rollouts come with the numbers this learner would compute, to float32 rounding.
    ``leaves``: what sends its optimizer away as it is made. ``most_gap``: own responses that are further from
    its policy, in nats per token on average, are refused; without it any may be learnt from.
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
        leaves: Transfers | None = None,
        most_gap: float = math.inf,
        max_bad_updates: int = MAX_BAD_UPDATES,
    ) -> None:
        check_trainable(agent.model, agent.name)
        self.agent = agent
        self.method = method
        self._settings = settings
        self._sampling = sampling
        self._most_gap = most_gap
        self._order = method.settings.choices.minibatch_order
        self._max_bad_updates = max_bad_updates
        self._recomputes_old = settings.recomputes_old_policy(exact_sampler)
        self._reference = make_reference(agent.model) if method.needs_reference else None
        self.optimizer = MasterWeightAdamW(
            [parameter for parameter in agent.model.parameters() if parameter.requires_grad],
            lr=lr or settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            leaves=leaves,
        )
        # whoever sends things away or computes them again wants memory, not speed
        spares_memory = leaves is not None or agent.model.is_gradient_checkpointing
        tokens = settings.micro_batch_tokens or FEW_TOKENS
        self._budget = TokenBudget(tokens, agent, keeps_logits=not spares_memory)
        self._compiles: bool | None = None  # not tried yet
        self._tries_again = False  # in the next step: there was no room to try
        self._bad_in_a_row = 0  # updates left out since the last one that was made

    def state_dict(self) -> dict[str, int]:
        """What lasts from step to step besides weights and the optimizer's tensors; JSON-ready."""
        return {"micro_batch_tokens": self._budget.tokens, "bad_updates_in_a_row": self._bad_in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` gave; without a size of micro-batches, that stays as it is."""
        self._budget.tokens = state.get("micro_batch_tokens", self._budget.tokens)
        self._bad_in_a_row = state["bad_updates_in_a_row"]

    def learn(self, samples: Sequence[LearnerSample], updates: int, seed: int) -> LearnStats:
        """One update per mini-batch; ``u`` counts those made within the step."""
        settings = self._settings
        if self._tries_again:
            self._compiles, self._tries_again = None, False
        step = _Step(minibatches(samples, updates, settings.epochs, self._order, seed))
        with current_device(self.agent.device):
            try:
                for number in range(len(step.batches)):
                    self._update(step, number)
            finally:  # also of an update that was left out or broken off
                self.optimizer.end_update()
        return step.stats

    def _update(self, step: _Step, number: int) -> None:
        try:
            update = self._budget.fit(partial(self._gradients, step, number), step.stats)
        except Exception as error:
            if not self._compiles or not is_compile_error(error):
                raise
            free_failed_attempt(error, self.agent.device)
            self._do_without_compiling(f"{type(error).__name__}", step.stats)
            update = self._budget.fit(partial(self._gradients, step, number), step.stats)
        # before weights move, and at no cost: reading the loss has brought these numbers, too
        check_own_policy(self.agent.name, update.sampler_differences, self._sampling, self._most_gap)
        if not update.is_finite:
            self._leave_out(update, step, number)
            return
        self._budget.fit(self.optimizer.step, step.stats)
        self.agent.policy_version += 1
        self._bad_in_a_row = 0
        step.stats.add(update)

    def _gradients(self, step: _Step, number: int) -> LearnStats:
        """Gradients of one update, and what was seen on the way. May be broken off and begun again."""
        seen = LearnStats()
        if number == 0:  # pi_old belongs to the attempt: it depends on the size of micro-batches
            step.old = OldLogprobs()
            self._before_the_first_update(step, seen)
        minibatch = step.batches[number]
        active = [sample for sample in minibatch if self._carries_signal(sample)]
        seen.skipped = len(minibatch) - len(active)
        self.optimizer.zero_gradients()
        losses: list[float] = []
        results = ReadLater[PassResult](lambda result: losses.append(seen.record(result)))
        for micro_batch in self._micro_batches(active, own_apart=number > 0):
            with (
                self._budget.charged_to(micro_batch),
                self._compiled(micro_batch, step.stats),
                packed_sequences(
                    self.agent.model, uses_packing(self.agent.model, token_pairs(micro_batch))
                ),  # backward, too
                checkpointed_layers(self.agent.model),
            ):
                batch = self.loss_batch(micro_batch, step.stats.updates, step.old)
                terms = self.method.loss(batch)
                # the mean is over the whole mini-batch: samples without signal count with loss 0
                loss = terms.loss_B.sum() / len(minibatch)
                loss.backward()  # type: ignore[no-untyped-call]
                results.add(PassResult(micro_batch, loss, batch, terms))
        results.finish()
        seen.losses.append(sum(losses, 0.0))
        seen.grad_norms.append(self.optimizer.clip_gradients(self._settings.max_grad_norm))
        return seen

    def _leave_out(self, update: LearnStats, step: _Step, number: int) -> None:
        """An update whose numbers are not finite is not made; too many in a row mean that none will be."""
        step.stats.add_bad(update)
        self._bad_in_a_row += 1
        most = self._max_bad_updates
        what = (
            f"agent {self.agent.name!r}: loss {update.losses[0]} and gradient norm {update.grad_norms[0]} at "
            f"update {number + 1} of the step are not finite"
        )
        if self._bad_in_a_row >= most:
            raise TrainingError(
                f"{what}, {self._bad_in_a_row} in a row; the weights were "
                "left as they were. Lower learning.lr, or check the model's weights and dtype"
            )
        if step.stats.bad_updates == 1:
            step.stats.notes.append(
                f"{what}: it was left out, the weights are as they were. {most} such updates in a row would "
                "end the run"
            )

    def _before_the_first_update(self, step: _Step, seen: LearnStats) -> None:
        """Passes at the weights that sampled: for pi_old of later updates, and so that there is always a gap.

        Own responses of the first update are left out, since its own forward pass will do.
        """
        own = first_uses([sample for sample in minibatch if sample.is_own] for minibatch in step.batches)
        first, *later = [[sample for sample in samples if self._carries_signal(sample)] for samples in own]
        needed = later if self._recomputes_old else []
        if not first and not any(needed):
            needed = [spread_out([sample for samples in own for sample in samples], GAP_SAMPLES)]

        def compare(passed: tuple[Sequence[LearnerSample], HostCopy]) -> None:
            samples, logprobs = passed
            seen.sampler_differences += sampler_differences(samples, *logprobs.wait())

        passes = ReadLater(compare)
        for samples in needed:
            for micro_batch in self._budget.micro_batches(samples):
                with (
                    self._budget.charged_to(micro_batch),
                    self._compiled(micro_batch, step.stats),
                    torch.no_grad(),
                ):
                    logprobs_BT, _ = self._logprobs(micro_batch)
                    step.old.remember(micro_batch, logprobs_BT)
                passes.add((micro_batch, HostCopy(logprobs_BT)))
        passes.finish()

    def _micro_batches(
        self, samples: Sequence[LearnerSample], own_apart: bool
    ) -> Iterator[list[LearnerSample]]:
        """With a pi_old recomputed beforehand, own responses by themselves, as they were then.

        In low precision a response's log-probability depends on what it is batched with, by as much as
        the clip range is wide; in equal batches the ratio is exactly 1 until the weights move.
        """
        parts = [samples]
        if own_apart and self._recomputes_old:
            parts = [[s for s in samples if s.is_own], [s for s in samples if not s.is_own]]
        for part in parts:
            yield from self._budget.micro_batches(part)

    def _compiled(
        self, micro_batch: Sequence[LearnerSample], stats: LearnStats
    ) -> AbstractContextManager[None]:
        """With the model's layers compiled, if that is wanted and works; whether it does is tried once."""
        model = self.agent.model
        if self._compiles is None:
            wanted = compiles_by_default(model) if self._settings.compile is None else self._settings.compile
            try:
                with checkpointed_layers(model):  # as learning will
                    tokens = packed_tokens(token_pairs(micro_batch))
                    problem = find_compile_problem(model, tokens) if wanted else None
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                free_failed_attempt(error, self.agent.device)
                self._tries_again, wanted, problem = True, False, None
            self._compiles = wanted
            if problem is not None:
                self._do_without_compiling(problem, stats)
        return compiled(model, self._compiles)

    def _do_without_compiling(self, problem: str, stats: LearnStats) -> None:
        self._compiles = False
        stats.notes.append(
            f"agent {self.agent.name!r}: its layers could not be compiled ({problem}), so learning is slower "
            "than it could be. learning.compile=false says that it need not be tried"
        )

    def _carries_signal(self, sample: LearnerSample) -> bool:
        return sample.advantage != 0 or (self._reference is not None and sample.is_own)

    def _logprobs(self, samples: Sequence[LearnerSample], model: Any = None) -> tuple[Tensor, Tensor]:
        """(B, T) and mask, by this agent's model or the given one."""
        model = self.agent.model if model is None else model
        pairs, masks = token_pairs(samples), loss_masks(samples)
        return response_logprobs(model, pairs, self._sampling, self.agent.device, masks)

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
        behaviour = [_per_response_token(sample) for sample in samples]
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
            behaviour_logprob_B=column([sample.behaviour_logprob for sample in samples]),
            source_length_B=column([sample.source_length for sample in samples]),
            advantages_B=column([sample.advantage for sample in samples]),
            is_own_B=copy_to_device([sample.is_own for sample in samples], device),
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


def _per_response_token(sample: LearnerSample) -> Sequence[float]:
    """Return the source's log-probabilities aligned with the response: 0 for observations; () if unknown."""
    logprobs = sample.behaviour_logprobs
    if logprobs is None or len(logprobs) == len(sample.loss_mask):
        return logprobs or ()
    left = iter(logprobs)
    return [next(left) if is_action else 0.0 for is_action in sample.loss_mask]
