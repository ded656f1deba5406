"""Faults put into real models through torch's hooks: memory that runs out, numbers that are not finite."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Raise = Callable[[], object]
Where = Literal["forward", "backward"]


def gpu_is_full() -> None:
    """Raise what torch raises on a GPU."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_is_full() -> None:
    """Raise what torch raises on a CPU, a plain RuntimeError: no machine has a million GiB."""
    torch.empty(1 << 50, dtype=torch.uint8)


def cublas_is_full() -> None:
    """Raise what torch raises if a matrix product finds no memory for its workspace."""
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable Python's garbage collector, so that reference cycles are not freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_reference_cycle(value: object) -> None:
    """Make a reference cycle that holds the value."""
    cycle = [value]
    cycle.append(cycle)


@contextmanager
def out_of_memory(
    model: Any,
    too_much: Callable[[Tensor], bool],  # of the input ids
    where: Where = "forward",
    fail: Raise = gpu_is_full,
) -> Iterator[list[tuple[int, int]]]:
    """Make passes over too many tokens fail late, when all activations exist; yield the failed shapes.

    Forward passes fail at the last layer, backward passes at the first one.
    """
    failed: list[tuple[int, int]] = []
    shape: tuple[int, int] | None = None

    def look(_: Any, args: Any, kwargs: dict[str, Tensor]) -> None:
        nonlocal shape
        ids = kwargs["input_ids"]
        shape = (ids.shape[0], ids.shape[1]) if too_much(ids) else None

    def give_up(*_: Any) -> None:
        if shape is not None:
            failed.append(shape)
            fail()

    def give_up_in_backward(_: Any, __: Any, output: Tensor) -> None:
        if shape is not None and output.requires_grad:
            output.register_hook(give_up)

    hooks = [model.register_forward_pre_hook(look, with_kwargs=True)]
    if where == "forward":
        hooks.append(model.get_output_embeddings().register_forward_pre_hook(give_up))
    else:
        hooks.append(model.get_input_embeddings().register_forward_hook(give_up_in_backward))
    yield failed
    for hook in hooks:
        hook.remove()


@contextmanager
def nan_gradients(model: Any, passes: Callable[[int], bool]) -> Iterator[list[int]]:
    """Make the last weight's gradient NaN in the chosen backward passes (from 1); yield their numbers."""
    count = 0
    spoilt: list[int] = []

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if not passes(count):
            return gradient
        spoilt.append(count)
        return gradient * torch.nan

    hook = model.get_output_embeddings().weight.register_hook(spoil)
    yield spoilt
    hook.remove()
