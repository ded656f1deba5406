"""A KV cache with a slot for each response; a new response takes the slot of a finished one.

A slot is as long as the longest response may become. Each response has its own position in its slot, so
responses start and end independently and nothing is ever moved. Each slot holds a copy of its prompt; our own
kernel reads one copy for all responses to the prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hacrl.models.attention.packed import KERNEL_TYPES, SequenceBounds, has_kernel, packed_attention
from hacrl.models.device import copy_to_device, unused_memory
from hacrl.models.footprint import SAMPLED_LOGIT_COPIES
from hacrl.models.packing_support import attention_shapes, supports_packing

TOKENS_PER_COPY = 65_536  # bounds the temporary copy between source and cache
CACHE_SHARE = 0.8  # of the free memory: prefill needs some beside the cache
SMALL_SHARE = 0.1  # of a device's memory


class SlotCache:
    """Keys and values of ``slots`` responses of up to ``length`` tokens, prompt included.

    One more slot takes what is computed to pad a batch.
    """

    def __init__(
        self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, heads, width = cache_shape(config)
        self.slots, self.length = slots, length
        self.kernel = _decode_kernel(device, dtype)
        shape = (2, slots + 1, length, heads, width)  # one tensor per layer: memory may be fragmented
        self.states = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._prompt_numbers: dict[int, int] = {}  # of the prompt in each slot
        self.prompt_slots = torch.arange(slots + 1, device=device)  # where each slot's prompt is read

    @property
    def padding_slot(self) -> int:
        """The slot that belongs to no response and pads batches."""
        return self.slots

    def write_prompts(
        self, states: Tensor, slots: Tensor, starts: Tensor, counts: Tensor, tokens: int
    ) -> None:
        """Copy a prompt into each slot: ``counts`` tokens from ``starts`` on, ``tokens`` in all.

        ``states``: keys and values of several prompts, (layers, 2, tokens, heads, D).
        """
        ends = counts.cumsum(0)

        def per_token(per_slot: Tensor) -> Tensor:
            return per_slot.repeat_interleave(counts, output_size=tokens)

        within = torch.arange(tokens, device=slots.device) - per_token(ends - counts)
        sources = per_token(starts) + within
        targets = per_token(slots * self.length) + within
        for begin in range(0, tokens, TOKENS_PER_COPY):
            part = slice(begin, begin + TOKENS_PER_COPY)
            for target, source in zip(self.states, states, strict=True):
                target.flatten(1, 2).index_copy_(1, targets[part], source.index_select(1, sources[part]))

    def set_prompts(self, prompts: Mapping[int, int]) -> None:
        """Note the prompt number of each slot that is about to be filled.

        Slots with equal prompts read the first of them, even if the response there has finished.
        """
        self._prompt_numbers.update(prompts)
        first: dict[int, int] = {}
        numbers = [self._prompt_numbers.get(slot, -1 - slot) for slot in range(self.slots + 1)]
        prompt_slots = [first.setdefault(prompt, slot) for slot, prompt in enumerate(numbers)]
        self.prompt_slots.copy_(copy_to_device(prompt_slots, self.prompt_slots.device))

    def clear_prompts(self) -> None:
        """Forget which slots have equal prompts."""
        self._prompt_numbers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(states.nbytes for states in self.states)


class DecodedTokens:
    """One new token per slot: attention writes its key and value, then reads the slot up to it."""

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor, prompt_lengths: Tensor) -> None:
        self._cache = cache
        self._slots = slots
        self._prompt_slots, self._prompt_lengths = cache.prompt_slots[slots], prompt_lengths
        self._positions = positions
        self._lengths = (positions + 1).to(torch.int32)

    @cached_property
    def _flat_positions(self) -> Tensor:
        """Position of each new token in a layer's keys, flattened over slots."""
        return self._slots * self._cache.length + self._positions

    @cached_property
    def _starts(self) -> tuple[Tensor, Tensor]:
        """Start offsets of queries and keys for torch's kernel, one more than there are sequences."""
        queries = torch.arange(len(self._slots) + 1, dtype=torch.int32, device=self._slots.device)
        keys = torch.cat([self._slots, self._slots.new_zeros(1)]) * self._cache.length
        return queries, keys.to(torch.int32)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """Return attention of the new tokens over their slots, (N, heads, D); see :class:`Slots`."""
        states = self._cache.states[layer]
        kernel = self._cache.kernel
        if kernel is not None and kernel.can_decode(query, key.shape[1]):
            attended: Tensor = kernel.decode_attention(
                query,
                key,
                value,
                states[0],
                states[1],
                self._slots,
                self._prompt_slots,
                self._prompt_lengths,
                self._lengths,
                scale,
                window,
            )
            return attended
        keys, values = states[0].flatten(0, 1), states[1].flatten(0, 1)
        keys.index_copy_(0, self._flat_positions, key)
        values.index_copy_(0, self._flat_positions, value)
        if has_kernel(query):
            return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
                query,
                keys,
                values,
                *self._starts,
                1,
                self._cache.length,
                0.0,
                False,
                False,
                scale=scale,
                window_size_left=window,
                window_size_right=0 if window >= 0 else -1,
                seqused_k=self._lengths,
            )[0]
        return self._masked_attention(layer, query, scale, window)

    def _masked_attention(self, layer: int, query: Tensor, scale: float, window: int) -> Tensor:
        states = self._cache.states[layer]
        if not states.is_cuda:  # on a GPU, reading the maximum would wait for the device
            states = states[:, :, : int(self._lengths.max())]
        keys, values = (part[self._slots].transpose(1, 2) for part in states)
        columns = torch.arange(keys.shape[2], device=query.device)
        lengths = self._lengths.unsqueeze(1)
        seen = columns < lengths
        if window >= 0:
            seen &= columns >= lengths - 1 - window
        out = scaled_dot_product_attention(
            query.unsqueeze(2), keys, values, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
        )
        return out.squeeze(2)


def _decode_kernel(device: torch.device, dtype: torch.dtype) -> Any:
    """Return our kernel if Triton is installed, as with torch for GPUs, and the kernel is correct."""
    if device.type != "cuda" or dtype not in KERNEL_TYPES:
        return None
    try:
        module = import_module("hacrl.engines.hf.decode_kernel")
    except ImportError:
        return None
    return module if module.is_correct(device, dtype) else None


class PrefilledPrompts:
    """Packed prompts: attention keeps their keys and values, layer by layer."""

    def __init__(self, config: Any, segments: SequenceBounds, tokens: int, like: Tensor) -> None:
        layers, heads, width = cache_shape(config)
        self.states = like.new_empty(layers, 2, tokens, heads, width)
        self._segments = segments

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """Return packed attention, (N, heads, D), and keep keys and values; see :class:`Slots`."""
        self.states[layer, 0], self.states[layer, 1] = key, value
        return packed_attention(query, key, value, self._segments, scale, window)


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Return the number of layers, the heads of keys and values, and the width of a head."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, width


def supports_slots(model: Any) -> bool:
    """Return whether each layer attends once per token, to keys and values of one shape."""
    if not supports_packing(model):
        return False
    try:
        layers, heads, width = cache_shape(model.config)
    except (AttributeError, RuntimeError):  # the config describes layers of several shapes
        return False
    return attention_shapes(model) == {layer: [((heads, width), (heads, width))] for layer in range(layers)}


def slot_bytes(config: Any, length: int, dtype: torch.dtype) -> int:
    """Return the size of one slot."""
    layers, heads, width = cache_shape(config)
    return 2 * layers * heads * width * length * dtype.itemsize


def slots_that_fit(model: Any, length: int) -> int:
    """Return for how many slots the free memory suffices, with what decoding needs; at least one."""
    if model.device.type != "cuda":
        return sys.maxsize
    unused, _ = unused_memory(model.device)
    vocabulary: int = model.get_output_embeddings().weight.shape[0]
    each = slot_bytes(model.config, length, model.dtype) + SAMPLED_LOGIT_COPIES * 4 * vocabulary
    return max(1, int(CACHE_SHARE * unused) // each)


def should_keep(caches: Sequence[SlotCache]) -> bool:
    """Return whether the caches are so small that learning can do without their memory."""
    device = caches[0].states[0].device if caches else torch.device("cpu")
    if device.type != "cuda":
        return True
    unused, total = unused_memory(device)
    return sum(cache.nbytes for cache in caches) <= SMALL_SHARE * total and unused >= total / 2
