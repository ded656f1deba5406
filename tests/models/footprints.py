"""Configs and estimated footprints of known models."""

from __future__ import annotations

from hacrl.config.schema import AgentSettings
from hacrl.models.footprint import Footprint, Workload, agent_footprint, count_parameters

QWEN3_1_7B = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_4B = QWEN3_1_7B | {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}
LLAMA_3B = {
    "model_type": "llama",
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LLAMA_1B = LLAMA_3B | {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "head_dim": 64,
}
NOTHING = Workload(decodings=(), learnt_tokens=0, longest_sample=0)


def settings(**options) -> AgentSettings:
    return AgentSettings(name="a", model="x", **options)


def footprint_of(config, workload: Workload = NOTHING, device: str = "cpu", **options) -> Footprint:
    agent = settings(**options)
    return agent_footprint(agent, config, count_parameters(agent, config), device, workload)
