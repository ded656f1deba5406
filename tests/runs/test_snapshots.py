"""Copies of a run's tensors: equal, apart, in the same place each time, and only where there is room.

Tensors "of a GPU" are ones of the CPU here: their places are laid side by side, but cannot be pinned.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hacrl.memory import host as host_memory
from hacrl.runs import checkpointer as snapshots
from hacrl.runs.checkpoint import CheckpointContent, CheckpointId, CheckpointStore
from hacrl.runs.checkpointer import NoRoomError, Snapshots

KINDS = ["cpu", "gpu"]


@pytest.fixture(autouse=True)
def _enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bytes_left(monkeypatch, None)


def set_bytes_left(monkeypatch: pytest.MonkeyPatch, left: int | None) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: left)


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(snapshots, "_is_on_gpu", lambda _: kind == "gpu")
    monkeypatch.setattr(snapshots, "_wait_for_copies", lambda _: None)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    pretend(monkeypatch, request.param)
    return str(request.param)


def content(**tensors: Tensor) -> CheckpointContent:
    return CheckpointContent({"trainer": {"x": 1}}, {"agent-ada": tensors})


def take(taker: Snapshots, **tensors: Tensor) -> dict[str, Tensor]:
    return dict(taker.take(content(**tensors)).tensors["agent-ada"])


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def all_sorts() -> dict[str, Tensor]:
    """Everything whose bits or whose order in memory could go wrong."""
    numbers = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    odd = torch.tensor([0x7FC1, -0x8000, 0x0001, 0x3F8D], dtype=torch.int16)  # a NaN's payload, -0, smallest
    return {
        "0.master": numbers + 0.1,
        "0.step": torch.tensor(3.0),
        "1.master": odd.view(torch.bfloat16),
        "turned": numbers.t(),
        "with_gaps": numbers[:, ::2],
        "repeated": numbers[:1].expand(5, 6),
        "nothing": torch.zeros(0, 3),
        "whole": torch.tensor([2**62 + 1, -1]),
    }


# --- what a copy is ---


def test_a_copy_is_equal_to_the_bit_and_later_updates_do_not_reach_it(kind: str) -> None:
    tensors = all_sorts()
    expected = {name: raw(tensor) for name, tensor in tensors.items()}
    taken = Snapshots().take(content(**tensors))
    assert taken.documents == {"trainer": {"x": 1}}
    for name, tensor in tensors.items():
        if name != "repeated":
            tensor.add_(1)
    found = taken.tensors["agent-ada"]
    assert {name: raw(tensor) for name, tensor in found.items()} == expected
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
    assert found["turned"].stride() == (1, 6)  # the order of the original: one plain copy
    assert found["with_gaps"].stride() == (3, 1)  # without its gaps


def test_equal_names_of_two_agents_are_two_tensors(kind: str) -> None:
    both = CheckpointContent({}, {"a": {"0": torch.ones(3)}, "b": {"0": torch.zeros(3)}})
    taken = Snapshots().take(both).tensors
    assert [taken[group]["0"].tolist() for group in ("a", "b")] == [[1.0] * 3, [0.0] * 3]


def test_the_next_one_lies_in_the_same_place(kind: str) -> None:
    taker, tensors = Snapshots(), all_sorts()
    first = {name: tensor.data_ptr() for name, tensor in take(taker, **tensors).items()}
    tensors["0.master"].mul_(2)
    tensors["1.master"] = tensors["1.master"].flip(0)  # another tensor of the same kind
    second = take(taker, **tensors)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == first
    assert {name: raw(tensor) for name, tensor in second.items()} == {
        name: raw(tensor) for name, tensor in tensors.items()
    }


def test_new_tensors_get_a_place_and_the_others_keep_theirs(kind: str) -> None:
    taker = Snapshots()
    master = take(taker, master=torch.ones(5))["master"].data_ptr()
    both = take(taker, moment=torch.full((7,), 3.0), master=torch.ones(5) * 2)
    assert both["master"].data_ptr() == master
    assert both["master"].tolist() == [2.0] * 5
    assert both["moment"].tolist() == [3.0] * 7


def test_places_of_what_is_gone_are_let_go(kind: str) -> None:
    taker = Snapshots()
    place = weakref.ref(take(taker, gone=torch.ones(5), stays=torch.ones(2))["gone"])
    assert place() is not None
    take(taker, stays=torch.ones(2))
    assert place() is None
    rest = weakref.ref(take(taker, stays=torch.ones(2))["stays"])
    taker.let_go()
    assert rest() is None


@pytest.mark.parametrize(
    "changed",
    [
        torch.arange(3.0).reshape(1, 3),
        torch.arange(6).reshape(2, 3).short(),
        torch.arange(6.0).reshape(3, 2).t(),
    ],
    ids=["shape", "type", "strides"],
)
def test_what_has_changed_its_kind_gets_another_place(kind: str, changed: Tensor) -> None:
    taker = Snapshots()
    take(taker, one=torch.zeros(2, 3))
    found = take(taker, one=changed)["one"]
    assert (found.shape, found.dtype, found.stride()) == (changed.shape, changed.dtype, changed.stride())
    assert torch.equal(found, changed)


def test_a_place_for_a_gpu_serves_what_is_offloaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an evaluation an agent's optimizer is away from its device, without one it is not."""
    taker = Snapshots()
    places = []
    for number, kind in enumerate(("cpu", "gpu", "cpu", "gpu")):
        pretend(monkeypatch, kind)
        taken = take(taker, one=torch.full((5,), float(number)))["one"]
        assert taken.tolist() == [number] * 5
        places.append(taken)  # kept: an address is not used twice
    addresses = [place.data_ptr() for place in places]
    assert addresses[0] != addresses[1]  # ordinary memory is not good enough for a GPU
    assert addresses[1:] == [addresses[1]] * 3


def test_files_of_tensors_that_share_a_piece_of_memory(kind: str, tmp_path: Path) -> None:
    """Neither refused by safetensors nor larger than their tensors."""
    tensors = {**all_sorts(), "large": torch.rand(300, 100)}
    taken = Snapshots().take(content(**tensors))
    pieces = {tensor.untyped_storage().data_ptr() for tensor in taken.tensors["agent-ada"].values()}
    assert (len(pieces) == 1) == (kind == "gpu")
    store, plain = CheckpointStore(tmp_path / "taken"), CheckpointStore(tmp_path / "plain")
    store.write(CheckpointId(1), taken)
    plain.write(CheckpointId(1), content(**tensors))
    written, expected = (one.path(CheckpointId(1)) / "agent-ada.safetensors" for one in (store, plain))
    assert written.read_bytes() == expected.read_bytes()
    # 120,000 of the large one, less than 2,000 of all others and the header
    assert 120_000 < written.stat().st_size < 122_000
    read = store.read(CheckpointId(1)).tensors["agent-ada"]
    assert {name: raw(tensor) for name, tensor in read.items()} == {
        name: raw(tensor) for name, tensor in tensors.items()
    }


# --- only where there is room ---


@pytest.mark.parametrize(
    ("size", "left", "fits"),
    [
        (400, 1400, True),  # 1000 are left free
        (400, 1399, False),
        (95_000, 100_000, True),  # 5%
        (95_001, 100_000, False),
    ],
)
def test_room_by_hand(monkeypatch: pytest.MonkeyPatch, size: int, left: int, fits: bool) -> None:
    monkeypatch.setattr(snapshots, "LEFT_FREE", 1000)
    set_bytes_left(monkeypatch, left)
    if fits:
        take(Snapshots(), one=torch.zeros(size, dtype=torch.uint8))
    else:
        with pytest.raises(NoRoomError):
            take(Snapshots(), one=torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize(("left", "fits"), [(3048, True), (3047, False)])
def test_pinned_memory_counts_as_it_is_handed_out(
    monkeypatch: pytest.MonkeyPatch, left: int, fits: bool
) -> None:
    """3 places of 512 bytes make a piece of 2048; 1000 are left free."""
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr(snapshots, "LEFT_FREE", 1000)
    set_bytes_left(monkeypatch, left)
    tensors = {name: torch.zeros(100) for name in "abc"}
    if fits:
        take(Snapshots(), **tensors)
    else:
        with pytest.raises(NoRoomError):
            take(Snapshots(), **tensors)


def test_a_shortage_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bytes_left(monkeypatch, 5 * 2**28)
    with pytest.raises(NoRoomError) as short:
        take(Snapshots(), one=torch.zeros(1).expand(3 * 2**27))  # float32: 1.5 GiB if it were copied
    assert str(short.value) == (
        "1.50 GiB more of the machine's memory are needed and 1.25 GiB are available, of which 1.00 GiB "
        "are left free"
    )


def test_only_new_places_need_room(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Snapshots()
    take(taker, master=torch.ones(5))
    set_bytes_left(monkeypatch, 0)
    found = take(taker, master=torch.full((5,), 2.0))["master"]
    assert found.tolist() == [2.0] * 5
    place = weakref.ref(found)
    del found
    with pytest.raises(NoRoomError):
        take(taker, master=torch.ones(5), moment=torch.ones(5))
    assert place() is None  # half a copy is of no use to anybody
    set_bytes_left(monkeypatch, None)
    assert take(taker, master=torch.ones(5), moment=torch.zeros(1))["moment"].tolist() == [0.0]


def test_memory_that_cannot_be_had_is_no_room(kind: str) -> None:
    with pytest.raises(NoRoomError, match=r"could not be had \(.*DefaultCPUAllocator"):
        take(Snapshots(), one=torch.zeros(1).expand(2**48))  # a pebibyte: nothing said it was too much
