"""What generating must cost at the least, from a model's shape, and what the device can do, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rollout_work import Work
from timing import best_of

REPEATS = 5


@dataclass(frozen=True)
class Costs:
    """Of one round of work."""

    step_bytes: float  # a decode step reads weights and keys and values, here at the mean length
    flops: float  # of the whole round; a prompt's prefill counts once for its group

    def floor_seconds(self, work: Work, bandwidth: float) -> float:
        """All decode steps at the memory's speed, all responses side by side; prefill is left out."""
        return work.new_tokens * self.step_bytes / bandwidth


@dataclass(frozen=True)
class Device:
    """Measured, not promised."""

    bandwidth: float  # bytes/s of a large copy, read and written
    flops: float  # of a large matrix product in the model's dtype


def costs_of(model: Any, work: Work) -> Costs:
    """Of a dense decoder. Every response reads its own keys and values, a shared prompt's included."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    size = embedding.element_size()
    everything = sum(parameter.numel() for parameter in model.parameters())
    multiplied = everything if tied else everything - embedding.numel()  # looking rows up is free
    body = everything - embedding.numel() * (1 if tied else 2)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim  # of one token
    mean_length = work.prompt_tokens + work.new_tokens / 2
    attention = 4 * config.num_hidden_layers * heads * head_dim  # flops for a token and one it looks at
    decoding = work.responses * work.new_tokens * (2 * multiplied + attention * mean_length)
    prefill = work.prompts * work.prompt_tokens * (2 * body + attention * work.prompt_tokens / 2)
    return Costs(
        step_bytes=size * (multiplied + work.responses * mean_length * kv_numbers),
        flops=decoding + prefill,
    )


def measure_device(device: str, dtype: torch.dtype) -> Device:
    """The best of a few large copies and a few large matrix products."""
    on_gpu = torch.device(device).type == "cuda"
    numbers, width = (2**31, 8192) if on_gpu else (2**26, 1024)
    found = Device(_copy_speed(numbers, device), _product_speed(width, device, dtype))
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def _copy_speed(numbers: int, device: str) -> float:
    source = torch.empty(numbers, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * numbers / best_of(REPEATS, lambda: target.copy_(source))


def _product_speed(width: int, device: str, dtype: torch.dtype) -> float:
    left = torch.randn(width, width, device=device).to(dtype)
    out = torch.empty_like(left)
    return 2 * width**3 / best_of(REPEATS, lambda: torch.mm(left, left, out=out))
