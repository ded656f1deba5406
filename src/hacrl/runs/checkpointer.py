"""A copy of a run's tensors in the machine's memory, taken as fast as the bus allows.

Getting memory costs more than filling it: pages have to be found, and pinned for copies at full speed. So a
copy lies where the one before lay, which must be done with by then.

When a run's state is written down, and how little the run waits for it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from hacrl.config.schema import CheckpointSettings
from hacrl.memory import host as host_memory
from hacrl.models.device import is_out_of_memory
from hacrl.runs.checkpoint import CheckpointContent, CheckpointId, CheckpointStore
from hacrl.runs.folder import RunFolder
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer
from hacrl.training.offload import HostAllocator
from hacrl.training.trainer import Trainer
from hacrl.types import Problem

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
        memory = dict(
            zip(gpus, HostAllocator(_pinned_if_possible).buffers_like(list(gpus.values())), strict=True)
        )
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

    HostAllocator(count).buffers_like(layouts)
    return sum(sizes)


def _check_room(needed: int) -> None:
    left = host_memory.free_bytes() if needed else None
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


CHECKPOINTS = "checkpoints"  # in the run's folder


def data_fingerprint(train: Sequence[Problem], test: Sequence[Problem]) -> str:
    """Equal if the same problems come in the same order."""
    total = hashlib.sha256()
    for problems in (train, test):
        for problem in problems:
            said = f"{problem.id}\x1f{problem.prompt}\x1f{problem.answer}\x1e"
            total.update(said.encode(errors="backslashreplace"))
        total.update(b"\x1d")
    return total.hexdigest()


class Checkpointer(Observer):
    """Keeps the run's files and its state in step. Watches after the folder has written its lines.

    ``note`` takes a sentence for the user.
    """

    def __init__(self, folder: RunFolder, settings: CheckpointSettings, note: Callable[[str], None]) -> None:
        self.store = CheckpointStore(folder.path / CHECKPOINTS)
        self.stalled: list[float] = []  # seconds the run waited, per checkpoint
        self.data = ""  # fingerprint of the problems
        self._folder = folder
        self._settings = settings
        self._note = note
        self._has_noted = False
        self._positions: dict[str, int] = {}
        self._score: float | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hacrl-checkpoint")
        self._pending: Future[None] | None = None
        self._snapshots = Snapshots()

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """A step's lines are written: from here on they belong to what is done."""
        self.mark()
        self._score = None

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """So do an evaluation's."""
        self.mark()
        self._score = fmean(accuracy.mean for accuracy in accuracies.values())

    def mark(self) -> None:
        """What the files hold now belongs to what is done."""
        self._positions = self._folder.positions()

    def after_step(self, trainer: Trainer) -> None:
        """Write a checkpoint if it is time for one; an earlier one that failed is told of now."""
        self._settle(wait=False)
        if self._settings.every and trainer.steps_done % self._settings.every == 0:
            self.save(trainer)

    def save(self, trainer: Trainer, wait: bool = False) -> None:
        """Write the state as it is, in the middle of a step too. Waits for what was being written before."""
        start = time.perf_counter()
        self._settle(wait=True)
        state = trainer.state_dict()
        under_way = state.pop("under_way")
        run = {"positions": self._positions, "data": self.data}
        documents: dict[str, Any] = {"run": run, "trainer": state}
        if under_way is not None:
            documents["under_way"] = under_way
        content = CheckpointContent(
            documents, {f"agent-{name}": tensors for name, tensors in trainer.tensors().items()}
        )
        which = CheckpointId(trainer.steps_done, trainer.phases_done)
        snapshot = self._snapshot(content) if self._settings.background and not wait else None
        if snapshot is not None:
            self._pending = self._writer.submit(self._write, which, snapshot, self._score)
        else:
            self._write(which, content, self._score)
        self.stalled.append(time.perf_counter() - start)

    def _snapshot(self, content: CheckpointContent) -> CheckpointContent | None:
        """A copy to write in the background; None: there is no memory for it, and the run has to wait."""
        assert self._pending is None, "what is being written lies where the next copy goes"
        try:
            return self._snapshots.take(content)
        except NoRoomError as error:
            if not self._has_noted:
                self._has_noted = True
                self._note(f"checkpoint.background: {error}, so training waits while checkpoints are written")
            return None

    def _write(self, which: CheckpointId, content: CheckpointContent, score: float | None) -> None:
        self.store.write(which, content, score)
        self.store.prune(self._settings.keep_last, self._settings.keep_best)

    def _settle(self, wait: bool) -> None:
        pending = self._pending
        if pending is not None and (wait or pending.done()):
            try:
                pending.result()  # raises what writing raised
            finally:
                if pending.done():  # else a signal came while waiting, and it is still being written
                    self._pending = None

    def close(self) -> None:
        """Finish what is being written."""
        try:
            self._settle(wait=True)
        finally:
            self._writer.shutdown()
            self._snapshots.let_go()


def trainer_state(content: CheckpointContent) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A checkpoint's part that the trainer takes: its state, and tensors by agent."""
    state = {**content.documents["trainer"], "under_way": content.documents.get("under_way")}
    tensors = {name.removeprefix("agent-"): dict(group) for name, group in content.tensors.items()}
    return state, tensors
