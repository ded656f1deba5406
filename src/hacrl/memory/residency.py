"""Whose optimizer and weights are on a device at a time: agents that share one take turns."""

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
    optimizer: MasterWeightAdamW
    transfers: Transfers
    weights: OffloadGroup | None  # None: weights stay

    def optimizer_leaves(self) -> None:
        self.optimizer.offload(self.transfers)

    def weights_leave(self) -> None:
        if self.weights is not None:
            parameters = list(self.model.parameters())
            for parameter in parameters:
                parameter.grad = None
            self.weights.offload(parameters)

    def weights_come_back(self) -> None:
        if self.weights is not None:
            self.weights.reload()

    def wait_for_weights(self) -> None:
        """Anybody may read weights at any time, and nothing goes without them: they are waited for."""
        if self.weights is not None:
            self.weights.wait()


class Residency:
    """Says before each phase who has to be on the device; the others leave only then.

    An optimizer leaves beside the next phase, and comes back beside the first forward and backward passes of
    its own: it is waited for when it makes its update. One that streams stays away, but for the update
    itself. Agents that were not added stay where they are.
    """

    def __init__(
        self,
        notes: Sequence[str] = (),
        make_transfers: Callable[[torch.device], Transfers] = CudaTransfers,
    ) -> None:
        self.notes = tuple(notes)  # sentences for the user about what was decided
        self._make_transfers = make_transfers
        self._residents: dict[str, _Resident] = {}
        self._transfers: dict[torch.device, Transfers] = {}

    def add(self, agent: Agent, learner: Learner, level: OffloadLevel) -> None:
        """Let an agent take turns from now on. Its weights must be on its device."""
        transfers = self.transfers(agent, level)
        if transfers is None:
            return
        weights = OffloadGroup(transfers) if level in WEIGHTS_LEAVE else None
        if level in STREAMING:
            learner.optimizer.stream(transfers, offload_gradients=level == "all")
        self._residents[agent.name] = _Resident(
            agent.name, agent.model, learner.optimizer, transfers, weights
        )

    def transfers(self, agent: Agent, level: OffloadLevel) -> Transfers | None:
        """What will move its tensors; None: nothing will."""
        if level == "never":
            return None
        if agent.device not in self._transfers:
            self._transfers[agent.device] = self._make_transfers(agent.device)
        return self._transfers[agent.device]

    def keeps_weights(self, name: str) -> bool:
        """Whether the agent's weights are always on its device."""
        return name not in self._residents or self._residents[name].weights is None

    def to_generate(self, name: str) -> None:
        """The agent's weights are needed, nobody's optimizer."""
        self._make_room(name)

    def to_learn(self, name: str) -> None:
        """The agent's weights are needed and, unless it streams, its optimizer."""
        resident = self._residents.get(name)
        if resident is None:
            return
        self._make_room(name, keep_optimizer=not resident.optimizer.is_streaming)
        self._bring(resident, "optimizer", resident.optimizer.reload)

    def leave(self, name: str) -> None:
        """All of an agent's that may leave does; returns when its memory is free, for other processes too."""
        if name not in self._residents:
            return
        resident = self._residents[name]
        resident.optimizer_leaves()
        resident.weights_leave()
        resident.optimizer.wait()
        resident.wait_for_weights()
        if resident.transfers.device.type == "cuda":
            torch.cuda.empty_cache()

    def everyone_home(self) -> None:
        """After the last phase: weights are where their owner had put them, or stay if there is no room."""
        away = [
            one for one in self._residents.values() if one.weights is not None and one.weights.is_offloaded
        ]
        for one in self._residents.values() if away else ():
            one.optimizer_leaves()
        for one in away:
            try:
                one.weights_come_back()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            one.wait_for_weights()

    def _make_room(self, name: str, keep_optimizer: bool = False) -> None:
        if name not in self._residents:
            return
        mine = self._residents[name]
        sharing = [one for one in self._residents.values() if one.transfers is mine.transfers]
        for one in sharing:  # before the optimizers, for which nobody waits
            if one is not mine:
                one.weights_leave()
        for one in sharing:
            if one is not mine or not keep_optimizer:
                one.optimizer_leaves()
        self._bring(mine, "weights", mine.weights_come_back)
        for one in sharing:
            one.wait_for_weights()

    def _bring(self, resident: _Resident, what: str, come_back: Callable[[], None]) -> None:
        device = resident.transfers.device
        try:
            come_back()
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            free_failed_attempt(error, device)
        try:
            come_back()
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
