"""One agent's learner: turn a step's samples into parameter updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from hacrl.algorithms.methods import Method
from hacrl.config.schema import FEW_TOKENS, LearningSettings
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.architecture import check_causal
from hacrl.models.device import HostCopy, current_device
from hacrl.models.logprobs import uses_packing
from hacrl.models.lora import check_trainable
from hacrl.models.own_policy import check_own_policy
from hacrl.models.packing_support import packed_sequences
from hacrl.models.rank_group import OneRank, Ranks
from hacrl.models.reference_policy import make_reference
from hacrl.models.sharding import sharding_of
from hacrl.training.alignment import GradientAlignment, own_and_others
from hacrl.training.batching import TokenBudget, minibatches, token_pairs
from hacrl.training.gradient_checkpointing import checkpointed_layers
from hacrl.training.gradient_meter import GradientMeter
from hacrl.training.layer_compilation import LayerCompilation
from hacrl.training.learn_stats import DeferredReader, LearnStats, MicroBatchResult
from hacrl.training.loss_batches import LossBatches
from hacrl.training.offload import Transfers
from hacrl.training.old_policy import (
    OldPolicyLogprobs,
    evenly_spaced,
    first_occurrences,
    has_old_policy,
    sampler_differences,
)
from hacrl.training.optimizer import MasterWeightAdamW
from hacrl.training.rank_shares import RankShares
from hacrl.training.screening import ScreenedRows, ScreeningPolicy
from hacrl.training.sharded_optimizer import ShardedAdamW
from hacrl.types import LearnerSample, LossBatch, Sampling

# Own samples whose sampler gap is measured in a step that trains on none: enough to notice a broken sampler.
GAP_SAMPLES = 8
MAX_BAD_UPDATES = 5  # in a row, with a loss or gradient that is not finite; then the run ends


@dataclass
class _Step:
    """A step under way."""

    minibatches: list[list[LearnerSample]]  # one per update
    shares: RankShares
    probes: dict[str, list[LearnerSample]] = field(default_factory=dict)  # by source: measured in update 0
    stats: LearnStats = field(default_factory=LearnStats)
    old: OldPolicyLogprobs = field(default_factory=OldPolicyLogprobs)


class Learner:
    """Turns samples into parameter updates of one agent.

    When memory runs out, the update is repeated with less memory. When loss or gradient is not finite, the
    update is left out. Neither ends the run.

    The learner of a sharded agent is one of several ranks. All of them get the same samples, and each runs
    its share of every mini-batch. Gradients, losses and statistics are those of the whole mini-batch.

    ``exact_sampler``: own rollouts have the log-probabilities that this learner would compute, to float32
    rounding. ``offload_to``: offload optimizer state with these transfers as soon as it is made.
    ``max_policy_gap``: refuse own responses whose log-probabilities differ from the learner's by more nats
    per token on average.
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
        offload_to: Transfers | None = None,
        max_policy_gap: float = math.inf,
        max_bad_updates: int = MAX_BAD_UPDATES,
    ) -> None:
        check_trainable(agent.model, agent.name)
        check_causal(agent.model, agent.name)
        self.agent = agent
        self.method = method
        self._settings = settings
        self._sampling = sampling
        self._max_policy_gap = max_policy_gap
        self._max_bad_updates = max_bad_updates
        self._order = method.settings.choices.minibatch_order
        self._measures_alignment = method.settings.trust_window is not None
        self._recomputes_old = settings.recomputes_old_policy(exact_sampler)
        self._rescores = method.settings.rescores
        self._reference = make_reference(agent.model) if method.needs_reference else None
        self._batches = LossBatches(
            agent,
            sampling,
            settings,
            self._reference,
            recomputes_old=self._recomputes_old,
            rescores=self._rescores,
        )
        self._lr = lr or settings.lr
        sharding = sharding_of(agent.model)
        self._ranks: Ranks = OneRank() if sharding is None else sharding.group
        self.optimizer = self._make_optimizer(offload_to)
        # an agent with offloading or gradient checkpointing is short of memory: it does not keep logits
        saves_memory = offload_to is not None or agent.model.is_gradient_checkpointing or sharding is not None
        tokens = settings.micro_batch_tokens or FEW_TOKENS
        self._budget = TokenBudget(tokens, agent, not saves_memory, self._ranks)
        self._compilation = LayerCompilation(agent, settings.compile)
        self._screening = ScreeningPolicy(settings.skip_zero_gradient, agent.model)
        self._bad_in_a_row = 0  # updates left out since the last one that was made

    def _make_optimizer(self, offload_to: Transfers | None) -> MasterWeightAdamW:
        model, settings = self.agent.model, self._settings
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if sharding_of(model) is not None:
            return ShardedAdamW(model, trained, self._lr, settings.betas, settings.weight_decay)
        return MasterWeightAdamW(
            trained,
            lr=self._lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            offload_to=offload_to,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that lasts from step to step besides weights and optimizer tensors, as JSON."""
        return {
            "micro_batch_tokens": self._budget.tokens,
            "bad_updates_in_a_row": self._bad_in_a_row,
            "gradient_shares": self._screening.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; a missing micro-batch size leaves the present one."""
        self._ranks.announce("load_learner_state", lambda: {"state": dict(state)})
        self._budget.tokens = state.get("micro_batch_tokens", self._budget.tokens)
        self._bad_in_a_row = state["bad_updates_in_a_row"]
        self._screening.load_state_dict(state["gradient_shares"])

    def learn(
        self, samples: Sequence[LearnerSample], updates: int, seed: int, lr_factor: float = 1.0
    ) -> LearnStats:
        """Make up to ``updates`` updates, one per mini-batch of the samples, and return their statistics.

        ``lr_factor`` multiplies the learning rate of all of them.
        """
        self._compilation.start_step()
        settings = self._settings
        self._ranks.announce(
            "learn",
            lambda: {
                "samples": list(map(asdict, samples)),
                "updates": updates,
                "seed": seed,
                "lr_factor": lr_factor,
            },
        )
        trained = [sample for sample in samples if not sample.is_probe]
        batches = minibatches(trained, updates, settings.epochs, self._order, seed)
        step = _Step(batches, RankShares(self._ranks.world), _by_source(s for s in samples if s.is_probe))
        step.stats.learning_rate = self._lr * lr_factor
        self.optimizer.set_learning_rate(step.stats.learning_rate)
        with current_device(self.agent.device), self._ranks.together():
            try:
                for number in range(len(step.minibatches)):
                    self._update(step, number)
            finally:
                self.optimizer.end_update()
        return step.stats

    def _update(self, step: _Step, number: int) -> None:
        """Compute one update's gradients, check them, and update the weights unless they are not finite."""
        update = self._gradients(step, number)
        check_own_policy(self.agent.name, update.sampler_differences, self._sampling, self._max_policy_gap)
        if not update.is_finite:
            self._leave_out(update, step, number)
            return
        self._budget.retry_until_it_fits(self.optimizer.step, step.stats)
        self.agent.policy_version += 1
        self._bad_in_a_row = 0
        self._screening.record(update, step.stats.updates)
        step.stats.add(update)

    def _gradients(self, step: _Step, number: int) -> LearnStats:
        """Compute the gradients of one update, repeated with less memory or without compilation if needed."""
        attempt = partial(self._attempt_gradients, step, number)
        try:
            return self._budget.retry_until_it_fits(attempt, step.stats)
        except Exception as error:
            if not self._compilation.give_up_after(error, step.stats):
                raise
            return self._budget.retry_until_it_fits(attempt, step.stats)

    def _attempt_gradients(self, step: _Step, number: int) -> LearnStats:
        """Sum and clip the gradients of one mini-batch; return the update's statistics."""
        update = LearnStats()
        if number == 0:  # in every attempt anew: pi_old depends on the size of micro-batches
            step.old = self._batches.no_old_policy()
            self._run_before_first_update(step, update)
        minibatch = step.minibatches[number]
        active = [sample for sample in minibatch if self._carries_signal(sample)]
        update.skipped = len(minibatch) - len(active)
        self.optimizer.zero_gradients()
        mean_tokens = sum(sample.loss_tokens for sample in minibatch) / len(minibatch)
        losses: list[float] = []
        results = DeferredReader[MicroBatchResult](lambda result: losses.append(update.record(result)))
        meter = GradientMeter(self.optimizer) if number == 0 and self._measures_alignment else None
        alignment = GradientAlignment(self.optimizer, self._ranks)
        if meter is not None:
            self._backward_measured(active, len(minibatch), mean_tokens, step, results, meter)
        else:
            parts, compares = self._parts(active, step, number)
            for part in parts:
                self._backward_all(part, len(minibatch), mean_tokens, step, results)
                if compares:
                    alignment.part_done()
        results.finish()
        self._budget.agree()
        update.losses.append(sum(losses, 0.0))
        update = update.of_all_ranks(self._ranks)
        update.alignment = alignment.cosine()
        if meter is not None:
            update.alignments = meter.alignments(self._ranks)
        update.grad_norms.append(self.optimizer.clip_gradients(self._settings.max_grad_norm))
        return update

    def _backward_all(
        self,
        samples: Sequence[LearnerSample],
        minibatch_size: int,
        mean_tokens: float,
        step: _Step,
        results: DeferredReader[MicroBatchResult] | None,
    ) -> None:
        """Add the samples' gradients to the sums. Without ``results``, nothing else remains of them."""
        packed = self._budget.are_packed(samples)
        sources = self._screening.sources(samples, step.stats.updates, packed)
        screened = [sample for sample in samples if sample.source in sources]
        for micro_batch in self._shared_micro_batches(
            [sample for sample in samples if sample.source not in sources], step.shares
        ):
            if not micro_batch:
                self._idle_pass(with_reference=True)
                continue
            result = self._backward(micro_batch, minibatch_size, mean_tokens, step)
            if results is not None:
                results.add(result)
        if not screened:
            return
        rows = ScreenedRows(screened)
        for micro_batch in self._shared_micro_batches(screened, step.shares):
            if not micro_batch:
                with torch.no_grad():
                    self._batches.idle_forward(with_reference=True)
                continue
            result = self._screen(micro_batch, minibatch_size, mean_tokens, step, rows)
            if results is not None:
                results.add(result)
        self._budget.agree()  # numbers of a pass that ran out of memory are worthless
        for micro_batch in self._shared_micro_batches(
            rows.with_gradient(self._ranks), RankShares(self._ranks.world)
        ):
            if micro_batch:
                self._backward_rows(micro_batch, step, rows)
            else:
                self._idle_pass(with_reference=False)

    def _backward_measured(
        self,
        samples: Sequence[LearnerSample],
        minibatch_size: int,
        mean_tokens: float,
        step: _Step,
        results: DeferredReader[MicroBatchResult],
        meter: GradientMeter,
    ) -> None:
        """Run samples source by source, the own ones first, then the probes, and measure the gradients."""
        by_source = _by_source(samples)
        own = by_source.pop(self.agent.name, [])
        self._backward_all(own, minibatch_size, mean_tokens, step, results)
        meter.end_own()
        for source, part in by_source.items():
            self._backward_all(part, minibatch_size, mean_tokens, step, results)
            meter.end_source(source)
        for source, part in step.probes.items():
            active = [sample for sample in part if self._carries_signal(sample)]
            self._backward_all(active, minibatch_size, mean_tokens, step, None)
            meter.undo(source)

    def _backward(
        self, micro_batch: list[LearnerSample], minibatch_size: int, mean_tokens: float, step: _Step
    ) -> MicroBatchResult:
        """Run one micro-batch forward and backward.

        The loss is the mean over the whole mini-batch: samples without signal count with loss 0.
        """
        with self._training_pass(micro_batch, step) as packed:
            batch = self.loss_batch(micro_batch, step.stats.updates, step.old, mean_tokens)
            batch.logprobs_BT.retain_grad()  # says how much each response contributes to the gradient
            terms = self.method.loss(batch)
            loss = terms.loss_B.sum() / minibatch_size
            loss.backward()  # type: ignore[no-untyped-call]
            return MicroBatchResult(micro_batch, loss, batch, terms, packed=packed)

    def _screen(
        self,
        micro_batch: list[LearnerSample],
        minibatch_size: int,
        mean_tokens: float,
        step: _Step,
        rows: ScreenedRows,
    ) -> MicroBatchResult:
        """Run one micro-batch forward; return the numbers that :meth:`_backward` would return.

        ``rows`` keeps the gradient of the loss with respect to the log-probabilities.
        """
        packed = uses_packing(self.agent.model, token_pairs(micro_batch))
        with self._budget.guard(micro_batch), self._compilation.layers(micro_batch, step.stats):
            with torch.no_grad():
                batch = self.loss_batch(micro_batch, step.stats.updates, step.old, mean_tokens)
            batch.logprobs_BT.requires_grad_()
            terms = self.method.loss(batch)
            loss = terms.loss_B.sum() / minibatch_size
            loss.backward()  # type: ignore[no-untyped-call]
            assert batch.logprobs_BT.grad is not None
            rows.add(micro_batch, batch.logprobs_BT.grad)
            return MicroBatchResult(micro_batch, loss, batch, terms, packed=packed, screened=True)

    def _backward_rows(self, micro_batch: list[LearnerSample], step: _Step, rows: ScreenedRows) -> None:
        """Run responses forward and backward whose gradient dL / d log pi is known."""
        with self._training_pass(micro_batch, step):
            logprobs_BT, _ = self._batches.logprobs(micro_batch)
            logprobs_BT.backward(rows.gradient(micro_batch, logprobs_BT))  # type: ignore[no-untyped-call]

    @contextmanager
    def _training_pass(self, micro_batch: list[LearnerSample], step: _Step) -> Iterator[bool]:
        """Within the block, run one micro-batch forward and backward. Yield whether it is packed."""
        model = self.agent.model
        packed = uses_packing(model, token_pairs(micro_batch))
        with (
            self._budget.guard(micro_batch),
            self._compilation.layers(micro_batch, step.stats),
            packed_sequences(model, packed),
            checkpointed_layers(model),
        ):
            yield packed

    def _idle_pass(self, *, with_reference: bool) -> None:
        """Take part in the other ranks' micro-batch without adding anything to loss and gradients."""
        with self._budget.guard(()), checkpointed_layers(self.agent.model):
            logprobs_BT = self._batches.idle_forward(with_reference=with_reference)
            (logprobs_BT.sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def _leave_out(self, update: LearnStats, step: _Step, number: int) -> None:
        """Count an update that is not finite; raise if there are too many in a row."""
        step.stats.add_bad(update)
        self._bad_in_a_row += 1
        most = self._max_bad_updates
        what = (
            f"agent {self.agent.name!r}: loss {update.losses[0]} and gradient norm {update.grad_norms[0]} at "
            f"update {number + 1} of the step are not finite"
        )
        if self._bad_in_a_row >= most:
            raise TrainingError(
                f"{what}, {self._bad_in_a_row} in a row ({most} are allowed); the weights were "
                "not changed. Lower learning.lr, or check the model's weights and dtype"
            )
        if step.stats.bad_updates == 1:
            step.stats.notes.append(
                f"{what}: the update was left out, the weights were not changed. {most} such updates in a "
                "row end the run"
            )

    def _run_before_first_update(self, step: _Step, update: LearnStats) -> None:
        """Run forward passes at the weights that sampled, for pi_old of later updates and the sampler gap.

        Own responses of an older policy have no part in either. Those of the first update need no such pass:
        its own forward pass gives the same numbers. If no pass over own responses would be made at all, a few
        are run so that the gap is always measured.
        """
        occurrences = first_occurrences(step.minibatches)
        first, *later = [
            [sample for sample in samples if self._carries_signal(sample)] for samples in occurrences
        ]
        needed = [[sample for sample in samples if step.old.covers(sample)] for samples in later]
        if not any(has_old_policy(sample) for samples in (first, *needed) for sample in samples):
            own = [sample for samples in occurrences for sample in samples if has_old_policy(sample)]
            needed = [*needed, evenly_spaced(own, GAP_SAMPLES)]

        def measure_gap(result: tuple[Sequence[LearnerSample], HostCopy]) -> None:
            samples, logprobs = result
            update.sampler_differences += sampler_differences(samples, *logprobs.wait())

        results = DeferredReader(measure_gap)
        for samples in (part for found in needed for part in self._recomputed_apart(found)):
            for micro_batch in self._shared_micro_batches(samples, step.shares):
                if not micro_batch:
                    with torch.no_grad():
                        self._batches.idle_forward(with_reference=False)
                    continue
                with (
                    self._budget.guard(micro_batch),
                    self._compilation.layers(micro_batch, step.stats),
                    torch.no_grad(),
                ):
                    logprobs_BT, _ = self._batches.logprobs(micro_batch)
                    step.old.remember(micro_batch, logprobs_BT)
                results.add((micro_batch, HostCopy(logprobs_BT)))
        results.finish()

    def _parts(
        self, samples: Sequence[LearnerSample], step: _Step, number: int
    ) -> tuple[list[Sequence[LearnerSample]], bool]:
        """Return the samples in parts that share no micro-batch, and whether to compare the parts' gradients.

        Own responses are separate where their gradient is compared with the others', and where their pi_old
        was recomputed beforehand: in low precision a response's log-probability depends on the other samples
        in its batch, by as much as the clip range is wide. In equal batches the ratio is exactly 1 until the
        weights move.
        """
        parts = own_and_others(samples)
        if self._settings.measure_alignment and step.stats.alignment is None and all(parts):
            return parts, True
        if number > 0:
            return self._recomputed_apart(samples), False
        return [samples], False

    def _recomputed_apart(self, samples: Sequence[LearnerSample]) -> list[Sequence[LearnerSample]]:
        """Return own responses whose pi_old is recomputed and all others, where pi_old is recomputed."""
        if not self._recomputes_old and not self._rescores:
            return [samples]
        own = [sample for sample in samples if has_old_policy(sample)]
        return [own, [sample for sample in samples if not has_old_policy(sample)]]

    def _shared_micro_batches(
        self, samples: Sequence[LearnerSample], shares: RankShares
    ) -> list[list[LearnerSample]]:
        """Return this rank's micro-batches, with empty ones at the end: every rank has equally many."""
        if not self._ranks.is_group:
            return self._budget.micro_batches(samples)
        divided = shares.divide(samples, self._budget.are_packed(samples))
        plans = [self._budget.micro_batches(share) for share in divided]
        own = plans[self._ranks.rank]
        return own + [[] for _ in range(max(map(len, plans)) - len(own))]

    def _carries_signal(self, sample: LearnerSample) -> bool:
        return sample.advantage != 0 or (self._reference is not None and sample.is_own)

    def loss_batch(
        self,
        samples: Sequence[LearnerSample],
        updates_done: int,
        old: OldPolicyLogprobs | None = None,
        mean_tokens: float | None = None,
    ) -> LossBatch:
        """Return one micro-batch as tensors, after a forward pass of the agent and of the reference, if any.

        ``old`` must hold pi_old of own responses if it is recomputed and an update of the step was made.
        ``mean_tokens`` is the mean length of the mini-batch's responses.
        """
        return self._batches.make(samples, updates_done, old or self._batches.no_old_policy(), mean_tokens)


def _by_source(samples: Iterable[LearnerSample]) -> dict[str, list[LearnerSample]]:
    """Return the samples of each source, sources sorted by name."""
    found: dict[str, list[LearnerSample]] = {}
    for sample in samples:
        found.setdefault(sample.source, []).append(sample)
    return dict(sorted(found.items()))
