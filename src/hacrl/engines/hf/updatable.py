"""A model with weights of its own that generates, and whose weights may be replaced between two tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from hacrl.engines.base import GenerationRequest, OnFinished, Sample
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.live_update import LiveUpdate
from hacrl.types import Sampling


class Named(Protocol):
    """What a copy takes over from the policy that it is a copy of."""

    name: str
    policy_version: int
    context_length: int | None

    @property
    def stop_ids(self) -> Collection[int]:
        """Tokens that end a response."""
        ...


class CopiedPolicy:
    """A policy with a model of its own."""

    def __init__(self, original: Named, model: Any, device: torch.device) -> None:
        self.name = original.name
        self.model = model
        self.policy_version = original.policy_version  # of the weights in ``model``
        self.context_length = original.context_length
        self.device = device
        self._original = original

    @property
    def stop_ids(self) -> Collection[int]:
        """Tokens that end a response."""
        return self._original.stop_ids


class UpdatableModel:
    """Generates with a copy's weights. Change the weights within ``live_update.update()`` only."""

    def __init__(
        self,
        policy: CopiedPolicy,
        live_update: LiveUpdate,
        max_batch: int,
        continuous: bool | None = None,
        compiles: bool | None = None,
    ) -> None:
        self.policy = policy
        self.live_update = live_update
        self.engine = TransformersEngine(policy, max_batch, continuous, compiles, live_update)
        self.engine.check_generation()
        # An engine for itself: the slots of the other may be in use.
        self._prober = TransformersEngine(policy, continuous=False, compiles=False)

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """Return all samples, prompt by prompt, with the policy versions of their tokens."""
        with self.live_update.generation():
            return self.engine.generate(request, on_finished)

    def set_version(self, version: int) -> None:
        """Note the policy version of the present weights."""
        self.policy.policy_version = self.live_update.version = version

    def probe(self, prompts: Sequence[tuple[int, ...]], sampling: Sampling) -> list[Sample]:
        """Return a sample to each prompt from the present weights; a generation may wait meanwhile."""
        request = GenerationRequest(prompts, 1, sampling, frozenset(self.policy.stop_ids), seed=0)
        return self._prober.generate(request)

    def free_cache(self) -> None:
        """Free the KV cache, unless it is small or in use."""
        if not self.live_update.is_generating:
            self.engine.sleep()
