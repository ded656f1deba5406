"""Shapes of the paper's models, from their config.json: enough to size a run without the hub."""

from __future__ import annotations

from typing import Any

_QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
_QWEN3_1_7B = {
    **_QWEN3,
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "intermediate_size": 6144,
    "tie_word_embeddings": True,
}
_QWEN3_4B = {
    **_QWEN3,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
_QWEN3_8B = {
    **_QWEN3,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
_LLAMA_3_2 = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}

KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": {**_QWEN3_1_7B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-1.7B-Base": {**_QWEN3_1_7B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-4B": {**_QWEN3_4B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-4B-Base": {**_QWEN3_4B, "max_position_embeddings": 32768},
    "Qwen/Qwen3-4B-Instruct-2507": {**_QWEN3_4B, "max_position_embeddings": 262144},
    "Qwen/Qwen3-8B": {**_QWEN3_8B, "max_position_embeddings": 40960},
    "Qwen/Qwen3-8B-Base": {**_QWEN3_8B, "max_position_embeddings": 32768},
    "meta-llama/Llama-3.2-1B-Instruct": {
        **_LLAMA_3_2,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        **_LLAMA_3_2,
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
}


def known_config(model: str) -> Any | None:
    """A transformers config with the model's shape, stored in bfloat16 as on the hub; None if not known."""
    from transformers import AutoConfig

    shape = KNOWN_SHAPES.get(model)
    return None if shape is None else AutoConfig.for_model(**shape, dtype="bfloat16")
