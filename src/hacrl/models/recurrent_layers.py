"""How large recurrent layers are: the state they carry, and what their backward pass needs.

Numbers of floats, for transformers' implementation in plain torch. Installed kernels (``mamba-ssm``,
``flash-linear-attention``) need less. The factors were fitted to the tensors that autograd saves; a test
compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hacrl.models.architecture import STATEFUL_KINDS, keeps_state, layer_kinds

DELTA_CHUNK = 64  # tokens of a chunk of gated delta rules


@dataclass(frozen=True)
class RecurrentLayers:
    """A model's recurrent layers; all zero for a model without any."""

    layers: int = 0
    attention_layers: int = 0  # layers that keep keys and values; a layer may do both
    state: int = 0  # floats per sequence and layer
    saved: int = 0  # floats per token and layer, for the backward pass


def recurrent_layers(config: Any) -> RecurrentLayers:
    """Return the sizes of the recurrent and convolution layers of a model with this config."""
    text = config.get_text_config()
    has_attention = bool(getattr(text, "num_attention_heads", None))
    if not keeps_state(config):
        return RecurrentLayers(attention_layers=text.num_hidden_layers)
    kinds = layer_kinds(config)
    recurrent = sum(kind in STATEFUL_KINDS for kind in kinds) if kinds else text.num_hidden_layers
    attending = sum("attention" in kind and kind != "linear_attention" for kind in kinds)
    attending += sum("hybrid" in kind for kind in kinds)
    state, saved = _sizes(text)
    return RecurrentLayers(recurrent, attending if has_attention else 0, state, saved)


def _sizes(text: Any) -> tuple[int, int]:
    """Return floats of one layer: its state per sequence, and what it saves per token."""

    def value(*names: str, default: int = 0) -> int:
        found = (getattr(text, name, None) for name in names)
        return int(next((number for number in found if number), default))

    hidden: int = text.hidden_size
    kernel = value("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache", default=4)
    if heads := value("linear_num_value_heads"):  # gated delta rule
        keys, values = value("linear_key_head_dim"), value("linear_value_head_dim")
        conv = kernel * (2 * value("linear_num_key_heads") * keys + heads * values)
        return heads * keys * values + conv, heads * (14 * keys + 11 * values + 5 * DELTA_CHUNK)
    state = value("state_size", "ssm_state_size", "mamba_d_state")
    if not state:  # a convolution or a linear recurrence: about as large as attention
        return kernel * value("lru_width", "attention_hidden_size", default=hidden), 0
    expanded = value("expand", "mamba_expand", default=2) * hidden
    heads = value("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    chunk = value("mamba_chunk_size", "chunk_size")
    if not chunk:  # Mamba
        return expanded * (state + kernel), 3 * expanded * state + 9 * expanded
    width = value("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    inner = heads * width or expanded  # Mamba 2
    per_chunk = 5 * heads * chunk // 2 + 2 * inner * state // chunk
    return inner * (state + kernel), 8 * heads * state + per_chunk + 13 * inner
