"""Sums of gradients over the backward passes of an update.

They are needed on the device only when a gradient has just been computed, and in the update: 4 bytes of each
weight that may wait in the machine's memory meanwhile. Then they come a little before their turn, in the
order in which gradients came in the update's first pass, and leave at once. The numbers are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hacrl.models.device import is_out_of_memory
from hacrl.training.offload import GivenPlaces, Luggage, Transfers, places_like
from hacrl.training.optimizer_block import Weight

COMING = 2**28  # bytes that are enough to come ahead of their turn
LEAVING = 2**29  # bytes on their way out: if there are more, the device waits for them
SMALL = 2**20  # bytes that are not worth a journey


class Sums:
    """On the device."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = list(weights)

    def begin(self) -> None:
        """An update."""
        for weight in self._weights:
            weight.zero_gradient()

    def add(self, weight: Weight) -> None:
        """What a backward pass has just found for a weight that is not its own master."""
        weight.take_gradient(weight.parameter)

    def norm(self) -> Tensor:
        """Of all sums together."""
        return torch.nn.utils.get_total_norm([weight.gradient for weight in self._weights])

    def scale(self, factor: Tensor) -> None:
        """All of them, before the update is made."""
        gradients = [weight.gradient for weight in self._weights]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def bring(self, weights: Iterable[Weight]) -> None:
        """Begin to bring those of some weights that are about to be updated."""

    def ready(self, weights: Iterable[Weight]) -> None:
        """What the device computes from now on finds them whole and scaled."""

    def drop(self, weights: Iterable[Weight]) -> None:
        """These weights have been updated."""

    def let_go(self) -> None:
        """Of all memory on the device, until the next update begins."""
        for weight in self._weights:
            weight.drop_gradient()

    def wait(self) -> None:
        """Until nothing is on its way."""


class AwaySums(Sums):
    """In the machine's memory, but for small ones and those that torch adds up itself, in float32."""

    def __init__(self, weights: Sequence[Weight], transfers: Transfers) -> None:
        super().__init__(weights)
        away = [weight for weight in weights if _is_worth_it(weight)]
        places = places_like([weight.master for weight in away], transfers.host_memory)  # now or never
        self._luggage = {
            weight.number: Luggage(transfers, GivenPlaces([place]), lingers=True)
            for weight, place in zip(away, places, strict=True)
        }
        self._here = Sums([weight for weight in weights if weight.number not in self._luggage])
        self._norms: dict[int, Tensor] = {}  # of those that hold something
        self._turns: dict[int, int] = {}  # in which gradients came
        self._in_turn: list[Weight] = []
        self._ahead: list[Weight] = []  # whose sum has come before its turn
        self._leaving: deque[Weight] = deque()
        self._factor: Tensor | None = None
        self._scaled: set[int] = set()

    def begin(self) -> None:
        """See :class:`Sums`. Nothing is zeroed that is away: no sum holds anything yet."""
        self._forget()
        self._here.begin()

    @torch.no_grad()
    def add(self, weight: Weight) -> None:
        """See :class:`Sums`."""
        number = weight.number
        if number not in self._luggage:
            self._here.add(weight)
            return
        if number not in self._norms:
            self._turns[number] = len(self._in_turn)
            self._in_turn.append(weight)
            self._begin_sum(weight)
        luggage = self._luggage[number]
        luggage.come_back()
        luggage.ready()
        weight.take_gradient(weight.parameter)
        self._norms[number] = _norm(weight.gradient)
        luggage.leave([weight.gradient])
        self._leaving.append(weight)
        self._look_ahead(self._turns[number])

    def norm(self) -> Tensor:
        """To the bit as if all were here. The passes are over."""
        self._look_ahead(len(self._in_turn))
        self._make_room(0)
        found: Tensor = torch.linalg.vector_norm(torch.stack([*map(self._norm_of, self._weights)]))
        return found

    def scale(self, factor: Tensor) -> None:
        """See :class:`Sums`. Those that are away are, when they have come."""
        self._here.scale(factor)
        self._factor = factor

    @torch.no_grad()
    def bring(self, weights: Iterable[Weight]) -> None:
        """See :class:`Sums`. Zeros, if no pass had a gradient."""
        for weight, luggage in self._travelling(weights):
            if weight.number in self._norms:
                luggage.come_back()
            elif weight.summed is None or luggage.is_away:
                self._begin_sum(weight)

    @torch.no_grad()
    def ready(self, weights: Iterable[Weight]) -> None:
        """See :class:`Sums`."""
        for weight, luggage in self._travelling(weights):
            luggage.ready()
            if self._factor is not None and weight.number not in self._scaled:
                weight.gradient.mul_(self._factor)
                self._scaled.add(weight.number)

    def drop(self, weights: Iterable[Weight]) -> None:
        """See :class:`Sums`. Their places are kept."""
        for weight, luggage in self._travelling(weights):
            self._norms.pop(weight.number, None)
            if weight.summed is not None:
                luggage.drop([weight.summed])

    def let_go(self) -> None:
        """See :class:`Sums`."""
        self._forget()
        self._here.let_go()

    def wait(self) -> None:
        """See :class:`Sums`."""
        for luggage in self._luggage.values():
            luggage.wait()

    def _travelling(self, weights: Iterable[Weight]) -> list[tuple[Weight, Luggage]]:
        return [
            (weight, self._luggage[weight.number]) for weight in weights if weight.number in self._luggage
        ]

    def _forget(self) -> None:
        self._make_room(0)
        self.drop(self._weights)
        for weight, _ in self._travelling(self._weights):
            weight.parameter.grad = None
        self._turns.clear()
        self._in_turn.clear()
        self._ahead.clear()
        self._scaled.clear()
        self._factor = None

    def _begin_sum(self, weight: Weight) -> None:
        """Zeros on the device; what is in the machine's memory is not looked at."""
        self._luggage[weight.number].renew()
        weight.zero_sum()

    def _norm_of(self, weight: Weight) -> Tensor:
        if weight.number not in self._luggage:
            return _norm(weight.gradient)
        found = self._norms.get(weight.number)
        return torch.zeros((), device=weight.parameter.device) if found is None else found

    def _make_room(self, most: int) -> None:
        """Until no more is leaving."""
        size = sum(weight.gradient.nbytes for weight in self._leaving)
        while size > most:
            gone = self._leaving.popleft()
            self._luggage[gone.number].release()
            size -= gone.gradient.nbytes

    def _look_ahead(self, turn: int) -> None:
        """Bring the next sum, and more if they are small; those whose turn has passed unused leave."""
        for weight in self._ahead:
            luggage = self._luggage[weight.number]
            if self._turns[weight.number] < turn and not luggage.is_away:
                luggage.leave([weight.gradient])
                self._leaving.append(weight)
        self._make_room(LEAVING)
        self._ahead, size = [], 0
        for weight in self._in_turn[turn + 1 :]:
            if self._ahead and size >= COMING:
                break
            try:
                self._luggage[weight.number].come_back()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                break  # it will come when it has to
            self._ahead.append(weight)
            size += weight.gradient.nbytes


def _is_worth_it(weight: Weight) -> bool:
    return not weight.is_own_master and weight.master.nbytes >= SMALL


def _norm(gradient: Tensor) -> Tensor:
    """To the bit what :func:`torch.nn.utils.get_total_norm` finds for a tensor among others."""
    return torch._foreach_norm([gradient])[0] if gradient.is_cuda else torch.linalg.vector_norm(gradient)
