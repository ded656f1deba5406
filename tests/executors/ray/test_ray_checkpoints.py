"""Checkpoints under Ray: from agents that share a disk and agents that do not, resumed by other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hacrl.config.schema import FsdpSettings, RunConfig
from hacrl.executors.ray import executor as ray_executor
from hacrl.executors.ray.state_transfer import (
    PIECES_UNDER_WAY,
    ArrivingFiles,
    ArrivingTensors,
    pieces_of,
    send,
    shapes_of,
)
from hacrl.runs.checkpoint import CheckpointId, CheckpointStore
from hacrl.runs.checkpointer import CHECKPOINTS
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training import tensor_files
from hacrl.training.tensor_files import TensorStream, write_tensors
from tests.support.chaos import chaos_config, differing_files
from tests.support.ray_cluster import connected


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with connected():
        yield


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "0.step": torch.tensor(3.0),
        "0.master": torch.randn(5, 7),
        "1.master": torch.randn(6, 4).to(torch.bfloat16).t(),
        "flags": torch.tensor([True, False, True]),
    }


def test_pieces_make_the_file_and_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "PIECE", 48)  # 140 bytes of 0.master come in 3 pieces
    monkeypatch.setattr("hacrl.executors.ray.state_transfer.PIECE", 48)
    tensors = some_tensors()
    written = write_tensors(tmp_path / "whole", tensors)
    pieces = [np.frombuffer(piece, np.uint8) for piece in TensorStream.of(tensors).file()]
    assert [len(piece) for piece in pieces[1:]] == [48, 48, 44, 4, 48, 3]
    arriving = ArrivingFiles(tmp_path)
    for piece in pieces:
        arriving.add("ada", piece)
    arriving.add("bob", written)
    arriving.close()
    assert arriving.files() == {"agent-ada.safetensors": written, "agent-bob.safetensors": written}
    assert (tmp_path / "agent-ada.safetensors").read_bytes() == (tmp_path / "whole").read_bytes()
    arrived = ArrivingTensors(shapes_of(tensors))
    for name, start, piece in reversed(list(pieces_of(tensors))):  # threads may take them in any order
        arrived.take(name, start, piece)
    assert list(arrived.tensors) == list(tensors)
    assert all(torch.equal(arrived.tensors[name], tensors[name]) for name in tensors)


def test_few_pieces_are_under_way() -> None:
    begun: list[int] = []
    most = 0

    def wait(one: int) -> None:
        nonlocal most
        most = max(most, len(begun) - one)  # calls that have begun and have not been waited for

    send((lambda number=number: begun.append(number) or number for number in range(10)), wait)
    assert begun == list(range(10))
    assert most == PIECES_UNDER_WAY + 1


@pytest.mark.usefixtures("cluster")
def test_agents_that_share_no_disk_send_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calm run's agents write into the folder themselves; the others are told another token."""
    run_locally(replace(chaos_config(tmp_path / "shared", 1), executor="ray"))
    monkeypatch.setattr(ray_executor, "share", lambda folder: "a token that is nowhere")
    run_locally(replace(chaos_config(tmp_path / "apart", 1), executor="ray"))
    assert differing_files(tmp_path / "shared", tmp_path / "apart") == []
    store = CheckpointStore(tmp_path / "apart" / CHECKPOINTS)
    assert sorted(path.name for path in store.path(CheckpointId(1)).iterdir()) == [
        "agent-llama.safetensors",
        "agent-small.safetensors",
        "manifest.json",
        "run.json",
        "trainer.json",
    ]


def with_ranks(folder: Path, ranks: int, executor: str) -> RunConfig:
    base = chaos_config(folder, 1)
    first = replace(base.agents[0], ranks=ranks, fsdp=FsdpSettings(timeout=60.0))
    learning = replace(base.learning, old_policy="sampler")
    return replace(base, agents=(first, *base.agents[1:]), executor=executor, learning=learning)


@pytest.mark.usefixtures("cluster")
def test_a_checkpoint_of_two_ranks_goes_on_with_three(tmp_path: Path) -> None:
    """Under both executors, with equal files: the checkpoint is that of whole tensors."""
    for executor in ("local", "ray"):
        folder = tmp_path / executor
        run_locally(with_ranks(folder, 2, executor))
        found = inspect_run(folder, ["steps=2", "agents.small.ranks=3"])
        assert any("ranks changed" in note for note in found.point.notes)
        with LocalRun(found.config, resumed=found.point) as run:
            run.train()
            run.save()
    assert differing_files(tmp_path / "local", tmp_path / "ray") == []
