"""AdamW for a block of an agent's weights: the unit in which optimizer state is updated and offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.training.offload import HostBuffers, OffloadGroup, Transfers

BLOCK_BYTES = 2**30  # of masters and moments: large enough for copies at full speed


@dataclass
class Weight:
    """A parameter, its float32 master, and the sum of its gradients while an update is under way.

    A float32 parameter is its own master, and torch sums its gradients in ``parameter.grad``.
    """

    number: int  # in the order of the agent's parameters
    parameter: Tensor
    master: Tensor
    gradient_sum: Tensor | None = None  # in float32, over backward passes; None for float32 parameters

    @staticmethod
    def of(number: int, parameter: Tensor) -> Weight:
        """Return the weight, with a new master unless the parameter is float32."""
        if parameter.dtype == torch.float32:
            return Weight(number, parameter, parameter)
        return Weight(number, parameter, parameter.detach().to(torch.float32).requires_grad_())

    @property
    def is_own_master(self) -> bool:
        """Whether this is a float32 parameter."""
        return self.parameter is self.master

    @property
    def gradient(self) -> Tensor:
        """The sum of gradients since the update began, in float32."""
        gradient = self.parameter.grad if self.is_own_master else self.gradient_sum
        assert gradient is not None, "zero_gradient was not called at the beginning of the update"
        return gradient

    def zero_gradient(self) -> None:
        """Set the gradient to zeros, not None: AdamW must update the weight even if no pass reaches it."""
        if self.is_own_master:
            self.parameter.grad = _zeros(self.parameter.grad, self.parameter)
        else:
            self.parameter.grad = None
            self.zero_gradient_sum()

    def zero_gradient_sum(self) -> None:
        """Set the float32 sum of a 16-bit parameter's gradients to zeros."""
        self.gradient_sum = _zeros(self.gradient_sum, self.parameter)

    def add_gradient(self) -> None:
        """Add ``parameter.grad`` of one backward pass to the float32 sum, and free it at once."""
        assert self.parameter.grad is not None
        self.gradient.add_(self.parameter.grad)
        self.parameter.grad = None

    def free_gradient(self) -> None:
        """Free the gradient's memory until the next update."""
        self.gradient_sum = None
        if self.is_own_master:
            self.parameter.grad = None


def _zeros(before: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32) if before is None else before.zero_()


def state_bytes(parameter: Tensor) -> int:
    """Return the bytes of two moments, and of the master if there is a separate one; all are float32."""
    return 4 * parameter.numel() * (2 if parameter.dtype == torch.float32 else 3)


def weight_blocks(parameters: Sequence[Tensor]) -> Iterator[list[Weight]]:
    """Yield neighbouring weights in blocks of at most BLOCK_BYTES; a larger weight has a block of its own.

    Masters of a block are made when the caller asks for the block, so it can offload earlier blocks first.
    """
    block: list[tuple[int, Tensor]] = []
    total = 0
    for number, parameter in enumerate(parameters):
        if block and total + state_bytes(parameter) > BLOCK_BYTES:
            yield [Weight.of(number, parameter) for number, parameter in block]
            block, total = [], 0
        block.append((number, parameter))
        total += state_bytes(parameter)
    if block:
        yield [Weight.of(number, parameter) for number, parameter in block]


class OptimizerBlock:
    """AdamW for some of the weights, with masters and moments that can be offloaded."""

    def __init__(
        self, weights: Sequence[Weight], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self.weights = list(weights)
        self.group: OffloadGroup | None = None  # None: never offloaded so far
        self._devices = [weight.master.device for weight in weights]  # while masters are not offloaded
        masters = [weight.master for weight in weights]
        self._fused = all(master.is_cuda for master in masters)  # on a CPU it would only round differently
        self.adamw = torch.optim.AdamW(
            masters, lr=lr, betas=betas, weight_decay=weight_decay, fused=self._fused or None
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of masters and moments."""
        return sum(state_bytes(weight.parameter) for weight in self.weights)

    def set_learning_rate(self, lr: float) -> None:
        """Use another learning rate from the next update on."""
        for group in self.adamw.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters by their gradients, then round them into the parameters."""
        if self.group is not None:
            self.group.wait_on_device()
        mastered = [weight for weight in self.weights if not weight.is_own_master]
        try:
            for weight in mastered:  # not before: a master in host memory cannot have a gradient on the GPU
                weight.master.grad = weight.gradient
            self.adamw.step()
        finally:
            for weight in mastered:
                weight.master.grad = None
        for weight in mastered:
            weight.parameter.copy_(weight.master)

    def offload(self, transfers: Transfers, host_buffers: HostBuffers) -> None:
        """Start to offload masters and moments."""
        self.group = self.group or OffloadGroup(transfers, host_buffers)
        self.group.offload(self._offloadable())

    def reload(self) -> None:
        """Start to copy offloaded masters and moments back to the device."""
        if self.group is not None:
            self.group.reload()

    def wait(self) -> None:
        """Return when all copies of masters and moments are finished."""
        if self.group is not None:
            self.group.wait()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield masters and moments, wherever they are now, by names like ``3.master`` and ``3.exp_avg``."""
        for weight in self.weights:
            yield f"{weight.number}.master", weight.master.detach()
            for key, value in self.adamw.state.get(weight.master, {}).items():
                yield f"{weight.number}.{key}", value

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensors` returned. A block that was offloaded is offloaded again afterwards."""
        was_offloaded = self.group if self.group is not None and self.group.is_offloaded else None
        self.reload()
        self.wait()
        for index, weight in enumerate(self.weights):
            weight.master.copy_(tensors[f"{weight.number}.master"])
            if not weight.is_own_master:
                weight.parameter.copy_(weight.master)
            for state in self.adamw.state.get(weight.master, {}).values():
                state.zero_()  # right if the restored state is from before the first update
            prefix = f"{weight.number}."
            for key, value in tensors.items():
                if key.startswith(prefix) and key != f"{weight.number}.master":
                    self._load_state(index, key.removeprefix(prefix), value)
        if was_offloaded is not None:
            was_offloaded.offload(self._offloadable())

    def _load_state(self, index: int, key: str, value: Tensor) -> None:
        """Copy into the existing tensor if there is one: it may have a host buffer already."""
        state, device = self.adamw.state[self.weights[index].master], self._devices[index]
        if key in state:
            state[key].copy_(value)
        else:  # AdamW keeps its step counts on the CPU unless it is fused
            state[key] = value.to("cpu" if key == "step" and not self._fused else device, copy=True)

    def _offloadable(self) -> list[Tensor]:
        """Return masters that are not parameters themselves, and moments; step counts are too small."""
        found = [weight.master for weight in self.weights if not weight.is_own_master]
        for weight in self.weights:
            state = self.adamw.state.get(weight.master, {})
            found += [value for key, value in state.items() if key != "step"]
        return found
