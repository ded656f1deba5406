"""The bundled agents' folders: files, sizes, and how their tokenizers split text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hacrl.models
from hacrl.tasks.arithmetic import ArithmeticTask, worked_solution

torch.set_num_threads(1)

BUNDLED = Path(hacrl.models.__file__).parent / "bundled"
QWENS = ("qwen-small-a", "qwen-small-b", "qwen-large", "qwen-direct", "qwen-worked")
SAME_SHAPE = ("qwen-small-b", "qwen-direct", "qwen-worked")  # as qwen-small-a
AGENTS = (*QWENS, "llama-pairs")
FILES = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "TEACHING.json",
}  # fmt: skip


def tokenizer_of(name: str) -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED / name)


def model_of(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED / name, dtype=torch.float32)


def test_there_are_these_agents_and_together_they_are_under_three_megabytes():
    assert {folder.name for folder in BUNDLED.iterdir()} == set(AGENTS)
    assert sum(file.stat().st_size for file in BUNDLED.rglob("*") if file.is_file()) < 3_000_000


@pytest.mark.parametrize("name", AGENTS)
def test_each_folder_holds_half_precision_weights_and_nothing_unexpected(name: str):
    assert {file.name for file in (BUNDLED / name).iterdir()} == FILES
    weights = load_file(BUNDLED / name / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize(
    ("name", "architecture", "parameters"),
    [
        # Per layer: attention 4 × hidden × heads × 32, MLP 3 × hidden × mlp, norms 2 × hidden, and for Qwen3
        # the query and key norms 2 × 32; then the last norm, embedding and head (vocabulary × hidden each).
        # 3 × (4×64×64 + 3×64×176 + 128 + 64) + 64 + 2×22×64
        ("qwen-small-a", "Qwen3ForCausalLM", 153_984),
        ("qwen-small-b", "Qwen3ForCausalLM", 153_984),
        ("qwen-direct", "Qwen3ForCausalLM", 153_984),
        ("qwen-worked", "Qwen3ForCausalLM", 153_984),
        # 3 × (4×112×128 + 3×112×280 + 224 + 64) + 112 + 2×22×112
        ("qwen-large", "Qwen3ForCausalLM", 460_176),
        # 3 × (4×96×96 + 3×96×256 + 192) + 96 + 2×123×96
        ("llama-pairs", "LlamaForCausalLM", 356_064),
    ],
)
def test_architecture_and_parameter_count(name: str, architecture: str, parameters: int):
    model = model_of(name)
    assert type(model).__name__ == architecture
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert json.loads((BUNDLED / name / "TEACHING.json").read_text())["parameters"] == parameters


@pytest.mark.parametrize("name", AGENTS)
def test_special_tokens_agree_between_tokenizer_config_and_generation_config(name: str):
    tokenizer, model = tokenizer_of(name), model_of(name)
    for holder in (tokenizer, model.config, model.generation_config):
        assert (holder.pad_token_id, holder.eos_token_id) == (0, 1)
        assert holder.bos_token_id == (3 if name == "llama-pairs" else None)
    assert tokenizer.unk_token_id == 2
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.padding_side == "left"
    assert tokenizer.chat_template is None
    assert model.config.max_position_embeddings == 128


@pytest.mark.parametrize("other", SAME_SHAPE)
def test_the_small_agents_share_net_and_tokenizer_but_no_weights(other: str):
    a, b = BUNDLED / "qwen-small-a", BUNDLED / other
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (a / file).read_bytes() == (b / file).read_bytes()
    weights_a, weights_b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert weights_a.keys() == weights_b.keys()
    assert not any(torch.equal(weights_a[key], weights_b[key]) for key in weights_a)


def test_all_qwens_share_one_tokenizer_and_the_llama_has_another():
    files = {name: (BUNDLED / name / "tokenizer.json").read_bytes() for name in AGENTS}
    assert len({files[name] for name in QWENS}) == 1
    assert files["llama-pairs"] != files["qwen-large"]


# --- how text is cut -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QWENS)
def test_character_tokens(name: str):
    tokenizer = tokenizer_of(name)
    # 0 pad, 1 eos, 2 unk, then the digits 0..9 from 3, then + - * ( ) = ; : # from 13.
    ids = tokenizer("(23+14)*2:119")["input_ids"]
    assert ids == [16, 5, 6, 13, 4, 7, 17, 15, 5, 20, 4, 4, 12]
    assert tokenizer.convert_ids_to_tokens(ids) == list("(23+14)*2:119")


def test_pair_tokens_begin_with_bos_and_pair_digits_from_the_left():
    tokenizer = tokenizer_of("llama-pairs")
    # 0 pad, 1 eos, 2 unk, 3 bos, the digits 0..9 from 4, + - * ( ) = ; : # from 14, the pairs 00..99 from 23.
    ids = tokenizer("(23+4)*2:119")["input_ids"]
    assert ids == [3, 17, 46, 14, 8, 18, 16, 6, 21, 34, 13]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<bos>",
        "(",
        "23",
        "+",
        "4",
        ")",
        "*",
        "2",
        ":",
        "11",
        "9",
    ]
    assert tokenizer("119", add_special_tokens=False)["input_ids"] == [34, 13]


@pytest.mark.parametrize("name", ["qwen-small-a", "llama-pairs"])
def test_every_worked_solution_survives_the_round_trip(name: str):
    tokenizer = tokenizer_of(name)
    task = ArithmeticTask()
    texts = [problem.prompt + worked_solution(problem.id) for problem in (*task.train, *task.test)]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.unk_token_id not in {token for row in ids for token in row}
    assert tokenizer.batch_decode(ids) == texts


@pytest.mark.parametrize("name", ["qwen-small-a", "llama-pairs"])
def test_unknown_characters_become_one_unk_each(name: str):
    ids = tokenizer_of(name)("a é\n", add_special_tokens=False)["input_ids"]
    assert ids == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ["qwen-small-a", "llama-pairs"])
def test_stop_token_is_dropped_when_decoding_and_batches_are_padded_on_the_left(name: str):
    tokenizer = tokenizer_of(name)
    assert tokenizer.decode([*tokenizer("#74")["input_ids"], 1, 0], skip_special_tokens=True) == "#74"
    short, long = tokenizer(["7", "7+7"], padding=True)["attention_mask"]
    assert short == [0, 0, *([1] * (len(short) - 2))]
    assert long == [1] * len(long)
