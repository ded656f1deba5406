"""Sample with a copy of the policy's model, so that sampling and learning happen at the same time.

The copy decodes as :class:`TransformersEngine` does: equal weights and seeds give equal samples, bit for bit
on equal devices. New weights are copied between two tokens of a generation, and every sample says which
policy version sampled which of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hacrl.engines.base import GenerationRequest, OnFinished, Policy, Sample, SyncReport
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.live_update import UPDATE_SECONDS, LiveUpdate
from hacrl.engines.hf.weight_copy import CopiedPolicy, copied_model, copy_changed_weights
from hacrl.engines.sync_check import FORWARD_PASS, SyncCheck
from hacrl.models.device import current_device

WEIGHT_SYNC = "copy"  # in reports


class DetachedEngine:
    """Samples with weights of its own, which :meth:`sync` brings to the policy's.

    ``probes``: prompts whose responses prove that the copy computes what the policy computes. ``device``: the
    copy's. ``timeout``: most seconds that two threads wait for each other in an update. The other settings
    are those of :class:`TransformersEngine`.
    """

    shares_weights = False
    runs_concurrently = True
    updates_while_generating = True

    def __init__(
        self,
        policy: Policy,
        probes: Sequence[tuple[int, ...]],
        device: torch.device | None = None,
        max_batch: int = 512,
        continuous: bool | None = None,
        compiles: bool | None = None,
        timeout: float = UPDATE_SECONDS,
    ) -> None:
        self.policy = policy
        self.follows_policy = True
        self.device = policy.device if device is None else device
        self._name = f"the copy of agent {policy.name!r} that samples on {self.device}"  # in messages
        self._probes = list(probes)
        self._live_update = LiveUpdate(self._name, policy.policy_version, timeout)
        self._copy: CopiedPolicy | None = None  # made by the first sync
        self._max_batch, self._continuous, self._compiles = max_batch, continuous, compiles
        self._engine: TransformersEngine | None = None
        self._prober: TransformersEngine | None = None
        self._report: SyncReport | None = None  # of the copy's present weights

    def sync(self, proven: bool = True) -> SyncReport:
        """Copy the policy's weights and prove the copy, unless it has them. See :class:`Engine`."""
        if self._report is None or self._report.policy_version != self.policy.policy_version:
            with self._live_update.update():
                self._report = self._update()
        return self._report

    def _update(self) -> SyncReport:
        """Bring the copy to the policy's weights, while no token is sampled."""
        policy, version = self.policy, self.policy.policy_version
        self._report = None  # unknown if copying breaks off
        if self._copy is None:
            copied = self._make_copy()
        else:
            copied = self._copy
            self._finish_device_work()  # the last tokens are sampled with the old weights
            copy_changed_weights(policy.model, copied.model)
        self._finish_device_work()
        copied.policy_version = self._live_update.version = version
        return SyncReport(version, WEIGHT_SYNC, self._gap(copied), restarts=0)

    def _make_copy(self) -> CopiedPolicy:
        # The lock: a pass of a model with the same config changes the config, which must not be copied then.
        with FORWARD_PASS, current_device(self.device):
            copied = CopiedPolicy(self.policy, copied_model(self.policy.model, self.device), self.device)
        self._engine = TransformersEngine(
            copied, self._max_batch, self._continuous, self._compiles, self._live_update
        )
        self._engine.check_generation()
        # An engine for itself: the slots of the other may be in use.
        self._prober = TransformersEngine(copied, continuous=False, compiles=False)
        self._copy = copied
        return copied

    def _finish_device_work(self) -> None:
        for device in {self.device, self.policy.device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _gap(self, copied: CopiedPolicy) -> float:
        """Return the difference of log-probabilities; raise PolicyMismatchError if it is too large."""
        assert self._prober is not None
        check = SyncCheck(self.policy, self._probes)
        stop_ids = frozenset(copied.stop_ids)
        request = GenerationRequest(check.prompts, 1, check.sampling, stop_ids, seed=0)
        for index, sample in enumerate(self._prober.generate(request)):
            check.add(index, sample)
        with current_device(self.policy.device):
            return check.gap(self._name, None)

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """See :class:`hacrl.engines.base.Engine`."""
        if self.follows_policy or self._engine is None:
            self.sync()
        assert self._engine is not None
        with self._live_update.generation():
            return self._engine.generate(request, on_finished)

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        return [] if self._engine is None else self._engine.take_notes()

    def state_dict(self) -> dict[str, int]:
        """Return the largest batch that fits; JSON-ready."""
        return {"max_batch": self._max_batch if self._engine is None else self._engine.max_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._max_batch = state.get("max_batch", self._max_batch)
        if self._engine is not None:
            self._engine.max_batch = self._max_batch

    def sleep(self) -> None:
        """Free the KV cache, unless it is small or in use."""
        if self._engine is not None and not self._live_update.is_generating:
            self._engine.sleep()

    def close(self) -> None:
        """Free the copy; the next :meth:`sync` makes a new one."""
        if self._engine is not None:
            self._max_batch = self._engine.max_batch
            self._engine.close()
        self._copy = self._engine = self._prober = self._report = None
