"""Gradient sums over the backward passes of an update, on the device or offloaded between passes.

A sum is needed on the device only when a backward pass has computed its gradient, and in the update.
Offloaded sums save 4 bytes per 16-bit weight. They are prefetched in the order in which gradients came in
the update's first pass, and offloaded again at once. Both kinds give the same numbers to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hacrl.models.device import is_out_of_memory
from hacrl.training.offload import HostAllocator, HostBuffers, OffloadGroup, Transfers
from hacrl.training.optimizer_block import Weight

PREFETCH_BYTES = 2**28  # prefetch sums until they are as large as this
MAX_HELD_BYTES = 2**29  # device memory of sums that are being offloaded; with more, the device waits
MIN_OFFLOAD_BYTES = 2**20  # smaller sums stay on the device


class GradientSums:
    """Gradient sums that stay on the device."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._weights = list(weights)

    def begin_update(self) -> None:
        """Set all sums to zero."""
        for weight in self._weights:
            weight.zero_gradient()

    def add(self, weight: Weight) -> None:
        """Add the gradient that a backward pass has just computed for a 16-bit weight."""
        weight.add_gradient()

    def norm(self) -> Tensor:
        """Return the norm of all sums together."""
        return torch.nn.utils.get_total_norm([weight.gradient for weight in self._weights])

    def sampled(self, most: int) -> Tensor:
        """Return up to ``most`` evenly spaced numbers of the sums so far, between two backward passes."""
        return evenly_spaced_numbers([weight.gradient for weight in self._weights], most)

    def scale(self, factor: Tensor) -> None:
        """Multiply all sums by ``factor`` before the update uses them."""
        gradients = [weight.gradient for weight in self._weights]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def reload(self, weights: Iterable[Weight]) -> None:
        """Start to copy the sums of weights that are about to be updated to the device."""

    def prepare(self, weights: Iterable[Weight]) -> None:
        """Make the device wait for these sums, and scale them."""

    def discard(self, weights: Iterable[Weight]) -> None:
        """Drop the sums of weights that have been updated."""

    def free(self) -> None:
        """Free all device memory until the next update begins."""
        for weight in self._weights:
            weight.free_gradient()

    def wait(self) -> None:
        """Return when all copies are finished."""


class OffloadedGradientSums(GradientSums):
    """Gradient sums in the machine's memory, except small ones and those of float32 parameters."""

    def __init__(self, weights: Sequence[Weight], transfers: Transfers) -> None:
        super().__init__(weights)
        offloaded = [
            weight
            for weight in weights
            if not weight.is_own_master and weight.master.nbytes >= MIN_OFFLOAD_BYTES
        ]
        # all host memory is allocated now, so that training cannot run out of it later
        buffers = HostAllocator(transfers.allocate_host).buffers_like([w.master for w in offloaded])
        self._groups = {
            weight.number: OffloadGroup(transfers, _always(buffer), hold_memory=True)
            for weight, buffer in zip(offloaded, buffers, strict=True)
        }
        self._on_device = GradientSums([weight for weight in weights if weight.number not in self._groups])
        self._norms: dict[int, Tensor] = {}  # of the sums that have a gradient
        self._order: list[Weight] = []  # in which gradients came in the update's first pass
        self._positions: dict[int, int] = {}  # number of a weight -> its index in that order
        self._prefetched: list[Weight] = []
        self._offloading: deque[Weight] = deque()  # their device memory may still be held
        self._factor: Tensor | None = None
        self._scaled: set[int] = set()

    def begin_update(self) -> None:
        """Forget all sums. Offloaded ones are not zeroed: each starts from zeros at its first gradient."""
        self._reset()
        self._on_device.begin_update()

    @torch.no_grad()
    def add(self, weight: Weight) -> None:
        """Reload the weight's sum, add the gradient, offload the sum, and prefetch the next ones."""
        number = weight.number
        if number not in self._groups:
            self._on_device.add(weight)
            return
        if number not in self._norms:
            self._positions[number] = len(self._order)
            self._order.append(weight)
            self._start_sum(weight)
        group = self._groups[number]
        group.reload()
        group.wait_on_device()
        weight.add_gradient()
        self._norms[number] = _norm(weight.gradient)
        group.offload([weight.gradient])
        self._offloading.append(weight)
        self._prefetch_after(self._positions[number])

    def norm(self) -> Tensor:
        """Return the norm of all sums, to the bit as if all were on the device. The passes are over."""
        self._prefetch_after(len(self._order))
        self._release_memory(down_to=0)
        found: Tensor = torch.linalg.vector_norm(torch.stack([*map(self._norm_of, self._weights)]))
        return found

    def sampled(self, most: int) -> Tensor:
        """Return the same numbers as if all sums were on the device. Waits for copies that are under way."""
        return evenly_spaced_numbers([*map(self._sum_so_far, self._weights)], most)

    def _sum_so_far(self, weight: Weight) -> Tensor:
        """Return a sum wherever it is; zeros if no pass has reached it."""
        if weight.number in self._groups:
            if weight.number not in self._norms:
                return torch.zeros_like(weight.parameter, dtype=torch.float32)
            self._groups[weight.number].wait()
        return weight.gradient

    def scale(self, factor: Tensor) -> None:
        """Scale the sums on the device; :meth:`prepare` scales offloaded ones after they are copied back."""
        self._on_device.scale(factor)
        self._factor = factor

    @torch.no_grad()
    def reload(self, weights: Iterable[Weight]) -> None:
        """Start to copy these sums to the device. A sum that no pass had a gradient for becomes zeros."""
        for weight, group in self._offloaded(weights):
            if weight.number in self._norms:
                group.reload()
            elif weight.gradient_sum is None or group.is_offloaded:
                self._start_sum(weight)

    @torch.no_grad()
    def prepare(self, weights: Iterable[Weight]) -> None:
        """Make the device wait for these sums, and scale those that are not scaled yet."""
        for weight, group in self._offloaded(weights):
            group.wait_on_device()
            if self._factor is not None and weight.number not in self._scaled:
                weight.gradient.mul_(self._factor)
                self._scaled.add(weight.number)

    def discard(self, weights: Iterable[Weight]) -> None:
        """Drop these sums; their host buffers are kept."""
        for weight, group in self._offloaded(weights):
            self._norms.pop(weight.number, None)
            if weight.gradient_sum is not None:
                group.discard([weight.gradient_sum])

    def free(self) -> None:
        """Free all device memory until the next update begins."""
        self._reset()
        self._on_device.free()

    def wait(self) -> None:
        """Return when all copies are finished."""
        for group in self._groups.values():
            group.wait()

    def _offloaded(self, weights: Iterable[Weight]) -> list[tuple[Weight, OffloadGroup]]:
        return [(weight, self._groups[weight.number]) for weight in weights if weight.number in self._groups]

    def _reset(self) -> None:
        self._release_memory(down_to=0)
        self.discard(self._weights)
        for weight, _ in self._offloaded(self._weights):
            weight.parameter.grad = None
        self._positions.clear()
        self._order.clear()
        self._prefetched.clear()
        self._scaled.clear()
        self._factor = None

    def _start_sum(self, weight: Weight) -> None:
        """Allocate the sum on the device and set it to zeros; the host buffer is not read."""
        self._groups[weight.number].allocate()
        weight.zero_gradient_sum()

    def _norm_of(self, weight: Weight) -> Tensor:
        if weight.number not in self._groups:
            return _norm(weight.gradient)
        found = self._norms.get(weight.number)
        return torch.zeros((), device=weight.parameter.device) if found is None else found

    def _release_memory(self, down_to: int) -> None:
        """Release device memory of sums that are being offloaded, until at most so many bytes are held."""
        size = sum(weight.gradient.nbytes for weight in self._offloading)
        while size > down_to:
            weight = self._offloading.popleft()
            self._groups[weight.number].release()
            size -= weight.gradient.nbytes

    def _prefetch_after(self, position: int) -> None:
        """Prefetch the sums that follow ``position``. Offload prefetched ones that this pass has skipped."""
        for weight in self._prefetched:
            group = self._groups[weight.number]
            if self._positions[weight.number] < position and not group.is_offloaded:
                group.offload([weight.gradient])
                self._offloading.append(weight)
        self._release_memory(down_to=MAX_HELD_BYTES)
        self._prefetched, size = [], 0
        for weight in self._order[position + 1 :]:
            if self._prefetched and size >= PREFETCH_BYTES:
                break
            try:
                self._groups[weight.number].reload()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                break  # it is reloaded when its gradient comes
            self._prefetched.append(weight)
            size += weight.gradient.nbytes


def evenly_spaced_numbers(tensors: Sequence[Tensor], most: int) -> Tensor:
    """Return up to ``most`` numbers of these tensors as one new vector, of every tensor the same share.

    The vector is where the first of them that is on a GPU is.
    """
    stride = max(1, -(-sum(tensor.numel() for tensor in tensors) // most))
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), tensors[0].device)
    return torch.cat([tensor.reshape(-1)[::stride].to(device) for tensor in tensors])


def _always(buffer: Tensor) -> HostBuffers:
    return lambda _: [buffer]


def _norm(gradient: Tensor) -> Tensor:
    """Return the norm, to the bit as :func:`torch.nn.utils.get_total_norm` computes it within a list."""
    return torch._foreach_norm([gradient])[0] if gradient.is_cuda else torch.linalg.vector_norm(gradient)
