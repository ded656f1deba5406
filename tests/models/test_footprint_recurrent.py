"""Memory estimates of recurrent layers against the tensors of real forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hacrl.models.footprint import Decoding, Workload, changes_logits
from hacrl.models.recurrent_layers import RecurrentLayers, recurrent_layers
from tests.models.footprints import footprint_of
from tests.support.architectures import ARCHITECTURES, is_known, tiny_config, tiny_model

HYBRIDS = [
    name
    for name in ("bamba", "falcon_h1", "jamba", "lfm2", "mamba", "mamba2", "qwen3_5", "qwen3_next", "zamba2")
    if is_known(name)
]
TOKENS = 128


def saved_bytes(model: Any, tokens: int) -> int:
    """Return the bytes that autograd saves in a forward pass without the output layer, weights excluded."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # so that no other takes its place in memory
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def cached_bytes(model: Any, tokens: int) -> int:
    """Return the bytes of a model's own cache after a prompt."""
    with torch.no_grad():
        outputs = model.base_model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=True)
    cache = getattr(outputs, "past_key_values", None) or outputs.cache_params
    parts = [part for layer in cache.layers for part in vars(layer).values()]
    tensors = [one for part in parts for one in (part.values() if isinstance(part, dict) else [part])]
    return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor))


@pytest.mark.parametrize("name", HYBRIDS)
def test_activations_of_hybrids(name: str) -> None:
    estimate = footprint_of(
        tiny_config(name), Workload(decodings=(), learnt_tokens=TOKENS, longest_sample=TOKENS)
    )
    model = tiny_model(name) if name != "qwen3_5" else tiny_model("qwen3_5_text")
    assert 0.7 < estimate.activations / saved_bytes(model, TOKENS) < 1.6


@pytest.mark.parametrize("name", HYBRIDS)
def test_cache_of_hybrids(name: str) -> None:
    """The state is the same for every length; only layers that attend keep something per token."""
    short, long = (
        footprint_of(
            tiny_config(name),
            Workload(
                decodings=(Decoding(prompts=1, responses=1, prompt_tokens=16, new_tokens=new),),
                learnt_tokens=0,
                longest_sample=0,
            ),
        ).cache
        for new in (16, 80)
    )
    model = tiny_model(name) if name != "qwen3_5" else tiny_model("qwen3_5_text")
    real = cached_bytes(model, 32)
    assert long - short == cached_bytes(model, 96) - real
    assert short == pytest.approx(real, rel=0.1)


def test_sizes_worked_out_by_hand() -> None:
    # Mamba: 64 inner channels, 8 states and 4 columns of a convolution each; 3 tensors of inner x state and 9
    # of inner per token
    mamba = RecurrentLayers(layers=2, attention_layers=0, state=64 * 12, saved=3 * 64 * 8 + 9 * 64)
    assert recurrent_layers(tiny_config("mamba")) == mamba
    # gated delta rule: 4 heads of 8 x 8, and a convolution over 2 x 16 keys and 32 values
    delta = RecurrentLayers(
        layers=1, attention_layers=1, state=4 * 64 + 4 * (32 + 32), saved=4 * (14 * 8 + 11 * 8 + 320)
    )
    assert recurrent_layers(tiny_config("qwen3_5")) == delta
    assert recurrent_layers(tiny_config("falcon_h1")).attention_layers == 2  # each layer does both
    assert recurrent_layers(tiny_config("llama")) == RecurrentLayers(attention_layers=2)


@pytest.mark.parametrize("name", [name for name in ("gemma3n_text", "gemma4_text") if is_known(name)])
def test_widths_that_differ_from_layer_to_layer(name: str) -> None:
    work = Workload(decodings=(), learnt_tokens=TOKENS, longest_sample=TOKENS)
    config = tiny_config(name)
    changes_logits(config)
    assert footprint_of(config, work).activations > 0
    assert "hidden_size" in ARCHITECTURES[name]
