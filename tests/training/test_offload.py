"""Offloaded tensors are reloaded unchanged, and updates give the same numbers. The device is the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hacrl.training.offload import HostAllocator, OffloadGroup
from tests.training.small_optimizers import FULL, HALF, adamw, assert_equal, parameters, transfers, update

# --- host buffers ---


def test_host_buffers_have_the_shape_and_strides_of_their_tensors() -> None:
    tensors = [
        torch.zeros(3, 5),
        torch.zeros(4, 6).t(),
        torch.zeros(7, dtype=HALF),
        torch.zeros(0),
        torch.zeros(()),
    ]
    buffers = HostAllocator(lambda size: torch.full((size,), 255, dtype=torch.uint8)).buffers_like(tensors)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        assert (buffer.shape, buffer.stride(), buffer.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [set(buffer.flatten().tolist()) for buffer in buffers] == [
        {0.0},
        {1.0},
        {2.0},
        set(),
        {4.0},
    ]  # no overlap


def test_host_chunks_are_powers_of_two_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hacrl.training.offload.HOST_CHUNK", 4096)
    asked: list[int] = []

    def allocate(size: int) -> Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    # in bytes, each a multiple of 512: 5120, 2048, 1536, 1024, 512. The largest gets 8192, where 3072 are
    # left; 2048 go there. 1536 do not, and 3072 are still to come: 4096 for them. 1024 go to the first, 512
    # to the second
    HostAllocator(allocate).buffers_like([torch.empty(size // 4) for size in (1024, 1536, 5120, 400, 2048)])
    assert asked == [8192, 4096]


# --- offloading tensors ---


def test_an_offloaded_tensor_stays_the_same_object_and_keeps_its_numbers() -> None:
    move = transfers()
    group = OffloadGroup(move)
    parameter, moment = nn.Parameter(torch.arange(6.0).view(2, 3)), torch.full((4,), 0.5)
    home = parameter.data_ptr()
    for trip in range(3):
        group.offload([parameter, moment])
        group.offload([parameter, moment])  # is offloaded already
        assert parameter.isnan().all()  # the copy is not finished
        group.wait()
        assert parameter.data_ptr() != home
        assert parameter.tolist() == [[0 + trip, 1 + trip, 2 + trip], [3 + trip, 4 + trip, 5 + trip]]
        group.reload()
        group.reload()
        assert parameter.isnan().all()
        group.wait_on_device()
        assert moment.tolist() == [0.5] * 4
        with torch.no_grad():
            parameter += 1  # work
        assert (parameter.is_leaf, parameter.requires_grad) == (True, True)
    assert move.pieces == [1024]  # two buffers of 512 bytes, reused every time
    assert group.host_bytes == 1024
    assert move.moves == ["to_host", "to_device"] * 3


def test_copies_without_a_wait_in_between_are_in_order() -> None:
    group, value = OffloadGroup(transfers()), torch.tensor([1.0, 2.0])
    for _ in range(3):
        group.offload([value])
        group.reload()
    group.offload([value])
    group.wait()
    assert value.tolist() == [1.0, 2.0]


def test_all_tensors_stay_offloaded_if_memory_runs_out_in_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    group, tensors = OffloadGroup(transfers()), [torch.tensor([1.0]), torch.tensor([2.0])]
    group.offload(tensors)
    group.wait()
    made = []
    real = torch.empty_strided

    def full(*arguments, **options) -> Tensor:
        if made:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(1)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", full)
        with pytest.raises(torch.OutOfMemoryError):
            group.reload()
    assert group.is_offloaded
    assert [tensor.item() for tensor in tensors] == [1.0, 2.0]
    group.reload()
    group.wait_on_device()
    assert [tensor.item() for tensor in tensors] == [1.0, 2.0]


# --- an optimizer ---


@pytest.mark.parametrize("dtypes", [(HALF, HALF), (FULL, FULL), (HALF, FULL)], ids=str)
def test_updates_are_the_same_if_the_optimizer_was_offloaded_in_between(dtypes) -> None:
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    for seed in range(4):
        optimizer.offload(move)
        # 15 numbers each: masters of bfloat16 from the start, moments of all from the first update on
        masters = 60 * dtypes.count(HALF)
        assert move.away == masters + (120 * len(dtypes) if seed else 0)
        assert all(value.grad is None for value in (*moved, *optimizer.masters))
        if seed % 2:
            optimizer.reload()  # early, or by the update itself
        optimizer.zero_gradients()
        assert move.away == 0  # masters are on the device with the gradients
        update(expected, plain, seed)
        update(optimizer, moved, seed)
        for one, other in zip(plain, moved, strict=True):
            assert torch.equal(one, other)
    assert_equal(optimizer.tensors(), expected.tensors())
    optimizer.offload(move)
    assert_equal(optimizer.tensors(), expected.tensors())
    assert len(move.pieces) == (1 if dtypes == (FULL, FULL) else 2)  # masters' and moments', allocated once


@pytest.mark.parametrize("dtypes", [(HALF, FULL)], ids=str)
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_state_is_loaded_into_an_offloaded_optimizer(dtypes, trained_before: bool) -> None:
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    for seed in range(2):
        update(expected, plain, seed)
    if trained_before:
        update(optimizer, moved, 7)
    optimizer.offload(move)
    optimizer.load_tensors({name: value.clone() for name, value in expected.tensors().items()})
    assert move.away == 60 + 2 * 120  # one master, two pairs of moments
    assert_equal(optimizer.tensors(), expected.tensors())
    update(expected, plain, 3)
    update(optimizer, moved, 3)
    assert_equal(optimizer.tensors(), expected.tensors())
    for one, other in zip(plain, moved, strict=True):
        assert torch.equal(one, other)
