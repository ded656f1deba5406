"""Update an engine at a chosen forward pass of a generation, and what its samples must then be."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hacrl.engines.base import GenerationRequest, Sample
from hacrl.engines.hf.detached import DetachedEngine
from hacrl.types import Sampling
from tests.support.engines import change_weights
from tests.support.forward import warped


class UpdateInGeneration:
    """Changes the policy and syncs the engine, in another thread, during one forward pass of the copy.

    ``models`` are copies of the policy's model, by version.
    """

    def __init__(self, engine: DetachedEngine, at: Sequence[int]) -> None:
        self.engine = engine
        self.models: dict[int, Any] = {}
        self.reports: list[Any] = []
        self._at = list(at)  # numbers of forward passes, from 1
        self._passes = 0
        self._threads: list[threading.Thread] = []
        self._keep_model()

    def generate(self, request: GenerationRequest) -> list[Sample]:
        """Return the samples of a generation with the updates."""
        self.engine.sync()
        assert self.engine._copy is not None
        hook = self.engine._copy.policy.model.register_forward_hook(self._on_pass)
        try:
            return self.engine.generate(request)
        finally:
            hook.remove()
            for thread in self._threads:
                thread.join(60)
                assert not thread.is_alive()

    def _on_pass(self, *_: Any) -> None:
        if threading.current_thread() in self._threads:
            return  # a pass of the proof, while the generation waits
        self._passes += 1
        if self._passes in self._at:
            for thread in self._threads:
                thread.join(60)  # the update before
            thread = threading.Thread(target=self._update)
            self._threads.append(thread)
            thread.start()
            while not self.engine._live_update.is_announced:
                assert thread.is_alive()
                thread.join(0.001)

    def _update(self) -> None:
        change_weights(self.engine.policy, seed=100 + len(self.models), size=0.05)  # type: ignore[arg-type]
        self._keep_model()
        self.reports.append(self.engine.sync())

    def _keep_model(self) -> None:
        policy = self.engine.policy
        self.models[policy.policy_version] = copy.deepcopy(policy.model)


@torch.no_grad()
def cached_logprobs(
    models: Mapping[int, Any], prompt: Sequence[int], sample: Sample, sampling: Sampling
) -> list[float]:
    """Return the log-probability of each token, one sequence alone, in transformers' own cache.

    A token is computed with the weights that give the next token's logits. The cache keeps what is in it.
    """
    versions = [version for version, tokens in sample.versions for _ in range(tokens)]
    assert len(versions) == len(sample.token_ids)
    inputs, cache, found = torch.tensor([list(prompt)]), None, []
    for version, token in zip(versions, sample.token_ids, strict=True):
        out = models[version](input_ids=inputs, past_key_values=cache, use_cache=True)
        logprobs = torch.log_softmax(warped(out.logits[:, -1].float(), sampling), dim=-1)
        found.append(float(logprobs[0, token]))
        inputs, cache = torch.tensor([[token]]), out.past_key_values
    return found
