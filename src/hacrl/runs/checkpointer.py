"""Write checkpoints while training continues: copy the state into host memory, then write it in a thread.

Allocating and pinning host memory takes longer than copying into it. So every copy reuses the buffers of the
previous one, which must be on disk by then.
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
from hacrl.training.recovery import AgentCheckpoint
from hacrl.training.tensor_files import tensor_group
from hacrl.training.trainer import Trainer
from hacrl.types import Problem

GIB = 2**30
CHECKPOINTS = "checkpoints"  # folder of checkpoints in the run's folder
# Host memory that a snapshot leaves free, because the needs of a run vary: the larger of the two.
RESERVED_BYTES = GIB
RESERVED_SHARE = 0.05  # of the available memory

_Key = tuple[str, str]  # group and name


class HostMemoryError(Exception):
    """Host memory is too small for a snapshot; the message says how much is missing."""


@dataclass(frozen=True)
class _Buffer:
    """Host memory for the copy of one tensor."""

    memory: Tensor
    stride: tuple[int, ...]  # of the source tensor; the buffer is dense even if the source is not
    for_gpu: bool  # pinned, if the system allows

    def fits(self, tensor: Tensor) -> bool:
        # An offloaded tensor is on the GPU at some times only: a pinned buffer serves both cases.
        return (
            self.memory.shape == tensor.shape
            and self.memory.dtype == tensor.dtype
            and self.stride == tensor.stride()
            and (self.for_gpu or not _is_on_gpu(tensor))
        )


class HostSnapshot:
    """A copy of a run's tensors in host memory; each copy overwrites the previous one."""

    def __init__(self) -> None:
        self._buffers: dict[_Key, _Buffer] = {}

    @torch.no_grad()
    def copy(self, content: CheckpointContent) -> CheckpointContent:
        """Return a copy that later updates do not change; the copy is valid until the next call.

        Raise :class:`HostMemoryError` if the copy needs more memory than is available.
        """
        tensors = {
            (group, name): tensor
            for group, named in content.tensors.items()
            for name, tensor in named.items()
        }
        self._update_buffers(tensors)
        for key, tensor in tensors.items():
            self._buffers[key].memory.copy_(tensor, non_blocking=_is_on_gpu(tensor))
        for device in {tensor.device for tensor in tensors.values() if _is_on_gpu(tensor)}:
            _wait_for_copies(device)
        copied = {
            group: {name: self._buffers[group, name].memory for name in named}
            for group, named in content.tensors.items()
        }
        return CheckpointContent(content.documents, copied)

    def release(self) -> None:
        """Free the memory; the last copy must not be used any more."""
        had_pinned = any(buffer.memory.is_pinned() for buffer in self._buffers.values() if buffer.for_gpu)
        self._buffers = {}
        empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # missing in older torch
        if had_pinned and empty_host_cache is not None:  # otherwise torch keeps pinned memory allocated
            empty_host_cache()

    def _update_buffers(self, tensors: Mapping[_Key, Tensor]) -> None:
        """Allocate the missing buffers; optimizer moments exist only after the first update."""
        # Unused buffers are freed before new ones are allocated.
        self._buffers = {
            key: buffer
            for key, buffer in self._buffers.items()
            if key in tensors and buffer.fits(tensors[key])
        }
        new = {key: tensor for key, tensor in tensors.items() if key not in self._buffers}
        try:
            self._buffers.update(_allocate_buffers(new))
        except HostMemoryError:
            self.release()  # an incomplete copy is useless, and memory is short
            raise


def _allocate_buffers(tensors: Mapping[_Key, Tensor]) -> dict[_Key, _Buffer]:
    gpus = {key: _dense(tensor) for key, tensor in tensors.items() if _is_on_gpu(tensor)}
    others = {key: _dense(tensor) for key, tensor in tensors.items() if not _is_on_gpu(tensor)}
    needed = _bytes_in_pieces(list(gpus.values()))
    needed += sum(layout.numel() * layout.element_size() for layout in others.values())
    _check_free_memory(needed)
    try:
        # Pinned memory is allocated in large pieces. Other buffers are allocated, and freed, one by one.
        memory = dict(
            zip(gpus, HostAllocator(_pinned_if_possible).buffers_like(list(gpus.values())), strict=True)
        )
        memory |= {key: torch.empty_like(layout, device="cpu") for key, layout in others.items()}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise HostMemoryError(
            f"{needed / GIB:.2f} GiB more host memory are needed and could not be allocated ({error})"
        ) from error
    return {key: _Buffer(memory[key], tensor.stride(), key in gpus) for key, tensor in tensors.items()}


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _wait_for_copies(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()  # the copies were queued in this stream


def _dense(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same shape, type and dimension order, without gaps or repeated elements."""
    return torch.empty_like(tensor, device="meta")


def _bytes_in_pieces(layouts: Sequence[Tensor]) -> int:
    sizes = []

    def count(size: int) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8, device="meta")

    HostAllocator(count).buffers_like(layouts)
    return sum(sizes)


def _check_free_memory(needed: int) -> None:
    left = host_memory.free_bytes() if needed else None
    if left is None:
        return
    reserved = max(RESERVED_BYTES, int(RESERVED_SHARE * left))
    if needed > left - reserved:
        raise HostMemoryError(
            f"{needed / GIB:.2f} GiB more host memory are needed and {left / GIB:.2f} GiB are available, of "
            f"which {reserved / GIB:.2f} GiB are reserved"
        )


def _pinned_if_possible(size: int) -> Tensor:
    """Allocate bytes of pinned memory, or ordinary memory where the system limits pinning: only slower."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8)


def data_fingerprint(train: Sequence[Problem], test: Sequence[Problem]) -> str:
    """Return a hash of all problems in their order."""
    fingerprint = hashlib.sha256()
    for problems in (train, test):
        for problem in problems:
            text = f"{problem.id}\x1f{problem.prompt}\x1f{problem.answer}\x1e"
            fingerprint.update(text.encode(errors="backslashreplace"))
        fingerprint.update(b"\x1d")
    return fingerprint.hexdigest()


class Checkpointer(Observer):
    """Writes checkpoints, each with the lengths of the run's growing files at that time.

    ``note`` takes a sentence for the user.
    """

    def __init__(self, folder: RunFolder, settings: CheckpointSettings, note: Callable[[str], None]) -> None:
        self.store = CheckpointStore(folder.path / CHECKPOINTS)
        self.wait_seconds: list[float] = []  # how long training waited, per checkpoint
        self.data = ""  # fingerprint of the problems
        self._folder = folder
        self._settings = settings
        self._note = note
        self._has_noted_memory = False
        self._score: float | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hacrl-checkpoint")
        self._pending: Future[None] | None = None
        self._host_snapshot = HostSnapshot()

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Forget the score of the step before."""
        self._score = None

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Remember the mean accuracy: it is the score of the next checkpoint."""
        self._score = fmean(accuracy.mean for accuracy in accuracies.values())

    def after_step(self, trainer: Trainer) -> None:
        """Write a checkpoint if one is due. Raise the error of an earlier one that failed."""
        self._finish_pending(wait=False)
        if self._settings.every and trainer.steps_done % self._settings.every == 0:
            self.save(trainer)

    def save(self, trainer: Trainer, wait: bool = False) -> None:
        """Write the current state, also in the middle of a step, after the previous checkpoint is written.

        With ``wait``, return only after this checkpoint is written too.
        """
        start = time.perf_counter()
        self._finish_pending(wait=True)
        state = trainer.state_dict()
        under_way = state.pop("under_way")
        # A resumed run truncates the files to their present lengths. Notes of an unfinished step stay.
        run = {"positions": self._folder.positions(), "data": self.data}
        documents: dict[str, Any] = {"run": run, "trainer": state}
        if under_way is not None:
            documents["under_way"] = under_way
        which = CheckpointId(trainer.steps_done, trainer.phases_done)
        if trainer.writes_tensors:
            self.store.write(which, CheckpointContent(documents), self._score, trainer.write_tensors)
            self._prune()
            self.wait_seconds.append(time.perf_counter() - start)
            return
        content = CheckpointContent(
            documents, {tensor_group(name): tensors for name, tensors in trainer.tensors().items() if tensors}
        )
        snapshot = self._snapshot(content) if self._settings.background and not wait else None
        if snapshot is not None:
            self._pending = self._writer.submit(self._write, which, snapshot, self._score)
        else:
            self._write(which, content, self._score)
        self.wait_seconds.append(time.perf_counter() - start)

    def newest_of(self, agent: str) -> AgentCheckpoint | None:
        """Return one agent's part of the newest intact checkpoint; None if there is none."""
        self._finish_pending(wait=True)
        found = self.store.newest_intact()
        if found is None:
            return None
        state, tensors = trainer_state(found[1])
        return AgentCheckpoint.of(agent, state, tensors)

    def _snapshot(self, content: CheckpointContent) -> CheckpointContent | None:
        """Return a copy to write in the background, or None if host memory is too small for one."""
        assert self._pending is None, "the pending write reads the buffers that a new copy overwrites"
        try:
            return self._host_snapshot.copy(content)
        except HostMemoryError as error:
            if not self._has_noted_memory:
                self._has_noted_memory = True
                self._note(f"checkpoint.background: {error}, so training waits while checkpoints are written")
            return None

    def _write(self, which: CheckpointId, content: CheckpointContent, score: float | None) -> None:
        self.store.write(which, content, score)
        self._prune()

    def _prune(self) -> None:
        self.store.prune(self._settings.keep_last, self._settings.keep_best)

    def _finish_pending(self, wait: bool) -> None:
        pending = self._pending
        if pending is not None and (wait or pending.done()):
            try:
                pending.result()  # raises the error of a failed write
            finally:
                if pending.done():  # otherwise a signal interrupted the wait and the write continues
                    self._pending = None

    def close(self) -> None:
        """Wait until the pending checkpoint is written, and free all memory."""
        try:
            self._finish_pending(wait=True)
        finally:
            self._writer.shutdown()
            self._host_snapshot.release()


def trainer_state(content: CheckpointContent) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the part of a checkpoint that the trainer restores: its state, and tensors by agent."""
    state = {**content.documents["trainer"], "under_way": content.documents.get("under_way")}
    prefix = tensor_group("")
    tensors = {name.removeprefix(prefix): dict(group) for name, group in content.tensors.items()}
    return state, tensors
