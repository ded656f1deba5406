"""Sample with several copies of the policy's model, each in a process of its own.

Prompts are split over the replicas. Every response has a seed of its own, so responses depend neither on the
number of replicas nor on which one samples them, but for rounding. A replica that dies or falls silent is
given up: the others sample what it leaves, and the next weight sync starts it again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from hacrl.engines.base import GenerationRequest, OnFinished, Policy, Sample, SyncReport
from hacrl.engines.replicas.connection import sample_of
from hacrl.engines.replicas.fleet import Fleet, FleetSettings
from hacrl.engines.replicas.generation import Generation
from hacrl.engines.replicas.handle import ReplicaHandle, ReplicaLostError
from hacrl.engines.replicas.placement import ReplicaPlacement
from hacrl.engines.replicas.weight_broadcast import WeightGroup, send_weights, sent_weights
from hacrl.engines.sync_check import EngineError, SyncCheck
from hacrl.models.device import current_device

MAX_ATTEMPTS = 4  # to send weights, if replicas are lost meanwhile


class ReplicaEngine:
    """Keeps replicas at the policy's weights and distributes prompts over them.

    ``probes``: prompts whose responses prove that every replica computes what the policy computes.
    """

    shares_weights = False
    runs_concurrently = True
    updates_while_generating = True

    def __init__(
        self,
        policy: Policy,
        probes: Sequence[tuple[int, ...]],
        settings: FleetSettings,
        placement: ReplicaPlacement,
    ) -> None:
        self.policy = policy
        self.follows_policy = True
        self._probes = list(probes)
        self._max_batch = settings.max_batch
        self._fleet = Fleet(settings, placement)
        self._syncing = threading.Lock()
        self._generating = threading.Lock()
        self._report: SyncReport | None = None  # of the present weights

    def sync(self, proven: bool = True) -> SyncReport:
        """Start replicas that do not run, and send all of them the policy's weights. See :class:`Engine`."""
        with self._syncing:
            report = self._report
            if report is None or report.policy_version != self.policy.policy_version:
                self._fleet.is_syncing = True
                try:
                    report = self._report = self._update()
                finally:
                    self._fleet.is_syncing = False
            return report

    def _update(self) -> SyncReport:
        """Send the weights; start again without replicas that are lost meanwhile."""
        self._report = None
        for _ in range(MAX_ATTEMPTS):
            self._fleet.start_missing()
            try:
                with current_device(self.policy.device):
                    return self._send()
            except ReplicaLostError as error:
                self._fleet.lose(error)
        raise EngineError(
            f"agent {self.policy.name!r}: each of {MAX_ATTEMPTS} weight syncs in a row lost a replica; "
            f"{self._fleet.notes[-1]}"
        )

    def _send(self) -> SyncReport:
        """Broadcast the weights and prove every replica."""
        fleet, policy, version = self._fleet, self.policy, self.policy.policy_version
        group, replicas = fleet.group(), fleet.replicas
        everything = not all(replica.has_weights for replica in replicas)
        fleet.post(replicas, {"do": "update"})
        try:
            weights = sent_weights(policy.model, everything)
            send_weights(weights, lambda message: fleet.post(replicas, message), group)
        except RuntimeError as error:
            raise fleet.explained(error) from error
        gap = self._prove(replicas, version)
        for replica in replicas:
            replica.has_weights = True
        return SyncReport(version, _name(group), gap, restarts=fleet.restarts)

    def _prove(self, replicas: Sequence[ReplicaHandle], version: int) -> float:
        """Return the largest difference of log-probabilities of any replica."""
        check = SyncCheck(self.policy, self._probes)
        question = {
            "do": "prove",
            "version": version,
            "prompts": check.prompts,
            "new_tokens": check.sampling.max_new_tokens,
        }
        gaps = []
        for replica, reply in [(replica, replica.ask(question)) for replica in replicas]:
            check = SyncCheck(self.policy, self._probes)
            for index, sample in enumerate(reply.result(self._fleet.settings.timeout)):
                check.add(index, sample_of(sample))
            gaps.append(check.gap(replica.name, None))
        return max(gaps)

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """See :class:`hacrl.engines.base.Engine`."""
        request.check_lengths(self.policy.name, self.policy.context_length)
        if self.follows_policy or self._report is None:
            self.sync()
        if not self._generating.acquire(blocking=False):
            raise EngineError(
                f"the replicas of agent {self.policy.name!r} generate already; they serve one request at once"
            )
        try:
            generation = Generation(self._fleet, request, on_finished or (lambda _: None), self._max_batch)
            samples = generation.run()
            self._max_batch = generation.max_batch
            return samples
        finally:
            self._generating.release()

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self._fleet.notes = self._fleet.notes, []
        return notes

    def state_dict(self) -> dict[str, int]:
        """Return the largest batch that fits a replica; JSON-ready."""
        return {"max_batch": self._max_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._max_batch = state.get("max_batch", self._max_batch)

    def sleep(self) -> None:
        """Let the replicas free their KV caches, unless they are small or in use."""
        self._fleet.post(self._fleet.replicas, {"do": "free_cache"})

    def close(self) -> None:
        """End the replicas; the next :meth:`sync` starts them again."""
        self._report = None
        self._fleet.close()


def _name(group: WeightGroup) -> str:
    return "gloo" if group.device.type == "cpu" else "nccl"
