"""Cut a step's samples into mini-batches (one update each) and micro-batches (one forward pass each).

A token budget bounds the micro-batches. When memory runs out, the budget shrinks and the update is repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from hacrl.config.schema import FEW_TOKENS, MinibatchOrder
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.device import free_failed_attempt, is_out_of_memory
from hacrl.models.lm_head import logit_caching
from hacrl.models.logprobs import uses_packing
from hacrl.models.packing import TokenPair, packed_tokens, padded_tokens
from hacrl.models.packing_support import has_fused_attention
from hacrl.models.rank_group import OneRank, Ranks
from hacrl.models.rank_guard import guarded_pass
from hacrl.types import LearnerSample

if TYPE_CHECKING:
    from hacrl.training.learn_stats import LearnStats


MAX_PADDING = 0.1  # share of a padded micro-batch that is large enough for a device without more samples


def minibatches(
    samples: Sequence[LearnerSample], updates: int, epochs: int, order: MinibatchOrder, seed: int
) -> list[list[LearnerSample]]:
    """Return ``updates`` mini-batches over ``epochs`` shuffled passes, of equal size but for one sample.

    With fewer samples than updates, the empty mini-batches are left out.
    """
    rng = random.Random(seed)
    stream = []
    for _ in range(epochs):
        shuffled = list(samples)
        rng.shuffle(shuffled)
        if order == "self_first":
            shuffled.sort(key=lambda sample: not sample.is_own)  # stable: each part stays shuffled
        stream += shuffled
    edges = [len(stream) * i // updates for i in range(updates + 1)]
    batches = [stream[start:end] for start, end in pairwise(edges)]
    return [minibatch for minibatch in batches if minibatch]


def micro_batches(
    samples: Sequence[LearnerSample],
    token_budget: int,
    packed: bool = False,
    max_unshared_tokens: int | None = None,
) -> list[list[LearnerSample]]:
    """Return groups of samples that fit the budget, longest first; a longer sample has a group of its own.

    Longest first, so that memory runs out in the first forward pass if it does. Padded groups have samples of
    similar length: a group that is large enough for a device ends where its padding would be more than a
    tenth. Packed groups have samples of the same prompt together, because a prompt is computed once for all
    of them. There are as few packed groups as the budget allows, of about equal size: a GPU would finish a
    small one before Python has launched the next.

    ``max_unshared_tokens`` bounds a packed group's tokens when each response is counted with its own prompt.
    """
    if not packed:
        return list(_cut(sorted(samples, key=sample_length, reverse=True), token_budget, packed))
    in_order = _by_prompt(samples)
    fewest = len(list(_cut(in_order, token_budget, packed, max_unshared_tokens)))
    too_low, enough = 0, token_budget  # find the lowest budget that needs no more groups
    while enough - too_low > max(1, token_budget // 256):
        between = (too_low + enough) // 2
        if len(list(_cut(in_order, between, packed, max_unshared_tokens))) > fewest:
            too_low = between
        else:
            enough = between
    return list(_cut(in_order, enough, packed, max_unshared_tokens))


def _cut(
    in_order: Sequence[LearnerSample], token_budget: int, packed: bool, max_unshared_tokens: int | None = None
) -> Iterator[list[LearnerSample]]:
    """Yield groups of neighbours, each as large as it may be."""
    batch: list[LearnerSample] = []
    tokens = unshared = 0
    for sample in in_order:
        length = sample_length(sample)
        if not batch:
            added = length
        elif packed:  # without the prompt if the sample before has the same one
            same = sample.prompt_ids == batch[-1].prompt_ids
            added = len(sample.response_ids) + (0 if same else len(sample.prompt_ids))
        else:
            added = sample_length(batch[0])
        is_too_much = tokens + added > token_budget or (
            max_unshared_tokens is not None and unshared + length > max_unshared_tokens
        )
        if not packed and tokens >= FEW_TOKENS:
            is_too_much |= unshared + length < (1 - MAX_PADDING) * (tokens + added)
        if batch and is_too_much:
            yield batch
            batch, tokens, unshared, added = [], 0, 0, length
        batch.append(sample)
        tokens += added
        unshared += length
    if batch:
        yield batch


def _by_prompt(samples: Sequence[LearnerSample]) -> list[LearnerSample]:
    """Return the samples longest first, then with those of one prompt together."""
    groups: dict[tuple[int, ...], list[LearnerSample]] = {}
    for sample in sorted(samples, key=sample_length, reverse=True):
        groups.setdefault(sample.prompt_ids, []).append(sample)
    return [sample for group in groups.values() for sample in group]


def batch_tokens(samples: Sequence[LearnerSample], packed: bool) -> int:
    """Return how many tokens a forward pass over these samples computes."""
    return (packed_tokens if packed else padded_tokens)(token_pairs(samples))


def needed_tokens(samples: Sequence[LearnerSample], packed: bool) -> int:
    """Return how many tokens must be computed for these samples, padding left out."""
    return packed_tokens(token_pairs(samples)) if packed else sum(map(sample_length, samples))


def token_pairs(samples: Sequence[LearnerSample]) -> list[TokenPair]:
    """Return prompt and response tokens of each sample."""
    return [(sample.prompt_ids, sample.response_ids) for sample in samples]


def loss_masks(samples: Sequence[LearnerSample]) -> list[tuple[bool, ...]] | None:
    """Return the loss mask of each response; None if every token of every response is an action's."""
    masks = [sample.loss_mask for sample in samples]
    return None if all(map(all, masks)) else masks


def sample_length(sample: LearnerSample) -> int:
    """Return the number of tokens of prompt and response."""
    return len(sample.prompt_ids) + len(sample.response_ids)


Result = TypeVar("Result")
# Without a fused kernel for shared prompts, attention copies a prompt's keys for every response. So a packed
# micro-batch has at most this many times the budget, when each response is counted with its own prompt.
UNSHARED_BUDGET_FACTOR = 4


class _MicroBatchTooLargeError(Exception):
    """Memory ran out in the forward or backward pass of a micro-batch."""

    def __init__(self, samples: int, longest: int, tokens: int) -> None:
        self.samples, self.longest, self.tokens = samples, longest, tokens
        super().__init__(f"{samples} samples of up to {longest} tokens")

    @staticmethod
    def of(micro_batch: Sequence[LearnerSample], packed: bool) -> _MicroBatchTooLargeError:
        """Return the error of a micro-batch."""
        longest = max(map(sample_length, micro_batch))
        return _MicroBatchTooLargeError(len(micro_batch), longest, batch_tokens(micro_batch, packed))


class TokenBudget:
    """The most tokens of a micro-batch, padding included. It shrinks when memory runs out, for the whole run.

    ``keeps_logits``: keep logits for the backward pass where memory allows it. When memory runs out, logits
    are recomputed from then on, which changes no number; only after that does the budget shrink.

    The budgets of several ranks shrink together, whichever of them ran out of memory (:meth:`agree`).
    """

    def __init__(self, tokens: int, agent: Agent, keeps_logits: bool, ranks: Ranks | None = None) -> None:
        self.tokens = tokens
        self._agent = agent
        self._ranks: Ranks = ranks or OneRank()
        self._too_large: _MicroBatchTooLargeError | None = None  # on this rank, in the attempt under way
        self._keeps_logits = keeps_logits
        self._has_kept_logits = False
        self._counts_packed = False  # how the last samples were counted

    def micro_batches(self, samples: Sequence[LearnerSample]) -> list[list[LearnerSample]]:
        """Return the samples in groups that fit the budget."""
        if not samples:
            return []
        self._counts_packed = self.are_packed(samples)
        has_kernel = has_fused_attention(self._agent.model)
        max_unshared_tokens = None if has_kernel else UNSHARED_BUDGET_FACTOR * self.tokens
        return micro_batches(samples, self.tokens, self._counts_packed, max_unshared_tokens)

    def are_packed(self, samples: Sequence[LearnerSample]) -> bool:
        """Return whether to count packed tokens: without a fused kernel, a GPU pads attention."""
        if not samples:
            return False
        model = self._agent.model
        if model.device.type == "cuda":
            return has_fused_attention(model)
        return uses_packing(model, token_pairs(samples))

    @contextmanager
    def guard(self, micro_batch: Sequence[LearnerSample]) -> Iterator[None]:
        """Within the block, attribute running out of memory to this micro-batch."""
        if self._ranks.is_group:
            with self._guard_with_ranks(micro_batch):
                yield
            return
        with logit_caching(self._keeps_logits) as kept_logits:
            try:
                yield
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # Counted like the samples were cut, even if the model has padded them: counted otherwise, the
                # micro-batch might be within the budget, and the budget would not shrink.
                raise _MicroBatchTooLargeError.of(micro_batch, self._counts_packed) from error
            finally:
                self._has_kept_logits |= kept_logits.any_cached

    @contextmanager
    def _guard_with_ranks(self, micro_batch: Sequence[LearnerSample]) -> Iterator[None]:
        """Finish the pass if memory runs out, because other ranks wait in it. :meth:`agree` tells them."""
        with logit_caching(False), guarded_pass() as guard:
            try:
                yield
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                name, device = self._agent.name, self._agent.device
                tokens = batch_tokens(micro_batch, self._counts_packed)
                raise TrainingError(
                    f"agent {name!r}: the memory of {device} ran out on rank {self._ranks.rank} of "
                    f"{self._ranks.world}, in a pass over {tokens} tokens that could not be finished for the "
                    f"other ranks. Set learning.micro_batch_tokens to less than {tokens}, or "
                    f"agents.{name}.gradient_checkpointing=true"
                ) from error
        if guard.has_failed and micro_batch:
            found = _MicroBatchTooLargeError.of(micro_batch, self._counts_packed)
            if self._too_large is None or found.tokens > self._too_large.tokens:
                self._too_large = found

    def agree(self) -> None:
        """Raise on all ranks if a guarded micro-batch of one of them ran out of memory in this attempt."""
        if not self._ranks.is_group:
            return
        own, self._too_large = self._too_large, None
        numbers = None if own is None else [own.samples, own.longest, own.tokens]
        found = [json.loads(data) for data in self._ranks.gather(json.dumps(numbers).encode())]
        failed = [_MicroBatchTooLargeError(*numbers) for numbers in found if numbers is not None]
        if failed:
            raise max(failed, key=lambda error: error.tokens)

    def retry_until_it_fits(self, attempt: Callable[[], Result], stats: LearnStats) -> Result:
        """Return ``attempt()``. When a guarded micro-batch runs out of memory, use less and repeat it."""
        while True:
            try:
                return attempt()
            except _MicroBatchTooLargeError as error:
                free_failed_attempt(error, self._agent.device)
                stats.notes.append(self._use_less_memory(error))
                stats.oom_retries += 1
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise self._does_not_fit(error, "weights, gradients and optimizer") from error

    def _does_not_fit(self, error: BaseException, what: str) -> TrainingError:
        """Return the error for memory that runs out however small the micro-batches are."""
        free_failed_attempt(error, self._agent.device)
        name = self._agent.name
        return TrainingError(
            f"agent {name!r}: {what} did not fit into the memory of {self._agent.device} beside what else is "
            f"there. Set learning.offload=all, agents.{name}.gradient_checkpointing=true or "
            f"agents.{name}.lora, give the agent a device of its own (agents.{name}.device), lower "
            "rollout.max_new_tokens, or, if vLLM engines stay awake there, set vllm.sleep=true"
        )

    def _use_less_memory(self, error: _MicroBatchTooLargeError) -> str:
        """Recompute logits, or else shrink the budget; return a note for the user."""
        if not self._has_kept_logits:
            return self._shrink(error)
        # Also if only another micro-batch kept logits: they can have fragmented the free memory.
        self._keeps_logits = self._has_kept_logits = False
        return (
            f"agent {self._agent.name!r}: learning from {error} at once did not fit into the memory of "
            f"{self._agent.device} beside logits kept for the backward pass; from now on the backward pass "
            "recomputes them. The update was repeated, nothing is lost"
        )

    def _shrink(self, error: _MicroBatchTooLargeError) -> str:
        """Halve the budget until it excludes the micro-batch that failed; return a note for the user."""
        if error.samples == 1:
            what = f"learning from a single sample of {error.longest} tokens"
            raise self._does_not_fit(error, what) from error
        before = self.tokens
        while self.tokens >= error.tokens:
            self.tokens //= 2
        return (
            f"agent {self._agent.name!r}: learning from {error} at once did not fit into the memory of "
            f"{self._agent.device}; learning.micro_batch_tokens counts as {self.tokens} instead of {before} "
            "from now on. The update was repeated, nothing is lost"
        )
