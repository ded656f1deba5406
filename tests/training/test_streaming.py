"""Optimizers whose masters and moments pass through a device a piece at a time; here it is the CPU."""

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
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of 15 numbers with masters, 360 bytes, in a piece."""
    monkeypatch.setattr("hacrl.training.optimizer_block.BLOCK_BYTES", 400)


@pytest.mark.usefixtures("small_pieces")
def test_neighbours_are_in_a_piece_together() -> None:
    given = parameters((HALF, HALF, FULL, HALF, FULL, FULL, FULL))
    wide = nn.Parameter(torch.zeros(500, dtype=HALF))
    numbers = [[weight.number for weight in piece.weights] for piece in adamw([*given, wide]).blocks]
    # bytes: 180, 180, 120, 180, 120, 120, 120, 6000
    assert numbers == [[0, 1], [2, 3], [4, 5, 6], [7]]


class Counting(LateTransfers):
    """The most bytes that were not away at any time, of those that had been."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.most_here = 0
        self._all = 0

    def to_host(self, copies, after, **named):
        pending = super().to_host(copies, after, **named)
        self._all = max(self._all, self.away)
        return pending

    def to_device(self, copies, after, **named):
        pending = super().to_device(copies, after, **named)
        self.most_here = max(self.most_here, self._all - self.away)
        return pending


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtypes", [(HALF,) * 9, (FULL,) * 8, (HALF, FULL) * 4], ids=len)
def test_updates_that_stream_are_the_same(dtypes) -> None:
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), Counting()
    optimizer.offload(move)
    optimizer.stream(move)
    for seed in range(4):
        update(expected, plain, seed)
        update(optimizer, moved, seed)
        for one, other in zip(plain, moved, strict=True):
            assert torch.equal(one, other)
        assert move.away == 60 * dtypes.count(HALF) + 120 * len(dtypes)
        optimizer.zero_gradients()  # as the next update does, and nothing comes for it
        assert move.away == 60 * dtypes.count(HALF) + 120 * len(dtypes)
    assert_equal(optimizer.tensors(), expected.tensors())
    assert 0 < move.most_here <= 400  # a piece; the one before may still be leaving


def under_way(optimizer: MasterWeightAdamW, move: LateTransfers) -> list[list[bool]]:
    """Of an update: whether a copy of each piece is under way whenever one is asked for."""
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


@pytest.mark.usefixtures("small_pieces")
def test_memory_is_asked_for_when_that_of_an_earlier_piece_is_free() -> None:
    """Nobody waits for copies on a device, so that all pieces would be there at once."""
    given = parameters((HALF,) * 10)
    optimizer, move = adamw(given), transfers()
    optimizer.offload(move)
    optimizer.stream(move)
    update(optimizer, given, 0)
    done = under_way(optimizer, move)
    # the third is asked for when the first has left and the second is leaving, and so on
    assert len(done) == 5
    assert done[2] == [False, True, False, False, False]
    assert done[3] == [False, False, True, False, False]
    assert done[4] == [False, False, False, True, False]


@pytest.mark.usefixtures("small_pieces")
def test_a_large_tensor_passes_through_alone() -> None:
    """Pieces of 360 and 360, 6000, and 360 bytes; 800 may be there at a time."""
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


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("trained_before", [False, True])
def test_a_state_is_loaded_into_an_optimizer_that_streams(
    trained_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = (HALF, FULL) * 4
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, optimizer, move = adamw(plain), adamw(moved), Counting()
    for seed in range(2):
        update(expected, plain, seed)
    optimizer.offload(move)
    optimizer.stream(move)
    if trained_before:
        update(optimizer, moved, 7)
    optimizer.wait()
    real = move.to_device

    def to_device(copies, after, **named):
        assert not any(block.group._pending.copies for block in optimizer.blocks)  # the last one has left
        return real(copies, after, **named)

    with monkeypatch.context() as patch:
        patch.setattr(move, "to_device", to_device)
        optimizer.load_tensors({name: value.clone() for name, value in expected.tensors().items()})
    assert move.away == 4 * 60 + 8 * 120
    assert move.most_here <= 400  # a piece at a time
    assert_equal(optimizer.tensors(), expected.tensors())
    update(expected, plain, 3)
    update(optimizer, moved, 3)
    assert_equal(optimizer.tensors(), expected.tensors())


def test_pieces_share_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tensors with a master and two moments each, three to a piece; a place has 512 bytes."""
    monkeypatch.setattr("hacrl.training.optimizer_block.BLOCK_BYTES", 600)
    given = parameters((HALF,) * 12)
    optimizer, move = adamw(given), transfers()
    optimizer.stream(move)
    for seed in range(3):
        update(optimizer, given, seed)
    # 9 places of a piece are 4608 bytes, for which memory is handed out in 8192; the rest is the next one's
    assert move.pieces == [8192, 1024, 8192, 1024]
    assert sum(move.pieces) == 36 * 512


def full_at(move: LateTransfers, *attempts: int):
    """A device without room for some of what is to come back, counted from one."""
    real, asked = move.to_device, []

    def to_device(copies, after, **named):
        asked.append(1)
        if len(asked) in attempts:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(copies, after, **named)

    return to_device


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_without_room_comes_when_the_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 8), parameters((HALF,) * 8)
    expected, optimizer, move = adamw(plain), adamw(moved), transfers()
    optimizer.offload(move)
    optimizer.stream(move)
    with monkeypatch.context() as patch:
        patch.setattr(move, "to_device", full_at(move, 3))
        update(optimizer, moved, 0)
    update(expected, plain, 0)
    assert_equal(optimizer.tensors(), expected.tensors())


@pytest.mark.usefixtures("small_pieces")
def test_an_update_that_ends_in_the_middle_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
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
    optimizer.step()  # there is room again: it goes on where it was
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
