"""A cache of keys and values with a slot for each response: one ends, another takes its place.

Every slot is as long as the longest response may become, and every response has its own position in it, so
that responses need neither begin nor end together, and nothing ever moves. Each has a copy of its prompt; our
own kernel reads one copy for all of a group.
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

COPIED = 65_536  # tokens at a time: of a copy there is another copy in between
FILLED = 0.8  # of the free memory: prompts are computed beside the cache
SMALL = 0.1  # of a device's memory


class SlotCache:
    """Keys and values of ``slots`` responses of up to ``length`` tokens, prompt included.

    There is one slot more: what is computed for nobody, to fill a batch up, is written there.
    """

    def __init__(
        self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, heads, width = cache_shape(config)
        self.slots, self.length = slots, length
        self.kernel = _decode_kernel(device, dtype)
        shape = (2, slots + 1, length, heads, width)  # a tensor for each layer: memory may be in pieces
        self.states = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._prompts: dict[int, int] = {}  # slot -> number of the prompt that it begins with
        self.hosts = torch.arange(slots + 1, device=device)  # for each a slot with the same prompt

    @property
    def nobody(self) -> int:
        """The slot that belongs to no response."""
        return self.slots

    def fill(self, states: Tensor, slots: Tensor, starts: Tensor, counts: Tensor, tokens: int) -> None:
        """Give each of the slots its prompt: ``counts`` tokens from ``starts`` on, so many tokens in all.

        ``states`` are keys and values of several prompts, (layers, 2, tokens, heads, D).
        """
        ends = counts.cumsum(0)

        def of_each_token(number: Tensor) -> Tensor:
            return number.repeat_interleave(counts, output_size=tokens)

        within = torch.arange(tokens, device=slots.device) - of_each_token(ends - counts)
        sources = of_each_token(starts) + within
        places = of_each_token(slots * self.length) + within
        for begin in range(0, tokens, COPIED):
            some = slice(begin, begin + COPIED)
            for mine, given in zip(self.states, states, strict=True):
                mine.flatten(1, 2).index_copy_(1, places[some], given.index_select(1, sources[some]))

    def share(self, prompts: Mapping[int, int]) -> None:
        """Say which prompts, by their numbers, slots are about to be filled with.

        Each is read from the first slot that has it, also if the response there has ended.
        """
        self._prompts.update(prompts)
        first: dict[int, int] = {}
        everywhere = [self._prompts.get(slot, -1 - slot) for slot in range(self.slots + 1)]
        hosts = [first.setdefault(prompt, slot) for slot, prompt in enumerate(everywhere)]
        self.hosts.copy_(copy_to_device(hosts, self.hosts.device))

    def forget(self) -> None:
        """Prompts are about to be numbered anew."""
        self._prompts.clear()

    @property
    def nbytes(self) -> int:
        """Of all layers."""
        return sum(states.nbytes for states in self.states)


class DecodedTokens:
    """One new token for each of some slots: writes its keys and values, then looks at the whole slot."""

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor, shared: Tensor) -> None:
        self._cache = cache
        self._slots = slots
        self._hosts, self._shared = cache.hosts[slots], shared  # so many tokens are the host's as well
        self._positions = positions
        self._used = (positions + 1).to(torch.int32)

    @cached_property
    def _places(self) -> Tensor:
        """In a layer's keys as one long list."""
        return self._slots * self._cache.length + self._positions

    @cached_property
    def _starts(self) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, for torch's kernel, which asks for one more than there are sequences."""
        queries = torch.arange(len(self._slots) + 1, dtype=torch.int32, device=self._slots.device)
        keys = torch.cat([self._slots, self._slots.new_zeros(1)]) * self._cache.length
        return queries, keys.to(torch.int32)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """See :class:`hacrl.models.attention.packed.CacheSlots`; (N, heads, D)."""
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
                self._hosts,
                self._shared,
                self._used,
                scale,
                window,
            )
            return attended
        keys, values = states[0].flatten(0, 1), states[1].flatten(0, 1)
        keys.index_copy_(0, self._places, key)
        values.index_copy_(0, self._places, value)
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
                seqused_k=self._used,
            )[0]
        return self._plainly(layer, query, scale, window)

    def _plainly(self, layer: int, query: Tensor, scale: float, window: int) -> Tensor:
        states = self._cache.states[layer]
        if not states.is_cuda:  # where looking at a number waits for nothing
            states = states[:, :, : int(self._used.max())]
        keys, values = (part[self._slots].transpose(1, 2) for part in states)
        columns = torch.arange(keys.shape[2], device=query.device)
        used = self._used.unsqueeze(1)
        seen = columns < used
        if window >= 0:
            seen &= columns >= used - 1 - window
        out = scaled_dot_product_attention(
            query.unsqueeze(2), keys, values, attn_mask=seen[:, None, None], scale=scale, enable_gqa=True
        )
        return out.squeeze(2)


def _decode_kernel(device: torch.device, dtype: torch.dtype) -> Any:
    """Our kernel, where there is Triton, which comes with torch for GPUs on Linux, and it is right."""
    if device.type != "cuda" or dtype not in KERNEL_TYPES:
        return None
    try:
        module = import_module("hacrl.engines.hf.decode_kernel")
    except ImportError:
        return None
    return module if module.is_right(device, dtype) else None


class PrefilledPrompts:
    """Prompts laid end to end: their keys and values are kept, layer by layer."""

    def __init__(self, config: Any, segments: SequenceBounds, tokens: int, like: Tensor) -> None:
        layers, heads, width = cache_shape(config)
        self.states = like.new_empty(layers, 2, tokens, heads, width)
        self._segments = segments

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """See :class:`hacrl.models.attention.packed.CacheSlots`; (N, heads, D)."""
        self.states[layer, 0], self.states[layer, 1] = key, value
        return packed_attention(query, key, value, self._segments, scale, window)


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Layers, heads of keys and values, and the width of one."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or heads, width


def can_have_slots(model: Any) -> bool:
    """Whether a cache of this kind holds what the model's layers look at: of each the same, once a token."""
    if not supports_packing(model):
        return False
    try:
        layers, heads, width = cache_shape(model.config)
    except (AttributeError, RuntimeError):  # layers of several shapes, says the config
        return False
    return attention_shapes(model) == {layer: [((heads, width), (heads, width))] for layer in range(layers)}


def slot_bytes(config: Any, length: int, dtype: torch.dtype) -> int:
    """What one slot takes."""
    layers, heads, width = cache_shape(config)
    return 2 * layers * heads * width * length * dtype.itemsize


def slots_that_fit(model: Any, length: int) -> int:
    """How many slots there is memory for, with what decoding needs for each; at least one."""
    if model.device.type != "cuda":
        return sys.maxsize
    unused, _ = unused_memory(model.device)
    vocabulary: int = model.get_output_embeddings().weight.shape[0]
    each = slot_bytes(model.config, length, model.dtype) + SAMPLED_LOGIT_COPIES * 4 * vocabulary
    return max(1, int(FILLED * unused) // each)


def worth_keeping(caches: Sequence[SlotCache]) -> bool:
    """Whether learning will not miss their memory."""
    device = caches[0].states[0].device if caches else torch.device("cpu")
    if device.type != "cuda":
        return True
    unused, total = unused_memory(device)
    return sum(cache.nbytes for cache in caches) <= SMALL * total and unused >= total / 2
