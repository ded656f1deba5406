"""Compile a learner's decoder layers if that is wanted and works; go on without compilation otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from hacrl.models.agent import Agent
from hacrl.models.compile import compiled, compiles_by_default, is_compile_error
from hacrl.models.compile_trial import find_compile_problem
from hacrl.models.device import free_failed_attempt, is_out_of_memory
from hacrl.models.packing import packed_tokens
from hacrl.models.sharding import sharding_of
from hacrl.training.batching import token_pairs
from hacrl.training.gradient_checkpointing import checkpointed_layers
from hacrl.training.learn_stats import LearnStats
from hacrl.types import LearnerSample


class LayerCompilation:
    """Whether an agent's layers are compiled while it learns. The first micro-batch tries whether it works.

    ``wanted``: ``learning.compile``; None: as suits the model. Layers of a sharded agent are never compiled.
    """

    def __init__(self, agent: Agent, wanted: bool | None) -> None:
        self._agent = agent
        self._wanted = wanted
        # None: not tried yet
        self._compiles: bool | None = None if sharding_of(agent.model) is None else False
        self._retries = False  # in the next step: memory ran out in the trial

    def start_step(self) -> None:
        """Let the next micro-batch repeat a trial that ran out of memory."""
        if self._retries:
            self._compiles, self._retries = None, False

    def layers(self, micro_batch: Sequence[LearnerSample], stats: LearnStats) -> AbstractContextManager[None]:
        """Return a block in which the layers are compiled, if that is wanted and works."""
        model = self._agent.model
        if self._compiles is None:
            wanted = compiles_by_default(model) if self._wanted is None else self._wanted
            try:
                with checkpointed_layers(model):  # as in training
                    tokens = packed_tokens(token_pairs(micro_batch))
                    problem = find_compile_problem(model, tokens) if wanted else None
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                free_failed_attempt(error, self._agent.device)
                self._retries, wanted, problem = True, False, None
            self._compiles = wanted
            if problem is not None:
                self._stop(problem, stats)
        return compiled(model, self._compiles)

    def give_up_after(self, error: Exception, stats: LearnStats) -> bool:
        """Compile no more if the compiler raised this error; return whether it did."""
        if not self._compiles or not is_compile_error(error):
            return False
        free_failed_attempt(error, self._agent.device)
        self._stop(type(error).__name__, stats)
        return True

    def _stop(self, problem: str, stats: LearnStats) -> None:
        self._compiles = False
        stats.notes.append(
            f"agent {self._agent.name!r}: its layers could not be compiled ({problem}), so learning is "
            "slower than it could be. learning.compile=false skips the attempt"
        )
