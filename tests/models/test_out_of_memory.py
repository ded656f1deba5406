"""Which errors are out-of-memory errors, and that a failed attempt's tensors are freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hacrl.models.device import free_failed_attempt, is_out_of_memory
from tests.support.faults import (
    Raise,
    cpu_is_full,
    cublas_is_full,
    gpu_is_full,
    in_reference_cycle,
    no_collector,
)


@pytest.mark.parametrize("fail", [gpu_is_full, cpu_is_full, cublas_is_full])
def test_out_of_memory_errors_are_recognised(fail: Raise) -> None:
    with pytest.raises(RuntimeError) as caught:
        fail()
    assert is_out_of_memory(caught.value)


def test_other_errors_are_not_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


@contextmanager
def renamed() -> Iterator[None]:
    """An error that comes from another one."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError("too large") from error


def test_nothing_is_held_while_the_error_is_still_being_handled() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def attempt() -> None:
        outer = torch.ones(3)
        with renamed():
            inner()
        assert outer.sum() == 3

    def inner() -> None:
        tensor = torch.ones(4)
        held.append(weakref.ref(tensor))
        in_reference_cycle(tensor)
        gpu_is_full()

    with no_collector():
        try:
            attempt()
        except ValueError as error:
            assert held[0]() is not None  # the error remembers it
            free_failed_attempt(error, torch.device("cpu"))
            assert held[0]() is None
    assert len(held) == 1
