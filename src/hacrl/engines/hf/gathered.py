"""Sample for an agent whose learner is sharded: with a whole copy of its weights on rank 0's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hacrl.engines.base import GenerationRequest, OnFinished, Policy, Sample, SyncReport
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.updatable import CopiedPolicy
from hacrl.engines.sync_check import SyncCheck
from hacrl.models.device import current_device
from hacrl.models.sharding import copy_weights, whole_model

NAME = "the transformers engine"  # in messages
WEIGHT_SYNC = "gathered"  # in reports


class GatheredEngine:
    """Samples with a copy that is gathered before every generation and freed after it.

    ``probes``: prompts whose responses prove that the copy computes what the ranks compute together.
    """

    shares_weights = False
    runs_concurrently = False
    updates_while_generating = False
    follows_policy = True

    def __init__(
        self,
        policy: Policy,
        probes: Sequence[tuple[int, ...]],
        max_batch: int,
        compiles: bool | None = None,
    ) -> None:
        self.policy = policy
        self._probes = list(probes)
        self._max_batch = max_batch
        self._compiles = compiles
        self._engine: TransformersEngine | None = None  # with the copy; None: freed
        self._report: SyncReport | None = None  # of the last copy
        self._is_checked = False  # whether the model can generate

    def sync(self, proven: bool = True) -> SyncReport:
        """Gather the weights and prove the copy, unless there is a copy of the current weights."""
        if self._report is None or self._report.policy_version != self.policy.policy_version:
            self._engine = None
            self._gather()
        assert self._report is not None
        return self._report

    def _gather(self) -> TransformersEngine:
        policy = self.policy
        with current_device(policy.device):
            copy = CopiedPolicy(policy, whole_model(policy.model, policy.device), policy.device)
            copy_weights(policy.model, copy.model)
            engine = TransformersEngine(copy, self._max_batch, compiles=self._compiles)
            if not self._is_checked:
                engine.check_generation()
                self._is_checked = True
            check = SyncCheck(policy, self._probes)
            stop_ids = frozenset(policy.stop_ids)
            request = GenerationRequest(check.prompts, 1, check.sampling, stop_ids, seed=0)
            for index, sample in enumerate(engine.generate(request)):
                check.add(index, sample)
            gap = check.gap(NAME, None)
        self._engine = engine
        self._report = SyncReport(policy.policy_version, WEIGHT_SYNC, gap, restarts=0)
        return engine

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """See :class:`hacrl.engines.base.Engine`."""
        self.sync()
        engine = self._engine or self._gather()
        return engine.generate(request, on_finished)

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        return [] if self._engine is None else self._engine.take_notes()

    def state_dict(self) -> dict[str, int]:
        """Return the largest batch that fits; JSON-ready."""
        return {"max_batch": self._max_batch if self._engine is None else self._engine.max_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._max_batch = state.get("max_batch", self._max_batch)

    def sleep(self) -> None:
        """Free the copy."""
        if self._engine is not None:
            self._max_batch = self._engine.max_batch
            self._engine.close()
            self._engine = None

    def close(self) -> None:
        """Free the copy."""
        self.sleep()
