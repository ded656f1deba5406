"""A copy of a run's tensors in the machine's memory, taken as fast as the bus allows.

Getting memory costs more than filling it: pages have to be found, and pinned for copies at full speed. So a
copy lies where the one before lay, which must be done with by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.agents.out_of_memory import is_out_of_memory
from hacrl.checkpoint.content import CheckpointContent
from hacrl.execution import host_memory
from hacrl.learning.offload import places_like

GIB = 2**30
LEFT_FREE = GIB  # of the machine's memory: a run's needs go up and down ...
LEFT_FREE_SHARE = 0.05  # ... with its size

_Key = tuple[str, str]  # group and name


class NoRoomError(Exception):
    """The machine's memory does not hold a copy beside everything else; says how much is missing."""


@dataclass(frozen=True)
class _Place:
    """Where one tensor is copied to."""

    memory: Tensor
    stride: tuple[int, ...]  # of what is copied; a place is dense even if that is not
    for_gpu: bool  # pinned, if that could be had

    def suits(self, tensor: Tensor) -> bool:
        # What is offloaded now and then is copied from either side: a place for a GPU's serves both.
        return (
            self.memory.shape == tensor.shape
            and self.memory.dtype == tensor.dtype
            and self.stride == tensor.stride()
            and (self.for_gpu or not _is_on_gpu(tensor))
        )


class Snapshots:
    """One copy at a time, each in the place of the one before."""

    def __init__(self) -> None:
        self._places: dict[_Key, _Place] = {}

    @torch.no_grad()
    def take(self, content: CheckpointContent) -> CheckpointContent:
        """A copy that later updates do not reach; it lasts until the next one is taken.

        Raises :class:`NoRoomError` if it would need more memory than there is.
        """
        tensors = {
            (group, name): tensor
            for group, named in content.tensors.items()
            for name, tensor in named.items()
        }
        self._make_places(tensors)
        for key, tensor in tensors.items():
            self._places[key].memory.copy_(tensor, non_blocking=_is_on_gpu(tensor))
        for device in {tensor.device for tensor in tensors.values() if _is_on_gpu(tensor)}:
            _wait_for_copies(device)
        copied = {
            group: {name: self._places[group, name].memory for name in named}
            for group, named in content.tensors.items()
        }
        return CheckpointContent(content.documents, copied)

    def let_go(self) -> None:
        """Give the memory back; the last copy must not be used any more."""
        had_pinned = any(place.memory.is_pinned() for place in self._places.values() if place.for_gpu)
        self._places = {}
        give_back = getattr(torch.accelerator, "empty_host_cache", None)  # older ones of torch have none
        if had_pinned and give_back is not None:  # else torch keeps it for whoever pins next
            give_back()

    def _make_places(self, tensors: Mapping[_Key, Tensor]) -> None:
        """For those that have none yet; moments exist from the first update on only."""
        # What nobody needs is let go of before more is asked for.
        self._places = {
            key: place for key, place in self._places.items() if key in tensors and place.suits(tensors[key])
        }
        new = {key: tensor for key, tensor in tensors.items() if key not in self._places}
        try:
            self._places.update(_new_places(new))
        except NoRoomError:
            self.let_go()  # a part of a copy is of no use, and memory is short
            raise


def _new_places(tensors: Mapping[_Key, Tensor]) -> dict[_Key, _Place]:
    gpus = {key: _dense(tensor) for key, tensor in tensors.items() if _is_on_gpu(tensor)}
    others = {key: _dense(tensor) for key, tensor in tensors.items() if not _is_on_gpu(tensor)}
    needed = _bytes_in_pieces(list(gpus.values()))
    needed += sum(layout.numel() * layout.element_size() for layout in others.values())
    _check_room(needed)
    try:
        # Only pinned memory is shared out in pieces: of the other kind each place can be let go of alone.
        memory = dict(zip(gpus, places_like(list(gpus.values()), _pinned_if_possible), strict=True))
        memory |= {key: torch.empty_like(layout, device="cpu") for key, layout in others.items()}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise NoRoomError(
            f"{needed / GIB:.2f} GiB more of the machine's memory are needed and could not be had ({error})"
        ) from error
    return {key: _Place(memory[key], tensor.stride(), key in gpus) for key, tensor in tensors.items()}


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _wait_for_copies(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()  # they were asked for in this stream


def _dense(tensor: Tensor) -> Tensor:
    """Shape, type and order in memory without memory; gaps and repeated elements are not copied."""
    return torch.empty_like(tensor, device="meta")


def _bytes_in_pieces(layouts: Sequence[Tensor]) -> int:
    sizes = []

    def count(size: int) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    places_like(layouts, count)
    return sum(sizes)


def _check_room(needed: int) -> None:
    left = host_memory.bytes_left() if needed else None
    if left is None:
        return
    free = max(LEFT_FREE, int(LEFT_FREE_SHARE * left))
    if needed > left - free:
        raise NoRoomError(
            f"{needed / GIB:.2f} GiB more of the machine's memory are needed and {left / GIB:.2f} GiB are "
            f"available, of which {free / GIB:.2f} GiB are left free"
        )


def _pinned_if_possible(size: int) -> Tensor:
    """Bytes of memory. Systems may limit what is pinned; other memory is slower to copy to, not wrong."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8)
