"""Sample with a copy of the policy's model, so that sampling and learning happen at the same time.

The copy decodes as :class:`TransformersEngine` does: equal weights and seeds give equal samples, bit for bit
on equal devices. New weights are copied between two tokens of a generation, and every sample says which
policy version sampled which of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hacrl.engines.base import GenerationRequest, OnFinished, Policy, Sample, SyncReport
from hacrl.engines.hf.live_update import UPDATE_SECONDS, LiveUpdate
from hacrl.engines.hf.updatable import CopiedPolicy, UpdatableModel
from hacrl.engines.hf.weight_copy import copied_model, copy_changed_weights
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
        self._copy: UpdatableModel | None = None  # made by the first sync
        self._max_batch, self._continuous, self._compiles = max_batch, continuous, compiles
        self._report: SyncReport | None = None  # of the copy's present weights

    def sync(self, proven: bool = True) -> SyncReport:
        """Copy the policy's weights and prove the copy, unless it has them. See :class:`Engine`."""
        if self._report is None or self._report.policy_version != self.policy.policy_version:
            with self._live_update.update():
                self._report = None  # unknown if copying breaks off
                self._report = self._update()
        return self._report

    def _update(self) -> SyncReport:
        """Bring the copy to the policy's weights, while no token is sampled."""
        policy, version = self.policy, self.policy.policy_version
        if self._copy is None:
            self._copy = self._make_copy()
        else:
            self._finish_device_work()  # the last tokens are sampled with the old weights
            copy_changed_weights(policy.model, self._copy.policy.model)
        self._finish_device_work()
        self._copy.set_version(version)
        check = SyncCheck(policy, self._probes)
        for index, sample in enumerate(self._copy.probe(check.prompts, check.sampling)):
            check.add(index, sample)
        with current_device(policy.device):
            return SyncReport(version, WEIGHT_SYNC, check.gap(self._name, None), restarts=0)

    def _make_copy(self) -> UpdatableModel:
        # The lock: a pass of a model with the same config changes the config, which must not be copied then.
        with FORWARD_PASS, current_device(self.device):
            copied = CopiedPolicy(self.policy, copied_model(self.policy.model, self.device), self.device)
        return UpdatableModel(copied, self._live_update, self._max_batch, self._continuous, self._compiles)

    def _finish_device_work(self) -> None:
        for device in {self.device, self.policy.device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """See :class:`hacrl.engines.base.Engine`."""
        if self.follows_policy or self._copy is None:
            self.sync()
        assert self._copy is not None
        return self._copy.generate(request, on_finished)

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        return [] if self._copy is None else self._copy.engine.take_notes()

    def state_dict(self) -> dict[str, int]:
        """Return the largest batch that fits; JSON-ready."""
        return {"max_batch": self._max_batch if self._copy is None else self._copy.engine.max_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._max_batch = state.get("max_batch", self._max_batch)
        if self._copy is not None:
            self._copy.engine.max_batch = self._max_batch

    def sleep(self) -> None:
        """Free the KV cache, unless it is small or in use."""
        if self._copy is not None:
            self._copy.free_cache()

    def close(self) -> None:
        """Free the copy; the next :meth:`sync` makes a new one."""
        if self._copy is not None:
            self._max_batch = self._copy.engine.max_batch
            self._copy.engine.close()
        self._copy, self._report = None, None
