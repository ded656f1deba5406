"""Offload and reload the optimizers and weights of agents that share a device by turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hacrl.config.schema import STREAMING, WEIGHTS_LEAVE, OffloadLevel
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.device import free_failed_attempt, is_out_of_memory
from hacrl.training.learner import Learner
from hacrl.training.offload import CudaTransfers, OffloadGroup, Transfers
from hacrl.training.optimizer import MasterWeightAdamW


@dataclass(frozen=True)
class _Resident:
    """One agent on a device that is shared by turns."""

    name: str
    model: Any
    optimizer: MasterWeightAdamW | None  # None: the agent is frozen
    transfers: Transfers
    weights: OffloadGroup | None  # None: weights are never offloaded

    def offload_optimizer(self) -> None:
        if self.optimizer is not None:
            self.optimizer.offload(self.transfers)

    def offload_weights(self) -> None:
        if self.weights is not None:
            parameters = list(self.model.parameters())
            for parameter in parameters:
                parameter.grad = None
            self.weights.offload(parameters)

    def reload_weights(self) -> None:
        if self.weights is not None:
            self.weights.reload()

    def wait_for_weights(self) -> None:
        """Return when no copy of the weights is pending: any code may read weights at any time."""
        if self.weights is not None:
            self.weights.wait()


class Residency:
    """Decides before each phase which agents' optimizers and weights are on a shared device.

    Tensors of other agents are offloaded only when another agent's phase needs the device. Optimizers are
    offloaded beside the next phase. They are prefetched beside the first forward and backward passes, and
    the update waits for them. A streaming optimizer is on the device during its updates only. Agents that
    were not added are never offloaded.
    """

    def __init__(
        self,
        notes: Sequence[str] = (),
        make_transfers: Callable[[torch.device], Transfers] = CudaTransfers,
    ) -> None:
        self.notes = tuple(notes)  # sentences for the user about the decided offload levels
        self._make_transfers = make_transfers
        self._residents: dict[str, _Resident] = {}
        self._transfers: dict[torch.device, Transfers] = {}

    def add(self, agent: Agent, learner: Learner | None, level: OffloadLevel) -> None:
        """Offload and reload this agent from now on. Its weights must be on its device.

        ``learner``: None for a frozen agent, which has weights and no optimizer.
        """
        transfers = self.transfers(agent, level)
        if transfers is None:
            return
        weights = OffloadGroup(transfers) if level in WEIGHTS_LEAVE else None
        optimizer = None if learner is None else learner.optimizer
        if optimizer is not None and level in STREAMING:
            optimizer.stream(transfers, offload_gradients=level == "all")
        self._residents[agent.name] = _Resident(agent.name, agent.model, optimizer, transfers, weights)

    def transfers(self, agent: Agent, level: OffloadLevel) -> Transfers | None:
        """Return the transfers that copy the agent's tensors; None if nothing is offloaded."""
        if level == "never":
            return None
        if agent.device not in self._transfers:
            self._transfers[agent.device] = self._make_transfers(agent.device)
        return self._transfers[agent.device]

    def keeps_weights(self, name: str) -> bool:
        """Return whether the agent's weights are always on its device."""
        return name not in self._residents or self._residents[name].weights is None

    def prepare_generation(self, name: str) -> None:
        """Reload the agent's weights; offload all optimizers, and other agents' weights, from its device."""
        self._offload_others(name)

    def prepare_learning(self, name: str) -> None:
        """Reload the agent's weights and, unless it streams, its optimizer; offload the other agents."""
        resident = self._residents.get(name)
        if resident is None or resident.optimizer is None:
            return
        self._offload_others(name, keep_optimizer=not resident.optimizer.is_streaming)
        self._reload(resident, "optimizer", resident.optimizer.reload)

    def offload(self, name: str) -> None:
        """Offload the agent's optimizer and weights; return when other processes can use the memory."""
        if name not in self._residents:
            return
        resident = self._residents[name]
        resident.offload_optimizer()
        resident.offload_weights()
        if resident.optimizer is not None:
            resident.optimizer.wait()
        resident.wait_for_weights()
        if resident.transfers.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload_all_weights(self) -> None:
        """Reload all agents' weights after the last phase; weights that do not fit stay offloaded."""
        residents = list(self._residents.values())
        offloaded = [resident for resident in residents if resident.weights and resident.weights.is_offloaded]
        for resident in residents if offloaded else ():
            resident.offload_optimizer()
        for resident in offloaded:
            try:
                resident.reload_weights()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            resident.wait_for_weights()

    def _offload_others(self, name: str, keep_optimizer: bool = False) -> None:
        """Offload from the agent's device what its next phase does not need, and reload its weights."""
        if name not in self._residents:
            return
        active = self._residents[name]
        sharing = [
            resident for resident in self._residents.values() if resident.transfers is active.transfers
        ]
        for resident in sharing:  # weights first: the phase waits for their copies, not for optimizers'
            if resident is not active:
                resident.offload_weights()
        for resident in sharing:
            if resident is not active or not keep_optimizer:
                resident.offload_optimizer()
        self._reload(active, "weights", active.reload_weights)
        for resident in sharing:
            resident.wait_for_weights()

    def _reload(self, resident: _Resident, what: str, reload: Callable[[], None]) -> None:
        """Call ``reload``, again if memory runs out; raise TrainingError with advice if it fails twice."""
        device = resident.transfers.device
        try:
            reload()
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            free_failed_attempt(error, device)
        try:
            reload()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            name = resident.name
            stream = "Set learning.offload=stream, give" if what == "optimizer" else "Give"
            raise TrainingError(
                f"agent {name!r}: its {what} did not fit into the memory of {device} beside what else is "
                f"there. {stream} the agent a device of its own (agents.{name}.device), or set "
                f"agents.{name}.lora"
            ) from error
