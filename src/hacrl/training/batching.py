"""How a step's samples are cut into mini-batches (one update each) and micro-batches (one forward each).

How many tokens one forward pass of a learner may have: fewer, once memory has run out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

from hacrl.config.schema import MinibatchOrder
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.device import free_failed_attempt, is_out_of_memory
from hacrl.models.lm_head import logit_caching
from hacrl.models.logprobs import uses_packing
from hacrl.models.packing import TokenPair, packed_tokens, padded_tokens
from hacrl.models.packing_support import has_fused_attention
from hacrl.training.metrics import LearnStats
from hacrl.types import LearnerSample


def ordered(
    samples: Sequence[LearnerSample], order: MinibatchOrder, rng: random.Random
) -> list[LearnerSample]:
    """Shuffled: own and others' together, or own first."""
    shuffled = list(samples)
    rng.shuffle(shuffled)
    if order == "self_first":
        shuffled.sort(key=lambda sample: not sample.is_own)  # stable: each part stays shuffled
    return shuffled


def minibatches(
    samples: Sequence[LearnerSample], updates: int, epochs: int, order: MinibatchOrder, seed: int
) -> list[list[LearnerSample]]:
    """``updates`` mini-batches over ``epochs`` passes, of equal size but for one sample.

    With fewer samples than updates some mini-batches are empty and make no update.
    """
    rng = random.Random(seed)
    passes = [ordered(samples, order, rng) for _ in range(epochs)]
    stream = [sample for one_pass in passes for sample in one_pass]
    edges = [len(stream) * i // updates for i in range(updates + 1)]
    cut = [stream[start:end] for start, end in pairwise(edges)]
    return [minibatch for minibatch in cut if minibatch]


def micro_batches(
    samples: Sequence[LearnerSample], token_budget: int, packed: bool = False, most_seen: int | None = None
) -> list[list[LearnerSample]]:
    """Groups that fit the budget, longest first: padded ones of similar length, packed ones by prompt.

    Longest first, so that running out of memory shows in the first forward pass, not in the last.
    A sample longer than the budget goes alone. Packed ones are as few as the budget allows and about equal:
    a GPU has done a small one before Python has launched the next. ``most_seen``: their tokens, with a prompt
    for each of them.
    """
    if not packed:
        return list(_cut(sorted(samples, key=sample_length, reverse=True), token_budget, packed))
    in_order = _by_prompt(samples)
    fewest = len(list(_cut(in_order, token_budget, packed, most_seen)))
    too_low, enough = 0, token_budget
    while enough - too_low > max(1, token_budget // 256):
        between = (too_low + enough) // 2
        if len(list(_cut(in_order, between, packed, most_seen))) > fewest:
            too_low = between
        else:
            enough = between
    return list(_cut(in_order, enough, packed, most_seen))


def _cut(
    in_order: Sequence[LearnerSample], most_tokens: int, packed: bool, most_seen: int | None = None
) -> Iterator[list[LearnerSample]]:
    """Groups of neighbours, each as large as it may be."""
    batch: list[LearnerSample] = []
    tokens = seen = 0
    for sample in in_order:
        length = sample_length(sample)
        if not batch:
            more = length
        elif packed:  # a prompt that the one before has is there already
            same = sample.prompt_ids == batch[-1].prompt_ids
            more = len(sample.response_ids) + (0 if same else len(sample.prompt_ids))
        else:
            more = sample_length(batch[0])
        is_too_much = tokens + more > most_tokens or (most_seen is not None and seen + length > most_seen)
        if batch and is_too_much:
            yield batch
            batch, tokens, seen, more = [], 0, 0, length
        batch.append(sample)
        tokens += more
        seen += length
    if batch:
        yield batch


def _by_prompt(samples: Sequence[LearnerSample]) -> list[LearnerSample]:
    """Those with the same prompt together, since it is computed once for all of them."""
    groups: dict[tuple[int, ...], list[LearnerSample]] = {}
    for sample in sorted(samples, key=sample_length, reverse=True):
        groups.setdefault(sample.prompt_ids, []).append(sample)
    return [sample for group in groups.values() for sample in group]


def batch_tokens(samples: Sequence[LearnerSample], packed: bool) -> int:
    """Tokens that a forward pass over these samples computes."""
    return (packed_tokens if packed else padded_tokens)(token_pairs(samples))


def token_pairs(samples: Sequence[LearnerSample]) -> list[TokenPair]:
    """Prompt and response of each."""
    return [(sample.prompt_ids, sample.response_ids) for sample in samples]


def loss_masks(samples: Sequence[LearnerSample]) -> list[tuple[bool, ...]] | None:
    """Return the loss mask of each response; None if every token of every response is an action's."""
    masks = [sample.loss_mask for sample in samples]
    return None if all(map(all, masks)) else masks


def sample_length(sample: LearnerSample) -> int:
    """Tokens of prompt and response."""
    return len(sample.prompt_ids) + len(sample.response_ids)


Result = TypeVar("Result")
# Where attention has no kernel for shared prompts, every response gets a copy of its prompt's keys: so many
# times the budget, counted with their prompts, are learnt from at a time.
SEEN = 4


class _TooLargeError(Exception):
    """Memory ran out over a micro-batch."""

    def __init__(self, samples: Sequence[LearnerSample], packed: bool) -> None:
        self.samples = len(samples)
        self.longest = max(map(sample_length, samples))
        self.tokens = batch_tokens(samples, packed)
        super().__init__(f"{self.samples} samples of up to {self.longest} tokens")


class TokenBudget:
    """Most tokens of a micro-batch, padding included. Shrinks when memory runs out, for the whole run.

    ``keeps_logits``: where there is room. Once memory has run out none are; that comes first, and no number
    depends on it.
    """

    def __init__(self, tokens: int, agent: Agent, keeps_logits: bool) -> None:
        self.tokens = tokens
        self._agent = agent
        self._keeps_logits = keeps_logits
        self._has_kept_logits = False
        self._counts_packed = False  # tokens of the last samples that were cut

    def micro_batches(self, samples: Sequence[LearnerSample]) -> list[list[LearnerSample]]:
        """The samples in groups that fit."""
        if not samples:
            return []
        self._counts_packed = self._are_packed(samples)
        has_kernel = has_fused_attention(self._agent.model)
        most_seen = None if has_kernel else SEEN * self.tokens
        return micro_batches(samples, self.tokens, self._counts_packed, most_seen)

    def _are_packed(self, samples: Sequence[LearnerSample]) -> bool:
        """By what they are counted: a GPU without a kernel for it pads attention of all to one size."""
        model = self._agent.model
        if model.device.type == "cuda":
            return has_fused_attention(model)
        return uses_packing(model, token_pairs(samples))

    @contextmanager
    def charged_to(self, micro_batch: Sequence[LearnerSample]) -> Iterator[None]:
        """Memory that runs out within the block has run out because of these samples."""
        with logit_caching(self._keeps_logits) as waiting:
            try:
                yield
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # counted as it was cut, also if it is computed in rows after all: or nothing would shrink
                raise _TooLargeError(micro_batch, self._counts_packed) from error
            finally:
                self._has_kept_logits |= waiting.any_cached

    def fit(self, attempt: Callable[[], Result], stats: LearnStats) -> Result:
        """What ``attempt`` gives in micro-batches that fit: until they do, it is begun again."""
        while True:
            try:
                return attempt()
            except _TooLargeError as error:
                free_failed_attempt(error, self._agent.device)
                stats.notes.append(self._make_room(error))
                stats.oom_retries += 1
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise self.hopeless(error, "weights, gradients and optimizer") from error

    def hopeless(self, error: BaseException, what: str) -> TrainingError:
        """The error for memory that runs out however small the micro-batches are."""
        free_failed_attempt(error, self._agent.device)
        name = self._agent.name
        return TrainingError(
            f"agent {name!r}: {what} did not fit into the memory of {self._agent.device} beside what else is "
            f"there. Set learning.offload=all, agents.{name}.gradient_checkpointing=true or "
            f"agents.{name}.lora, give the agent a device of its own (agents.{name}.device), lower "
            "rollout.max_new_tokens, or, if vLLM engines stay awake there, set vllm.sleep=true"
        )

    def _make_room(self, error: _TooLargeError) -> str:
        """For the next attempt; a sentence about it."""
        if not self._has_kept_logits:
            return self._shrink(error)
        # in another micro-batch, maybe: what was free then need not be in one piece now
        self._keeps_logits = self._has_kept_logits = False
        return (
            f"agent {self._agent.name!r}: learning from {error} at once did not fit into the memory of "
            f"{self._agent.device} beside logits that wait for the backward pass; from now on they are made "
            "again in it. The update was begun again, nothing is lost"
        )

    def _shrink(self, error: _TooLargeError) -> str:
        """Halve, until a micro-batch like the one that failed would be smaller; a sentence about it."""
        if error.samples == 1:
            raise self.hopeless(error, f"learning from a single sample of {error.longest} tokens") from error
        before = self.tokens
        while self.tokens >= error.tokens:
            self.tokens //= 2
        return (
            f"agent {self._agent.name!r}: learning from {error} at once did not fit into the memory of "
            f"{self._agent.device}; learning.micro_batch_tokens counts as {self.tokens} instead of {before} "
            "from now on. The update was begun again, nothing is lost"
        )
