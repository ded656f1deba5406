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
    """What torch raises on a GPU."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def cpu_is_full() -> None:
    """What torch raises on a CPU, which has no type of its own: no machine has a million GiB."""
    torch.empty(1 << 50, dtype=torch.uint8)


def cublas_is_full() -> None:
    """A GPU so full that a matrix product has no room to work in."""
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@contextmanager
def no_collector() -> Iterator[None]:
    """Nothing that points at itself goes by itself, as if Python's collector had not come by yet."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_a_circle(value: object) -> None:
    """Something holds the value, and itself."""
    circle = [value]
    circle.append(circle)


@contextmanager
def out_of_memory(
    model: Any,
    too_much: Callable[[Tensor], bool],  # of the input ids
    where: Where = "forward",
    fail: Raise = gpu_is_full,
) -> Iterator[list[tuple[int, int]]]:
    """Passes over too much fail at their end, with all their activations there; yields the failed shapes.

    Forward: at the last layer. Backward: at the first one, when other weights have their gradients already.
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
    """The gradient of the last weight is NaN in the chosen backward passes, counted from 1; yields those."""
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
