"""A part of an agent's weights whose float32 masters and moments are updated, and travel, together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.training.offload import HostPlaces, Luggage, Transfers

PIECE = 2**30  # bytes of masters and moments: large enough for copies at full speed


@dataclass
class Weight:
    """A parameter, the float32 numbers that are trained in its place, and their gradient while there is one.

    A float32 parameter is its own master, and its gradient is where torch puts it.
    """

    number: int  # in the order of the agent's parameters
    parameter: Tensor
    master: Tensor
    summed: Tensor | None = None  # over backward passes, in float32

    @staticmethod
    def of(number: int, parameter: Tensor) -> Weight:
        """With a master, if it needs one."""
        if parameter.dtype == torch.float32:
            return Weight(number, parameter, parameter)
        return Weight(number, parameter, parameter.detach().to(torch.float32).requires_grad_())

    @property
    def is_own_master(self) -> bool:
        """Whether this is a float32 parameter."""
        return self.parameter is self.master

    @property
    def gradient(self) -> Tensor:
        """Since the update began."""
        gradient = self.parameter.grad if self.is_own_master else self.summed
        assert gradient is not None, "an update begins with zeros"
        return gradient

    def zero_gradient(self) -> None:
        """Zeros, not None: an update without any signal must move the weights as if all were computed."""
        if self.is_own_master:
            self.parameter.grad = _zeros(self.parameter.grad, self.parameter)
        else:
            self.parameter.grad = None
            self.zero_sum()

    def zero_sum(self) -> None:
        """Of gradients that torch does not add up itself."""
        self.summed = _zeros(self.summed, self.parameter)

    def take_gradient(self, parameter: Tensor) -> None:
        """Add that of one backward pass, in float32, and free it at once."""
        assert parameter.grad is not None
        self.gradient.add_(parameter.grad)
        parameter.grad = None

    def drop_gradient(self) -> None:
        """Until the next update."""
        self.summed = None
        if self.is_own_master:
            self.parameter.grad = None


def _zeros(before: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.float32) if before is None else before.zero_()


def moved_bytes(parameter: Tensor) -> int:
    """Of two moments, and the master if that is no weight itself; all in float32."""
    return 4 * parameter.numel() * (2 if parameter.dtype == torch.float32 else 3)


def in_pieces(parameters: Sequence[Tensor]) -> Iterator[list[Weight]]:
    """Neighbours together, as many as fit into a piece; one that is larger by itself.

    Masters of a piece are made when it is asked for: those before may have left the device.
    """
    piece: list[tuple[int, Tensor]] = []
    total = 0
    for number, parameter in enumerate(parameters):
        if piece and total + moved_bytes(parameter) > PIECE:
            yield [Weight.of(*one) for one in piece]
            piece, total = [], 0
        piece.append((number, parameter))
        total += moved_bytes(parameter)
    if piece:
        yield [Weight.of(*one) for one in piece]


class Piece:
    """AdamW for some of the weights."""

    def __init__(
        self, weights: Sequence[Weight], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self.weights = list(weights)
        self.luggage: Luggage | None = None  # None: never sent away
        self._homes = [weight.master.device for weight in weights]
        masters = [weight.master for weight in weights]
        self._fused = all(master.is_cuda for master in masters)  # elsewhere it would only round differently
        self.adamw = torch.optim.AdamW(
            masters, lr=lr, betas=betas, weight_decay=weight_decay, fused=self._fused or None
        )

    @property
    def moved_bytes(self) -> int:
        """Of masters and moments."""
        return sum(moved_bytes(weight.parameter) for weight in self.weights)

    @property
    def is_away(self) -> bool:
        """Whether masters and moments are in the machine's memory, or on their way there."""
        return self.luggage is not None and self.luggage.is_away

    @torch.no_grad()
    def step(self) -> None:
        """Move the masters by their gradients, then round them into the parameters."""
        if self.luggage is not None:
            self.luggage.ready()
        mastered = [weight for weight in self.weights if not weight.is_own_master]
        try:
            for weight in mastered:  # only now: masters that are away cannot have a gradient that is not
                weight.master.grad = weight.gradient
            self.adamw.step()
        finally:
            for weight in mastered:
                weight.master.grad = None
        for weight in mastered:
            weight.parameter.copy_(weight.master)

    def leave(self, transfers: Transfers, places: HostPlaces) -> None:
        """Begin to send masters and moments away."""
        self.luggage = self.luggage or Luggage(transfers, places)
        self.luggage.leave(self._movable())

    def come_back(self) -> None:
        """Begin to bring them back."""
        if self.luggage is not None:
            self.luggage.come_back()

    def wait(self) -> None:
        """Until they are whole, wherever they are."""
        if self.luggage is not None:
            self.luggage.wait()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By number of the weight; where they are now."""
        for weight in self.weights:
            yield f"{weight.number}.master", weight.master.detach()
            for key, value in self.adamw.state.get(weight.master, {}).items():
                yield f"{weight.number}.{key}", value

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensors` gave; what is away is away again afterwards."""
        away = self.luggage if self.is_away else None
        self.come_back()
        self.wait()
        for place, weight in enumerate(self.weights):
            weight.master.copy_(tensors[f"{weight.number}.master"])
            if not weight.is_own_master:
                weight.parameter.copy_(weight.master)
            for state in self.adamw.state.get(weight.master, {}).values():
                state.zero_()  # as before the first update, if that is what is restored
            prefix = f"{weight.number}."
            for key, value in tensors.items():
                if key.startswith(prefix) and key != f"{weight.number}.master":
                    self._load_state(place, key.removeprefix(prefix), value)
        if away is not None:
            away.leave(self._movable())

    def _load_state(self, place: int, key: str, value: Tensor) -> None:
        """Into the tensor that is there, if there is one: it may have a place to be sent to."""
        state, home = self.adamw.state[self.weights[place].master], self._homes[place]
        if key in state:
            state[key].copy_(value)
        else:  # unlike the moments, the count of steps is on the CPU, unless one kernel does it all
            state[key] = value.to("cpu" if key == "step" and not self._fused else home, copy=True)

    def _movable(self) -> list[Tensor]:
        """Masters that are not weights themselves, and moments; counts of steps are not worth it."""
        found = [weight.master for weight in self.weights if not weight.is_own_master]
        for weight in self.weights:
            state = self.adamw.state.get(weight.master, {})
            found += [value for key, value in state.items() if key != "step"]
        return found
