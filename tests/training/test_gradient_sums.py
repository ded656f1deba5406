"""Gradient sums offloaded between backward passes; the "device" is the CPU here."""

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


class TrackedTransfers(LateTransfers):
    """Tells host buffers from device memory."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._pieces: list[Tensor] = []

    def allocate_host(self, size: int) -> Tensor:
        self._pieces.append(super().allocate_host(size))
        return self._pieces[-1]

    def on_device_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of the tensors that are on the device."""
        on_host = {block.untyped_storage().data_ptr() for block in self._pieces}
        return sum(one.nbytes for one in tensors if one.untyped_storage().data_ptr() not in on_host)


@pytest.fixture(autouse=True)
def _offload_all_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "MIN_OFFLOAD_BYTES", 0)
    monkeypatch.setattr("hacrl.training.optimizer_block.BLOCK_BYTES", 400)  # two tensors


def offloaded(given: Sequence[Tensor]) -> tuple[MasterWeightAdamW, TrackedTransfers]:
    """Return an optimizer with all state and gradient sums offloaded."""
    move = TrackedTransfers()
    optimizer = MasterWeightAdamW(given, 1e-2, (0.9, 0.999), 0.1, offload_to=move)
    optimizer.stream(move, offload_gradients=True)
    return optimizer, move


def sums(optimizer: MasterWeightAdamW) -> list[Tensor]:
    return [
        weight.gradient_sum
        for block in optimizer.blocks
        for weight in block.weights
        if weight.gradient_sum is not None
    ]


def passes(
    optimizer: MasterWeightAdamW, given: Sequence[Tensor], orders: Sequence[Sequence[int]], seed: int
) -> None:
    """Begin an update. In each backward pass the given parameters get a gradient, in the given order."""
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


@pytest.mark.parametrize("prefetch_bytes", [0, 2 * ONE, 2**20])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize(
    "dtypes", [(HALF,) * 7, (HALF, FULL, HALF, HALF, FULL, HALF, HALF)], ids=["16", "mix"]
)
def test_updates_equal_those_of_an_optimizer_on_the_device(
    dtypes, orders, max_norm, prefetch_bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_sums, "PREFETCH_BYTES", prefetch_bytes)
    monkeypatch.setattr(gradient_sums, "MAX_HELD_BYTES", prefetch_bytes)
    plain, moved = parameters(dtypes), parameters(dtypes)
    expected, (optimizer, move) = adamw(plain), offloaded(moved)
    for seed in range(3):
        for one, given in ((expected, plain), (optimizer, moved)):
            passes(one, given, orders, seed)
        assert finish(optimizer, max_norm) == finish(expected, max_norm)
        assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
        assert move.on_device_bytes(sums(optimizer)) == 0
    assert_equal(optimizer.tensors(), expected.tensors())


def test_only_prefetched_sums_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten sums, two prefetched: after each gradient only the next two are on the device."""
    monkeypatch.setattr(gradient_sums, "PREFETCH_BYTES", 2 * ONE)
    given = parameters((HALF,) * 10)
    optimizer, move = offloaded(given)
    seen: list[int] = []
    real = gradient_sums.OffloadedGradientSums.add

    def add(self, weight) -> None:
        real(self, weight)
        seen.append(move.on_device_bytes(sums(optimizer)) // ONE)

    monkeypatch.setattr(gradient_sums.OffloadedGradientSums, "add", add)
    passes(optimizer, given, [range(10), range(10), [0, 1, 5, 9]], seed=0)
    assert seen == [0] * 10 + [2] * 8 + [1, 0] + [2, 2, 2, 0]
    most = []
    for block in optimizer.blocks:
        block.adamw.register_step_pre_hook(lambda *_: most.append(move.on_device_bytes(sums(optimizer))))
    finish(optimizer, 1.0)
    assert most == [2 * ONE] * 5  # one block at a time


def test_held_memory_of_offloading_sums_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device memory of at most three sums is held while they are copied to the host."""
    monkeypatch.setattr(gradient_sums, "MAX_HELD_BYTES", 3 * ONE)
    given = parameters((HALF,) * 8)
    optimizer, _ = offloaded(given)
    under_way: list[tuple[int, int]] = []
    real = gradient_sums.OffloadedGradientSums.add

    def add(self, weight) -> None:
        real(self, weight)
        groups = list(self._groups.values())
        all_pending = [group._pending for group in groups if group._pending is not None]
        under_way.append(
            (sum(bool(one.copies) for one in all_pending), sum(len(group._held) for group in groups))
        )

    monkeypatch.setattr(gradient_sums.OffloadedGradientSums, "add", add)
    passes(optimizer, given, [range(8)], seed=0)
    assert under_way == [(1, 1), (2, 2)] + [(3, 3)] * 6
    optimizer.clip_gradients(1.0)
    assert [one for groups in optimizer._sums._groups.values() for one in groups._held] == []


def test_an_abandoned_attempt_holds_no_device_memory() -> None:
    given = parameters((HALF,) * 4)
    optimizer, move = offloaded(given)
    passes(optimizer, given, [range(4), [0, 1]], seed=0)
    assert move.on_device_bytes(sums(optimizer)) > 0
    left = [groups._held for groups in optimizer._sums._groups.values()]
    assert sum(map(len, left)) > 0
    optimizer.offload(move)
    assert move.on_device_bytes(sums(optimizer)) == 0
    groups = list(optimizer._sums._groups.values())
    assert [memory for group in groups for memory in group._held] == []
    # no copy into freed memory is pending
    assert not any(group._pending.copies for group in groups)
    assert optimizer._sums._order == []


def test_no_gradient_of_an_abandoned_attempt_is_kept() -> None:
    given = parameters((HALF,) * 2)
    optimizer, _ = offloaded(given)
    optimizer.zero_gradients()
    given[0].grad = torch.ones(5, 3, dtype=HALF)  # as after a pass that failed before it was added
    optimizer.zero_gradients()
    assert given[0].grad is None


@pytest.mark.parametrize("last", [[0], [0, 7], [0, 3]])
def test_prefetched_sums_that_a_pass_skips_are_offloaded_again(last, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five are prefetched. Memory of at most one offloaded sum is held, and of none in the end."""
    monkeypatch.setattr(gradient_sums, "PREFETCH_BYTES", 5 * ONE)
    monkeypatch.setattr(gradient_sums, "MAX_HELD_BYTES", ONE)
    given = parameters((HALF,) * 8)
    optimizer, move = offloaded(given)
    passes(optimizer, given, [range(8), last], seed=0)
    groups = list(optimizer._sums._groups.values())
    assert sum(len(group._held) for group in groups) <= 1
    optimizer.clip_gradients(1.0)
    assert move.on_device_bytes(sums(optimizer)) == 0
    assert [memory for group in groups for memory in group._held] == []
    optimizer.wait()
    assert not any(group._pending.copies for group in groups)


def test_held_memory_is_released_before_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum never has two allocations on the device."""
    given = parameters((HALF,) * 2)
    optimizer, _ = offloaded(given)
    groups = optimizer._sums._groups.values()
    real, held_counts = torch.empty_strided, []

    def asked(*shape, **named) -> Tensor:
        held_counts.append([len(group._held) for group in groups])
        return real(*shape, **named)

    passes(optimizer, given, [[0, 1]], seed=0)
    assert [len(group._held) for group in groups] == [1, 1]
    monkeypatch.setattr(torch, "empty_strided", asked)
    (given[0] * 2).sum().backward()
    assert held_counts == [[0, 1], [1, 0]]  # its own, then the next sum's, which is prefetched


def test_small_sums_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "MIN_OFFLOAD_BYTES", ONE)
    given = [nn.Parameter(torch.zeros(size, dtype=HALF)) for size in (14, 15)]
    optimizer, move = offloaded(given)
    optimizer.zero_gradients()
    for one in given:
        one.sum().backward()
    assert [move.on_device_bytes([one]) for one in sums(optimizer)] == [56, 0]
    assert finish(optimizer, 1e6) == pytest.approx(29**0.5)
    optimizer.offload(move)
    assert move.on_device_bytes(sums(optimizer)) == 0


def run_out_of_memory(move: LateTransfers, monkeypatch: pytest.MonkeyPatch, *attempts: int) -> None:
    real, asked = move.to_device, []

    def to_device(*given, **named):
        asked.append(1)
        if len(asked) in attempts:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*given, **named)

    monkeypatch.setattr(move, "to_device", to_device)


def test_an_attempt_can_be_repeated_after_memory_ran_out_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 6), parameters((HALF,) * 6)
    expected, (optimizer, move) = adamw(plain), offloaded(moved)
    with monkeypatch.context() as patch:
        run_out_of_memory(move, patch, 1)
        with pytest.raises(torch.OutOfMemoryError):
            passes(optimizer, moved, [range(6), range(6)], seed=0)
    for one, given in ((expected, plain), (optimizer, moved)):
        passes(one, given, [range(6), range(6)], seed=0)
    assert finish(optimizer, 0.5) == finish(expected, 0.5)
    assert_equal(optimizer.tensors(), expected.tensors())


def test_memory_that_runs_out_in_a_prefetch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = parameters((HALF,) * 6), parameters((HALF,) * 6)
    expected, (optimizer, move) = adamw(plain), offloaded(moved)
    with monkeypatch.context() as patch:
        run_out_of_memory(move, patch, 2, 5)
        passes(optimizer, moved, [range(6), range(6)], seed=0)
    passes(expected, plain, [range(6), range(6)], seed=0)
    assert finish(optimizer, 0.5) == finish(expected, 0.5)
    assert_equal(optimizer.tensors(), expected.tensors())


@pytest.mark.parametrize("attempt", range(1, 10))
def test_memory_that_runs_out_in_an_update_changes_nothing(
    attempt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks: state is reloaded together, then two sums one by one. No sum is scaled twice."""
    plain, moved = parameters((HALF,) * 6), parameters((HALF,) * 6)
    expected, (optimizer, move) = adamw(plain), offloaded(moved)
    for one, given in ((expected, plain), (optimizer, moved)):
        passes(one, given, [range(6)], seed=0)
        one.clip_gradients(0.5)
    expected.step()
    run_out_of_memory(move, monkeypatch, attempt, attempt + 1)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    optimizer.step()  # memory is free again: the update continues
    assert_equal(optimizer.tensors(), expected.tensors())


def test_sums_are_scaled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update makes the moments. Memory runs out at those of the second block."""
    plain, moved = parameters((HALF,) * 6), parameters((HALF,) * 6)
    expected, (optimizer, _) = adamw(plain), offloaded(moved)
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


def test_masters_are_offloaded_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters of at most two of seven blocks are on the device while they are made."""
    move, most = TrackedTransfers(), []
    real = torch.optim.AdamW.__init__

    def made(self, masters, **named) -> None:
        real(self, masters, **named)
        pending_copies = [copy for pending in all_pending for copy in pending.copies]
        most.append(len(masters) + len(pending_copies))

    all_pending = []
    to_host = move.to_host
    monkeypatch.setattr(
        move, "to_host", lambda *given, **_: all_pending.append(to_host(*given)) or all_pending[-1]
    )
    monkeypatch.setattr(torch.optim.AdamW, "__init__", made)
    MasterWeightAdamW(parameters((HALF,) * 14), 1e-2, (0.9, 0.999), 0.1, offload_to=move)
    assert most == [2] + [4] * 6
