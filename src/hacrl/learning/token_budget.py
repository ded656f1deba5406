"""How many tokens one forward pass of a learner may have: fewer, once memory has run out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from hacrl.agents.agent import Agent
from hacrl.agents.kept_logits import logits_may_wait
from hacrl.agents.logprobs import packs
from hacrl.agents.out_of_memory import is_out_of_memory, let_go
from hacrl.agents.ragged import has_fused_attention
from hacrl.errors import TrainingError
from hacrl.learning.minibatches import batch_tokens, micro_batches, sample_length, token_pairs
from hacrl.learning.stats import LearnStats
from hacrl.types import LearnerSample

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
        return packs(model, token_pairs(samples))

    @contextmanager
    def charged_to(self, micro_batch: Sequence[LearnerSample]) -> Iterator[None]:
        """Memory that runs out within the block has run out because of these samples."""
        with logits_may_wait(self._keeps_logits) as waiting:
            try:
                yield
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # counted as it was cut, also if it is computed in rows after all: or nothing would shrink
                raise _TooLargeError(micro_batch, self._counts_packed) from error
            finally:
                self._has_kept_logits |= waiting.any_kept

    def fit(self, attempt: Callable[[], Result], stats: LearnStats) -> Result:
        """What ``attempt`` gives in micro-batches that fit: until they do, it is begun again."""
        while True:
            try:
                return attempt()
            except _TooLargeError as error:
                let_go(error, self._agent.device)
                stats.notes.append(self._make_room(error))
                stats.oom_retries += 1
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise self.hopeless(error, "weights, gradients and optimizer") from error

    def hopeless(self, error: BaseException, what: str) -> TrainingError:
        """The error for memory that runs out however small the micro-batches are."""
        let_go(error, self._agent.device)
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
