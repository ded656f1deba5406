"""Optimizers that stream masters and moments through a device block by block; it is the CPU here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hacrl.errors import TrainingError
from hacrl.training.optimizer import MasterWeightAdamW
from tests.support.late_transfers import LateTransfers
from tests.training.small_optimizers import (
    CPU,
    FULL,
    HALF,
    adamw,
    assert_equal,
    parameters,
    transfers,
    update,
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two tensors: 15 numbers with masters and moments are 180 bytes each."""
    monkeypatch.setattr("hacrl.training.optimizer_block.BLOCK_BYTES", 400)


@pytest.mark.usefixtures("small_blocks")
def test_neighbouring_weights_share_a_block() -> None:
    given = parameters((HALF, HALF, FULL, HALF, FULL, FULL, FULL))
    wide = nn.Parameter(torch.zeros(500, dtype=HALF))
    numbers = [[weight.number for weight in block.weights] for block in adamw([*given, wide]).blocks]
    # bytes: 180, 180, 120, 180, 120, 120, 120, 6000
    assert numbers == [[0, 1], [2, 3], [4, 5, 6], [7]]


class PeakTransfers(LateTransfers):
    """Records the most bytes on the device at a time, of tensors that were offloaded before."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.peak = 0
        self._all = 0

    def to_host(self, copies, after, **named):
        pending = super().to_host(copies, after, **named)
        self._all = max(self._all, self.away)
        return pending

    def to_device(self, copies, after, **named):
        pending = super().to_device(copies, after, **named)
        self.peak = max(self.peak, self._all - self.away)
        return pending


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtypes", [(HALF,) * 9, (FULL,) * 8, (HALF, FULL) * 4], ids=len)
def test_streamed_updates_equal_those_on_the_device(dtypes) -> None:
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), PeakTransfers()
    optimizer.offload(move)
    optimizer.stream(move)
    for seed in range(4):
        update(expected, plain, seed)
        update(optimizer, moved, seed)
        for one, other in zip(plain, moved, strict=True):
            assert torch.equal(one, other)
        assert move.away == 60 * dtypes.count(HALF) + 120 * len(dtypes)
        optimizer.zero_gradients()  # as the next update does: nothing is reloaded for it
        assert move.away == 60 * dtypes.count(HALF) + 120 * len(dtypes)
    assert_equal(optimizer.tensors(), expected.tensors())
    assert 0 < move.peak <= 400  # a block; the one before may still be offloading


def under_way(optimizer: MasterWeightAdamW, move: LateTransfers) -> list[list[bool]]:
    """Return, for each reload of an update, whether each block has a pending copy."""
    found: list[list[bool]] = []
    real = move.to_device

    def asked(copies, after, **named):
        found.append([bool(block.group._pending.copies) for block in optimizer.blocks])
        return real(copies, after, **named)

    move.to_device = asked
    optimizer.wait()
    optimizer.zero_gradients()
    optimizer.step()
    return found


@pytest.mark.usefixtures("small_blocks")
def test_a_block_is_reloaded_when_the_memory_of_an_earlier_block_is_free() -> None:
    """Without waiting, Python would allocate all blocks at once."""
    given = parameters((HALF,) * 10)
    optimizer, move = adamw(given), transfers()
    optimizer.offload(move)
    optimizer.stream(move)
    update(optimizer, given, 0)
    done = under_way(optimizer, move)
    # the third is reloaded when the first is offloaded and the second is offloading, and so on
    assert len(done) == 5
    assert done[2] == [False, True, False, False, False]
    assert done[3] == [False, False, True, False, False]
    assert done[4] == [False, False, False, True, False]


@pytest.mark.usefixtures("small_blocks")
def test_a_large_tensor_streams_alone() -> None:
    """Blocks of 360, 360, 6000 and 360 bytes; 800 bytes may be on the device at a time."""
    given = [*parameters((HALF,) * 4), nn.Parameter(torch.zeros(500, dtype=HALF)), *parameters((HALF,) * 2)]
    optimizer, move = adamw(given), transfers()
    optimizer.offload(move)
    optimizer.stream(move)
    optimizer.zero_gradients()
    optimizer.step()
    assert under_way(optimizer, move) == [
        [False, False, False, False],
        [True, False, False, False],
        [False, False, False, False],
        [False, False, False, False],
    ]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_state_is_loaded_into_a_streaming_optimizer(
    trained_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = (HALF, FULL) * 4
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), PeakTransfers()
    for seed in range(2):
        update(expected, plain, seed)
    optimizer.offload(move)
    optimizer.stream(move)
    if trained_before:
        update(optimizer, moved, 7)
    optimizer.wait()
    real = move.to_device

    def to_device(copies, after, **named):
        assert not any(
            block.group._pending.copies for block in optimizer.blocks
        )  # the last block is offloaded
        return real(copies, after, **named)

    with monkeypatch.context() as patch:
        patch.setattr(move, "to_device", to_device)
        optimizer.load_tensors({name: value.clone() for name, value in expected.tensors().items()})
    assert move.away == 4 * 60 + 8 * 120
    assert move.peak <= 400  # one block at a time
    assert_equal(optimizer.tensors(), expected.tensors())
    update(expected, plain, 3)
    update(optimizer, moved, 3)
    assert_equal(optimizer.tensors(), expected.tensors())


def test_blocks_share_host_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tensors with a master and two moments each, three to a block; a host buffer has 512 bytes."""
    monkeypatch.setattr("hacrl.training.optimizer_block.BLOCK_BYTES", 600)
    given = parameters((HALF,) * 12)
    optimizer, move = adamw(given), transfers()
    optimizer.stream(move)
    for seed in range(3):
        update(optimizer, given, seed)
    # 9 buffers of a block are 4608 bytes, in a chunk of 8192; the next block uses the rest
    assert move.pieces == [8192, 1024, 8192, 1024]
    assert sum(move.pieces) == 36 * 512


def full_at(move: LateTransfers, *attempts: int):
    """Return a ``to_device`` that runs out of memory at the given calls, counted from one."""
    real, asked = move.to_device, []

    def to_device(copies, after, **named):
        asked.append(1)
        if len(asked) in attempts:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(copies, after, **named)

    return to_device


@pytest.mark.usefixtures("small_blocks")
def test_a_reload_is_retried_after_the_other_blocks_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 8), parameters((HALF,) * 8)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    optimizer.offload(move)
    optimizer.stream(move)
    with monkeypatch.context() as patch:
        patch.setattr(move, "to_device", full_at(move, 3))
        update(optimizer, moved, 0)
    update(expected, plain, 0)
    assert_equal(optimizer.tensors(), expected.tensors())


@pytest.mark.usefixtures("small_blocks")
def test_an_interrupted_update_is_detected_and_can_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 8), parameters((HALF,) * 8)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    optimizer.offload(move)
    optimizer.stream(move)
    before = {name: value.clone() for name, value in optimizer.tensors().items()}
    with monkeypatch.context() as patch:
        patch.setattr(move, "to_device", full_at(move, 3, 4))
        with pytest.raises(torch.OutOfMemoryError):
            update(optimizer, moved, 0)
    for use in (optimizer.tensors, optimizer.zero_gradients):
        with pytest.raises(TrainingError, match=r"middle of an update: 2 of 4 blocks .*hacrl resume"):
            use()
    optimizer.step()  # memory is free again: the update continues
    update(expected, plain, 0)
    assert_equal(optimizer.tensors(), expected.tensors())
    with monkeypatch.context() as patch:
        patch.setattr(move, "to_device", full_at(move, 3, 4))
        with pytest.raises(torch.OutOfMemoryError):
            update(optimizer, moved, 1)
    optimizer.load_tensors(before)  # as a resumed run does
    assert optimizer.tensors().keys() >= before.keys()
    update(optimizer, moved, 0)
    assert_equal(optimizer.tensors(), expected.tensors())


def test_a_failed_update_keeps_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parameters((HALF, HALF))
    optimizer = adamw(given)
    optimizer.zero_gradients()

    def full(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optimizer.blocks[0].adamw, "step", full)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    optimizer.offload(transfers())
    assert all(value.grad is None for value in (*given, *optimizer.masters))
