"""Agents of a real model's shape with random weights, and made-up prompts: a run's work without downloads."""

from __future__ import annotations

import itertools
import random
import string
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "kind": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "kind": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "kind": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama-0.5b": {
        "kind": "llama",
        "vocab_size": 49152,
        "hidden_size": 1280,
        "intermediate_size": 3584,
        "num_hidden_layers": 22,
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "tie_word_embeddings": False,
    },
    "qwen3-60m": {
        "kind": "qwen3",
        "vocab_size": 32768,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-0.85m": {
        "kind": "qwen3",
        "vocab_size": 30,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-tiny": {
        "kind": "qwen3",
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "llama-tiny": {
        "kind": "llama",
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
}
PEAKED = 4.0


def make_agent(
    shape: str, folder: Path, dtype: torch.dtype, device: str, seed: int = 0, stops: bool = True
) -> Path:
    """A Hugging Face folder with random weights and a tokenizer that has a text for every id.

    One that never ``stops`` gives responses of full length whatever draws them: equal work for all.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    numbers = dict(SHAPES[shape])
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[numbers.pop("kind")]
    tokenizer = letter_tokenizer(numbers["vocab_size"], seed)
    config = config_class(
        **numbers,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype=dtype,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = model_class(config).to(dtype)
    with torch.no_grad():  # or all tokens would be about as likely, whatever the weights
        model.get_output_embeddings().weight.mul_(PEAKED)
        if not stops:
            _never_stop(model, tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _never_stop(model: Any, stop_id: int) -> None:
    """The first number of the residual stream stays 1, and the stop token's score is -1000 times it."""
    model.get_input_embeddings().weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.get_output_embeddings().weight[stop_id] = 0.0
    model.get_output_embeddings().weight[stop_id, 0] = -1000.0


def letter_tokenizer(size: int, seed: int) -> Any:
    """Pieces of one to four letters, others for every seed: every agent can say any letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    letters = string.ascii_lowercase
    longer = ["".join(word) for length in (2, 3, 4) for word in itertools.product(letters, repeat=length)]
    chosen = random.Random(seed).sample(longer, size - len(special) - len(letters) - 1)
    pieces = [*special, "▁", *letters, *sorted(chosen)]
    scores = [(piece, 0.0 if piece in special else -1.0) for piece in pieces]
    core = Tokenizer(models.Unigram(scores, unk_id=2))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    core.decoder = decoders.Metaspace(prepend_scheme="never")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def prompts(count: int, letters: int, seed: int = 0) -> list[str]:
    """Random letters; about three of them make a token."""
    rng = random.Random(seed)
    return ["".join(rng.choices(string.ascii_lowercase, k=letters)) for _ in range(count)]
