"""Snapshots of a run's tensors: equal, independent, in the same buffers each time, and only if memory allows.

Tensors "of a GPU" are CPU tensors here: their buffers share one allocation, but cannot be pinned.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hacrl.memory import host as host_memory
from hacrl.runs import checkpointer as module
from hacrl.runs.checkpoint import CheckpointContent, CheckpointId, CheckpointStore
from hacrl.runs.checkpointer import HostMemoryError, HostSnapshot

KINDS = ["cpu", "gpu"]


@pytest.fixture(autouse=True)
def _enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bytes_left(monkeypatch, None)


def set_bytes_left(monkeypatch: pytest.MonkeyPatch, left: int | None) -> None:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: left)


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(module, "_is_on_gpu", lambda _: kind == "gpu")
    monkeypatch.setattr(module, "_wait_for_copies", lambda _: None)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    pretend(monkeypatch, request.param)
    return str(request.param)


def content(**tensors: Tensor) -> CheckpointContent:
    return CheckpointContent({"trainer": {"x": 1}}, {"agent-ada": tensors})


def copy(snapshot: HostSnapshot, **tensors: Tensor) -> dict[str, Tensor]:
    return dict(snapshot.copy(content(**tensors)).tensors["agent-ada"])


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensors_of_all_kinds() -> dict[str, Tensor]:
    """Special values and memory layouts."""
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


# --- the content of a copy ---


def test_a_copy_is_bit_identical_and_later_updates_do_not_change_it(kind: str) -> None:
    tensors = tensors_of_all_kinds()
    expected = {name: raw(tensor) for name, tensor in tensors.items()}
    copied = HostSnapshot().copy(content(**tensors))
    assert copied.documents == {"trainer": {"x": 1}}
    for name, tensor in tensors.items():
        if name != "repeated":
            tensor.add_(1)
    found = copied.tensors["agent-ada"]
    assert {name: raw(tensor) for name, tensor in found.items()} == expected
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
    assert found["turned"].stride() == (1, 6)  # the order of the original: one plain copy
    assert found["with_gaps"].stride() == (3, 1)  # without its gaps


def test_equal_names_of_two_agents_are_two_tensors(kind: str) -> None:
    both = CheckpointContent({}, {"a": {"0": torch.ones(3)}, "b": {"0": torch.zeros(3)}})
    copied = HostSnapshot().copy(both).tensors
    assert [copied[group]["0"].tolist() for group in ("a", "b")] == [[1.0] * 3, [0.0] * 3]


def test_the_next_copy_reuses_the_buffers(kind: str) -> None:
    snapshot, tensors = HostSnapshot(), tensors_of_all_kinds()
    first = {name: tensor.data_ptr() for name, tensor in copy(snapshot, **tensors).items()}
    tensors["0.master"].mul_(2)
    tensors["1.master"] = tensors["1.master"].flip(0)  # another tensor of the same kind
    second = copy(snapshot, **tensors)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == first
    assert {name: raw(tensor) for name, tensor in second.items()} == {
        name: raw(tensor) for name, tensor in tensors.items()
    }


def test_new_tensors_get_a_buffer_and_the_others_keep_theirs(kind: str) -> None:
    snapshot = HostSnapshot()
    master = copy(snapshot, master=torch.ones(5))["master"].data_ptr()
    both = copy(snapshot, moment=torch.full((7,), 3.0), master=torch.ones(5) * 2)
    assert both["master"].data_ptr() == master
    assert both["master"].tolist() == [2.0] * 5
    assert both["moment"].tolist() == [3.0] * 7


def test_buffers_of_removed_tensors_are_freed(kind: str) -> None:
    snapshot = HostSnapshot()
    buffer = weakref.ref(copy(snapshot, gone=torch.ones(5), stays=torch.ones(2))["gone"])
    assert buffer() is not None
    copy(snapshot, stays=torch.ones(2))
    assert buffer() is None
    rest = weakref.ref(copy(snapshot, stays=torch.ones(2))["stays"])
    snapshot.release()
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
def test_a_tensor_of_another_kind_gets_another_buffer(kind: str, changed: Tensor) -> None:
    snapshot = HostSnapshot()
    copy(snapshot, one=torch.zeros(2, 3))
    found = copy(snapshot, one=changed)["one"]
    assert (found.shape, found.dtype, found.stride()) == (changed.shape, changed.dtype, changed.stride())
    assert torch.equal(found, changed)


def test_a_gpu_buffer_also_serves_the_offloaded_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an evaluation an agent's optimizer is offloaded; otherwise it is on its device."""
    snapshot = HostSnapshot()
    buffers = []
    for number, kind in enumerate(("cpu", "gpu", "cpu", "gpu")):
        pretend(monkeypatch, kind)
        copied = copy(snapshot, one=torch.full((5,), float(number)))["one"]
        assert copied.tolist() == [number] * 5
        buffers.append(copied)  # kept: an address is not used twice
    addresses = [buffer.data_ptr() for buffer in buffers]
    assert addresses[0] != addresses[1]  # a GPU needs pinned memory
    assert addresses[1:] == [addresses[1]] * 3


def test_files_of_tensors_that_share_one_allocation(kind: str, tmp_path: Path) -> None:
    """Safetensors accepts them, and the file holds no more than the tensors."""
    tensors = {**tensors_of_all_kinds(), "large": torch.rand(300, 100)}
    copied = HostSnapshot().copy(content(**tensors))
    pieces = {tensor.untyped_storage().data_ptr() for tensor in copied.tensors["agent-ada"].values()}
    assert (len(pieces) == 1) == (kind == "gpu")
    store, plain = CheckpointStore(tmp_path / "copied"), CheckpointStore(tmp_path / "plain")
    store.write(CheckpointId(1), copied)
    plain.write(CheckpointId(1), content(**tensors))
    written, expected = (one.path(CheckpointId(1)) / "agent-ada.safetensors" for one in (store, plain))
    assert written.read_bytes() == expected.read_bytes()
    # 120,000 bytes of the large tensor, less than 2,000 of all others and the header
    assert 120_000 < written.stat().st_size < 122_000
    read = store.read(CheckpointId(1)).tensors["agent-ada"]
    assert {name: raw(tensor) for name, tensor in read.items()} == {
        name: raw(tensor) for name, tensor in tensors.items()
    }


# --- only if memory allows ---


@pytest.mark.parametrize(
    ("size", "left", "fits"),
    [
        (400, 1400, True),  # 1000 are reserved
        (400, 1399, False),
        (95_000, 100_000, True),  # 5%
        (95_001, 100_000, False),
    ],
)
def test_memory_limits_by_hand(monkeypatch: pytest.MonkeyPatch, size: int, left: int, fits: bool) -> None:
    monkeypatch.setattr(module, "RESERVED_BYTES", 1000)
    set_bytes_left(monkeypatch, left)
    if fits:
        copy(HostSnapshot(), one=torch.zeros(size, dtype=torch.uint8))
    else:
        with pytest.raises(HostMemoryError):
            copy(HostSnapshot(), one=torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize(("left", "fits"), [(3048, True), (3047, False)])
def test_pinned_memory_counts_with_its_padding(
    monkeypatch: pytest.MonkeyPatch, left: int, fits: bool
) -> None:
    """3 buffers of 512 bytes make an allocation of 2048; 1000 are reserved."""
    pretend(monkeypatch, "gpu")
    monkeypatch.setattr(module, "RESERVED_BYTES", 1000)
    set_bytes_left(monkeypatch, left)
    tensors = {name: torch.zeros(100) for name in "abc"}
    if fits:
        copy(HostSnapshot(), **tensors)
    else:
        with pytest.raises(HostMemoryError):
            copy(HostSnapshot(), **tensors)


def test_a_shortage_names_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bytes_left(monkeypatch, 5 * 2**28)
    with pytest.raises(HostMemoryError) as short:
        copy(HostSnapshot(), one=torch.zeros(1).expand(3 * 2**27))  # float32: 1.5 GiB if it were copied
    assert str(short.value) == (
        "1.50 GiB more host memory are needed and 1.25 GiB are available, of which 1.00 GiB are reserved"
    )


def test_only_allocate_buffers_need_room(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = HostSnapshot()
    copy(snapshot, master=torch.ones(5))
    set_bytes_left(monkeypatch, 0)
    found = copy(snapshot, master=torch.full((5,), 2.0))["master"]
    assert found.tolist() == [2.0] * 5
    buffer = weakref.ref(found)
    del found
    with pytest.raises(HostMemoryError):
        copy(snapshot, master=torch.ones(5), moment=torch.ones(5))
    assert buffer() is None  # an incomplete copy is freed
    set_bytes_left(monkeypatch, None)
    assert copy(snapshot, master=torch.ones(5), moment=torch.zeros(1))["moment"].tolist() == [0.0]


def test_a_failed_allocation_is_a_shortage(kind: str) -> None:
    with pytest.raises(HostMemoryError, match=r"could not be allocated \(.*DefaultCPUAllocator"):
        copy(HostSnapshot(), one=torch.zeros(1).expand(2**48))  # a pebibyte, with no known limit
