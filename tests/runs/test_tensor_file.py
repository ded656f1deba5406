"""Our safetensors writer, checked with the library's reader."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hacrl.training.tensor_files import DTYPES, write_tensors


def many() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    numbers = {name: (torch.randn(3, 5) * 50).to(getattr(torch, name)) for name in DTYPES if name != "bool"}
    return {
        **numbers,
        "bool": torch.rand(7) > 0.5,
        "0.step": torch.tensor(17.0),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "transposed": torch.randn(4, 6).t(),
        "every second": torch.arange(20)[::2],
        "expanded": torch.tensor([2.5]).expand(3, 4),
        'quoted "name" \N{GREEK SMALL LETTER PI}': torch.tensor([float("nan"), -0.0, float("inf")]),
    }


def test_the_library_reads_what_was_written(tmp_path) -> None:
    tensors = many()
    written = write_tensors(tmp_path / "ours.safetensors", tensors)
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        # bit for bit, including the sign of zero and a NaN's payload
        theirs, ours = (one.contiguous().flatten().view(torch.uint8) for one in (found[name], tensor))
        assert torch.equal(theirs, ours)
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() is None
    content = (tmp_path / "ours.safetensors").read_bytes()
    assert written.bytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()


def test_tensors_of_one_type_give_the_same_file_as_the_library(tmp_path) -> None:
    tensors = {f"{number}.master": torch.full((number, 3), float(number)) for number in (1, 2, 12)}
    write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_are_aligned_to_their_element_size(tmp_path) -> None:
    write_tensors(
        tmp_path / "ours",
        {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(2), "c": torch.ones(1, dtype=torch.int64)},
    )
    content = (tmp_path / "ours").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    entries = json.loads(content[8 : 8 + length])
    assert {name: entry["data_offsets"] for name, entry in entries.items()} == {
        "c": [0, 8],
        "b": [8, 16],
        "a": [16, 19],
    }


def test_the_order_of_names_does_not_matter(tmp_path) -> None:
    tensors = many()
    first = write_tensors(tmp_path / "first", tensors)
    assert write_tensors(tmp_path / "second", dict(reversed(tensors.items()))) == first


def test_an_existing_file_is_not_overwritten(tmp_path) -> None:
    (tmp_path / "ours").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "ours", {})
    assert (tmp_path / "ours").read_text() == "mine"
