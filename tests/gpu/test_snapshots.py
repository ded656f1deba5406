"""Copies of a real GPU's tensors, into pinned memory. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hacrl.runs import checkpointer as module
from hacrl.runs.checkpoint import CheckpointContent, CheckpointId, CheckpointStore
from hacrl.runs.checkpointer import HostSnapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPU = torch.device("cuda", 0)
MIB = 2**20


def busy() -> None:
    """Keep the stream at work, so that a copy without a wait would come too late."""
    torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second or more


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    weights = torch.randn(64 * MIB // 4, device=GPU)
    return {
        "0.master": weights,
        "0.exp_avg": torch.randn(1000, 500, device=GPU).t(),
        "0.step": torch.tensor(3.0, device=GPU),
        "1.master": torch.randn(777, device=GPU).bfloat16(),
        "with_gaps": torch.randn(40, 60, device=GPU)[:, ::2],
        "1.step": torch.tensor(4.0),  # some optimizers count on the CPU
    }


def copy(snapshot: HostSnapshot, **named: Tensor) -> dict[str, Tensor]:
    return dict(snapshot.copy(CheckpointContent({}, {"agent-ada": named})).tensors["agent-ada"])


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu"
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.cpu()), name


def test_a_returned_copy_is_complete_and_later_updates_do_not_change_it() -> None:
    given = tensors()
    busy()
    given["0.master"].mul_(2)  # still queued when the copy is requested
    found = copy(HostSnapshot(), **given)
    kept = {name: tensor.clone() for name, tensor in found.items()}  # at once, without a wait
    expected = {name: tensor.to("cpu", copy=True) for name, tensor in given.items()}
    for tensor in given.values():
        tensor.add_(1)
    torch.cuda.synchronize()
    assert_equal(kept, expected)
    assert_equal(found, expected)


def test_the_next_copy_reuses_the_pinned_memory(tmp_path: Path) -> None:
    snapshot, given = HostSnapshot(), tensors()
    first = {name: tensor.data_ptr() for name, tensor in copy(snapshot, **given).items()}
    for tensor in given.values():
        tensor.add_(1)
    second = copy(snapshot, **given)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == first
    assert [name for name, tensor in second.items() if not tensor.is_pinned()] == ["1.step"]
    assert_equal(second, given)
    store = CheckpointStore(tmp_path)
    store.write(CheckpointId(1), CheckpointContent({}, {"agent-ada": second}))
    assert_equal(dict(store.read(CheckpointId(1)).tensors["agent-ada"]), given)
    snapshot.release()


def test_a_tensor_that_is_offloaded_at_times_keeps_a_pinned_buffer() -> None:
    snapshot = HostSnapshot()
    buffers = []
    for device in ("cpu", "cuda", "cpu", "cuda"):
        value = torch.full((MIB,), float(len(buffers)), device=device)
        buffers.append(copy(snapshot, one=value)["one"])
        assert float(buffers[-1].double().mean()) == len(buffers) - 1
    assert [buffer.is_pinned() for buffer in buffers] == [False, True, True, True]
    assert len({buffer.data_ptr() for buffer in buffers[1:]}) == 1


def test_copies_work_where_memory_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def limited(*size: int, **options: object) -> Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    given = tensors()
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "empty", limited)
        found = copy(HostSnapshot(), **given)
    assert not any(tensor.is_pinned() for tensor in found.values())
    assert_equal(found, given)
