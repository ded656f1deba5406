"""Sums of gradients that wait in the machine's memory between backward passes; the device is the CPU here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hacrl.training import gradients as gradient_sums
from hacrl.training.optimizer import MasterWeightAdamW
from tests.support.late_transfers import LateTransfers
from tests.training.small_optimizers import CPU, FULL, HALF, adamw, assert_equal, parameters

ONE = 60  # bytes of a sum: 15 numbers in float32


class Watched(LateTransfers):
    """Knows which memory is the machine's."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._pieces: list[Tensor] = []

    def allocate_host(self, size: int) -> Tensor:
        self._pieces.append(super().allocate_host(size))
        return self._pieces[-1]

    def here(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of those that are on the device."""
        away = {piece.untyped_storage().data_ptr() for piece in self._pieces}
        return sum(one.nbytes for one in tensors if one.untyped_storage().data_ptr() not in away)


@pytest.fixture(autouse=True)
def _all_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "MIN_OFFLOAD_BYTES", 0)
    monkeypatch.setattr("hacrl.training.optimizer_block.BLOCK_BYTES", 400)  # two tensors


def away(given: Sequence[Tensor]) -> tuple[MasterWeightAdamW, Watched]:
    """An optimizer of which nothing stays on the device."""
    move = Watched()
    optimizer = MasterWeightAdamW(given, 1e-2, (0.9, 0.999), 0.1, offload_to=move)
    optimizer.stream(move, offload_gradients=True)
    return optimizer, move


def sums(optimizer: MasterWeightAdamW) -> list[Tensor]:
    return [
        weight.gradient_sum
        for piece in optimizer.blocks
        for weight in piece.weights
        if weight.gradient_sum is not None
    ]


def passes(
    optimizer: MasterWeightAdamW, given: Sequence[Tensor], orders: Sequence[Sequence[int]], seed: int
) -> None:
    """An update begins. In every backward pass some parameters get a gradient, in that order."""
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_gradients()
    for order in orders:
        gradients = {number: torch.randn(5, 3, generator=generator) for number in sorted(order)}
        for number in order:
            (given[number] * gradients[number].to(given[number].dtype)).sum().backward()


def finish(optimizer: MasterWeightAdamW, max_norm: float) -> float:
    norm = optimizer.clip_gradients(max_norm)
    optimizer.step()
    return norm


FORWARDS, BACKWARDS = [0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0]
ORDERS = {
    "the same every time": [FORWARDS] * 3,
    "one pass": [BACKWARDS],
    "another order": [FORWARDS, BACKWARDS, [3, 0, 6, 1, 5, 2, 4]],
    "some are left out": [FORWARDS, [0, 3, 6], [6], [0, 1]],
    "some are new": [[2, 4], FORWARDS, [5], [0, 6]],
    "some never": [[0, 2], [2], [0, 6]],
    "none": [],
}


@pytest.mark.parametrize("coming", [0, 2 * ONE, 2**20])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize(
    "dtypes", [(HALF,) * 7, (HALF, FULL, HALF, HALF, FULL, HALF, HALF)], ids=["16", "mix"]
)
def test_updates_are_the_same(dtypes, orders, max_norm, coming, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "PREFETCH_BYTES", coming)
    monkeypatch.setattr(gradient_sums, "MAX_HELD_BYTES", coming)
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, (optimizer, move) = adamw(plain), away(moved)
    for seed in range(3):
        for one, given in ((expected, plain), (optimizer, moved)):
            passes(one, given, orders, seed)
        assert finish(optimizer, max_norm) == finish(expected, max_norm)
        assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
        assert move.here(sums(optimizer)) == 0
    assert_equal(optimizer.tensors(), expected.tensors())


def test_a_few_are_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten sums of which two may come ahead: after each gradient the next two are there, and no other."""
    monkeypatch.setattr(gradient_sums, "PREFETCH_BYTES", 2 * ONE)
    given = parameters((HALF,) * 10)
    optimizer, move = away(given)
    seen: list[int] = []
    real = gradient_sums.OffloadedGradientSums.add

    def add(self, weight) -> None:
        real(self, weight)
        seen.append(move.here(sums(optimizer)) // ONE)

    monkeypatch.setattr(gradient_sums.OffloadedGradientSums, "add", add)
    passes(optimizer, given, [range(10), range(10), [0, 1, 5, 9]], seed=0)
    assert seen == [0] * 10 + [2] * 8 + [1, 0] + [2, 2, 2, 0]
    most = []
    for piece in optimizer.blocks:
        piece.adamw.register_step_pre_hook(lambda *_: most.append(move.here(sums(optimizer))))
    finish(optimizer, 1.0)
    assert most == [2 * ONE] * 5  # a piece at a time


def test_no_more_is_leaving_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a sum has left is kept until the copy is done, and of three sums at most."""
    monkeypatch.setattr(gradient_sums, "MAX_HELD_BYTES", 3 * ONE)
    given = parameters((HALF,) * 8)
    optimizer, _ = away(given)
    under_way: list[tuple[int, int]] = []
    real = gradient_sums.OffloadedGradientSums.add

    def add(self, weight) -> None:
        real(self, weight)
        group = list(self._groups.values())
        all_pending = [one._pending for one in group if one._pending is not None]
        under_way.append((sum(bool(one.copies) for one in all_pending), sum(len(one._held) for one in group)))

    monkeypatch.setattr(gradient_sums.OffloadedGradientSums, "add", add)
    passes(optimizer, given, [range(8)], seed=0)
    assert under_way == [(1, 1), (2, 2)] + [(3, 3)] * 6
    optimizer.clip_gradients(1.0)
    assert [one for group in optimizer._sums._groups.values() for one in group._held] == []


def test_an_attempt_that_is_given_up_leaves_no_memory_behind() -> None:
    given = parameters((HALF,) * 4)
    optimizer, move = away(given)
    passes(optimizer, given, [range(4), [0, 1]], seed=0)
    assert move.here(sums(optimizer)) > 0
    left = [group._held for group in optimizer._sums._groups.values()]
    assert sum(map(len, left)) > 0
    optimizer.offload(move)
    assert move.here(sums(optimizer)) == 0
    group = list(optimizer._sums._groups.values())
    assert [left for one in group for left in one._held] == []
    # nothing is still being copied into memory that was let go
    assert not any(one._pending.copies for one in group)
    assert optimizer._sums._order == []


def test_no_gradient_of_a_given_up_attempt_is_kept() -> None:
    given = parameters((HALF,) * 2)
    optimizer, _ = away(given)
    optimizer.zero_gradients()
    given[0].grad = torch.ones(5, 3, dtype=HALF)  # as of a pass that broke off before it was taken
    optimizer.zero_gradients()
    assert given[0].grad is None


@pytest.mark.parametrize("last", [[0], [0, 7], [0, 3]])
def test_sums_that_a_pass_does_not_use_leave_again(last, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five come ahead; of those that leave, memory of one lingers at most, and of none in the end."""
    monkeypatch.setattr(gradient_sums, "PREFETCH_BYTES", 5 * ONE)
    monkeypatch.setattr(gradient_sums, "MAX_HELD_BYTES", ONE)
    given = parameters((HALF,) * 8)
    optimizer, move = away(given)
    passes(optimizer, given, [range(8), last], seed=0)
    group = list(optimizer._sums._groups.values())
    assert sum(len(one._held) for one in group) <= 1
    optimizer.clip_gradients(1.0)
    assert move.here(sums(optimizer)) == 0
    assert [left for one in group for left in one._held] == []
    optimizer.wait()
    assert not any(one._pending.copies for one in group)


def test_a_sum_has_one_place_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has left is let go before it gets another."""
    given = parameters((HALF,) * 2)
    optimizer, _ = away(given)
    group = optimizer._sums._groups.values()
    real, lingering = torch.empty_strided, []

    def asked(*shape, **named) -> Tensor:
        lingering.append([len(one._held) for one in group])
        return real(*shape, **named)

    passes(optimizer, given, [[0, 1]], seed=0)
    assert [len(one._held) for one in group] == [1, 1]
    monkeypatch.setattr(torch, "empty_strided", asked)
    (given[0] * 2).sum().backward()
    assert lingering == [[0, 1], [1, 0]]  # its own, then the next one's, which comes ahead


def test_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "MIN_OFFLOAD_BYTES", ONE)
    given = [nn.Parameter(torch.zeros(size, dtype=HALF)) for size in (14, 15)]
    optimizer, move = away(given)
    optimizer.zero_gradients()
    for one in given:
        one.sum().backward()
    assert [move.here([one]) for one in sums(optimizer)] == [56, 0]
    assert finish(optimizer, 1e6) == pytest.approx(29**0.5)
    optimizer.offload(move)
    assert move.here(sums(optimizer)) == 0


def without_room(move: LateTransfers, monkeypatch: pytest.MonkeyPatch, *attempts: int) -> None:
    real, asked = move.to_device, []

    def to_device(*given, **named):
        asked.append(1)
        if len(asked) in attempts:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*given, **named)

    monkeypatch.setattr(move, "to_device", to_device)


def test_memory_that_runs_out_in_a_pass_costs_the_attempt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 6), parameters((HALF,) * 6)
    expected, (optimizer, move) = adamw(plain), away(moved)
    with monkeypatch.context() as patch:
        without_room(move, patch, 1)
        with pytest.raises(torch.OutOfMemoryError):
            passes(optimizer, moved, [range(6), range(6)], seed=0)
    for one, given in ((expected, plain), (optimizer, moved)):
        passes(one, given, [range(6), range(6)], seed=0)
    assert finish(optimizer, 0.5) == finish(expected, 0.5)
    assert_equal(optimizer.tensors(), expected.tensors())


def test_no_room_ahead_of_its_turn_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 6), parameters((HALF,) * 6)
    expected, (optimizer, move) = adamw(plain), away(moved)
    with monkeypatch.context() as patch:
        without_room(move, patch, 2, 5)
        passes(optimizer, moved, [range(6), range(6)], seed=0)
    passes(expected, plain, [range(6), range(6)], seed=0)
    assert finish(optimizer, 0.5) == finish(expected, 0.5)
    assert_equal(optimizer.tensors(), expected.tensors())


@pytest.mark.parametrize("attempt", range(1, 10))
def test_memory_that_runs_out_in_an_update_changes_nothing(
    attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three pieces: masters and moments come together, then two sums one by one. None is scaled twice."""
    plain, moved = parameters((HALF,) * 6), parameters((HALF,) * 6)
    expected, (optimizer, move) = adamw(plain), away(moved)
    for one, given in ((expected, plain), (optimizer, moved)):
        passes(one, given, [range(6)], seed=0)
        one.clip_gradients(0.5)
    expected.step()
    without_room(move, monkeypatch, attempt, attempt + 1)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    optimizer.step()  # there is room again: it goes on where it was
    assert_equal(optimizer.tensors(), expected.tensors())


def test_what_was_scaled_is_not_scaled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are made in the first update, and there is no room for the second piece's."""
    plain, moved = parameters((HALF,) * 6), parameters((HALF,) * 6)
    expected, (optimizer, _) = adamw(plain), away(moved)
    for one, given in ((expected, plain), (optimizer, moved)):
        passes(one, given, [range(6)], seed=0)
        assert one.clip_gradients(0.5) > 0.5

    def full(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.blocks[1].adamw, "step", full)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.step()
    expected.step()
    assert_equal(optimizer.tensors(), expected.tensors())


def test_masters_leave_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven pieces no more than two masters' are on the device while they are made."""
    move, most = Watched(), []
    real = torch.optim.AdamW.__init__

    def made(self, masters, **named) -> None:
        real(self, masters, **named)
        away = [copy for pending in all_pending for copy in pending.copies]
        most.append(len(masters) + len(away))

    all_pending = []
    leave = move.to_host
    monkeypatch.setattr(
        move, "to_host", lambda *given, **_: all_pending.append(leave(*given)) or all_pending[-1]
    )
    monkeypatch.setattr(torch.optim.AdamW, "__init__", made)
    MasterWeightAdamW(parameters((HALF,) * 14), 1e-2, (0.9, 0.999), 0.1, offload_to=move)
    assert most == [2] + [4] * 6
