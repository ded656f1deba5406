"""Attention over packed sequences: sequences of different lengths in one row, with no padding between them.

transformers lets an attention function be registered by name and passes it the keywords that a model was
called with. The keywords say where each sequence begins, which sequences share a prefix, or, while decoding,
which slots of a key-value cache hold earlier tokens.

In 16 bits on a GPU, attention is computed by hacrl's own kernels or by torch's variable-length FlashAttention
(for wide heads, and for prompts before decoding). Elsewhere the attention alone is computed on padded rows.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hacrl.models.attention.key_copies import KeyCopies, copied_keys
from hacrl.models.attention.prefix_tree import PrefixTree
from hacrl.models.attention.tree_attention import tree_attention

# torch's fused kernel. It imports torch's compiler, which takes a second, so hacrl looks for it only when
# packed attention first runs on a GPU: in a trial, before compiled code reads these names.
_fused: Any = None
_has_looked_for_kernel = False

KERNEL_TYPES = (torch.bfloat16, torch.float16)


class SequenceBounds(NamedTuple):
    """Where the queries and keys of S packed sequences begin.

    If a sequence has fewer queries than keys, its queries are those of its last tokens.
    """

    query_starts: Tensor  # (S + 1,): the last number is the end
    key_starts: Tensor  # (S + 1,)
    max_queries: int  # of one sequence
    max_keys: int


class CacheSlots(Protocol):
    """A cache of earlier tokens' keys and values, e.g. :class:`hacrl.engines.hf.slot_cache.SlotCache`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """Store new tokens' keys and values; return attention over them and earlier ones: (N, heads, D)."""
        ...


class PackingUnsupported(Exception):  # noqa: N818 - a result of a trial, not an error
    """The model's attention needs features that packed attention does not have."""


def packed_attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_copies: KeyCopies | None = None,
    tree: PrefixTree | None = None,
    slots: CacheSlots | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention; transformers calls this in every layer.

    (1, heads, N, D) -> (1, N, heads, D).
    """
    if query.shape[0] != 1 or dropout or any(others.get(key) is not None for key in ("softcap", "s_aux")):
        raise PackingUnsupported
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = -1 if sliding_window is None else sliding_window - 1  # tokens before a token's own
    flat = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
    if slots is not None:
        out = _attend(slots, module, flat[0], flat[1], flat[2], scale, window)
    elif tree is not None:
        out = tree_attention(flat[0], flat[1], flat[2], tree, scale, window)
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        bounds = SequenceBounds(cu_seq_lens_q, cu_seq_lens_k, max_length_q or 0, max_length_k or 0)
        keys = flat[1:] if key_copies is None else [copied_keys(states, key_copies) for states in flat[1:]]
        out = packed_attention(flat[0], keys[0], keys[1], bounds, scale, window)
    else:  # the model does not pass its keywords on to the attention
        raise PackingUnsupported
    return out.unsqueeze(0), None


def _attend_to_slots(
    slots: CacheSlots, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
) -> Tensor:
    return slots.attend(module.layer_idx, query, key, value, scale, window)


_attend = _attend_to_slots


def keep_caches_out_of_compiled_code() -> None:
    """Call caches outside of compiled code, which would be compiled again for every layer's number.

    Needed before layers are compiled, and not earlier: it imports torch's compiler.
    """
    global _attend
    if _attend is _attend_to_slots:
        _attend = torch.compiler.disable(_attend_to_slots)  # type: ignore[no-untyped-call, unused-ignore]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int
) -> Tensor:
    """Return causal attention within each sequence; (tokens, heads, D)."""
    if has_kernel(query):
        fused: Tensor = _fused(query, key, value, *bounds, scale=scale, window_size=(window, 0))
        return fused
    return _padded_attention(query, key, value, bounds, scale, window)


def _padded_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int
) -> Tensor:
    """Compute attention on padded rows, one call for each group of sequences of similar length."""
    outs, first_rows = [], torch.empty_like(bounds.query_starts[1:])  # each sequence's first row in the outs
    padded = 0
    for group in _groups_of_similar_length(bounds):
        queries, is_query = _padded_indices(bounds.query_starts, group.sequences, group.max_queries)
        keys, is_key = _padded_indices(bounds.key_starts, group.sequences, group.max_keys)
        is_causal = group.are_whole and window < 0  # needs no mask: padding comes last
        mask = None if is_causal else _attention_mask(is_query, is_key, window)
        out = scaled_dot_product_attention(
            _gather(query, queries).transpose(1, 2),
            _gather(key, keys).transpose(1, 2),
            _gather(value, keys).transpose(1, 2),
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=True,
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
        starts = padded + group.max_queries * torch.arange(len(queries), device=query.device)
        first_rows = first_rows.index_copy(0, group.sequences, starts.to(first_rows.dtype))
        padded += queries.numel()
    tokens = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    sequence = torch.searchsorted(bounds.query_starts, tokens, right=True) - 1
    together = outs[0] if len(outs) == 1 else torch.cat(outs)
    return together.index_select(0, first_rows[sequence] + tokens - bounds.query_starts[sequence])


def _attention_mask(is_query: Tensor, is_key: Tensor, window: int) -> Tensor:
    """Return which keys each query attends to, (rows, 1, queries, keys)."""
    first = is_key.sum(dim=1) - is_query.sum(dim=1)  # position of a sequence's first query
    position = first[:, None, None] + torch.arange(is_query.shape[1], device=first.device)[:, None]
    columns = torch.arange(is_key.shape[1], device=first.device)
    visible = (columns <= position) & is_key.unsqueeze(1)
    if window >= 0:
        visible &= columns >= position - window
    visible |= ~is_query.unsqueeze(2) & (columns == 0)  # padding needs a key, or its softmax would be NaN
    return visible.unsqueeze(1)


class _Group(NamedTuple):
    """Sequences that are padded to the same length."""

    sequences: Tensor  # their numbers
    max_queries: int
    max_keys: int
    are_whole: bool  # every sequence has as many queries as keys


def _groups_of_similar_length(bounds: SequenceBounds) -> list[_Group]:
    """Group the sequences by length: prompts may have many more queries than the responses to them.

    A GPU would have to be synchronized with to know the lengths, and a compiler cannot know them. There, all
    sequences are one group.
    """
    starts = bounds.query_starts
    if starts.device.type != "cpu" or torch.compiler.is_compiling():
        everything = torch.arange(len(starts) - 1, device=starts.device)
        return [_Group(everything, bounds.max_queries, bounds.max_keys, False)]
    queries, keys = (each[1:] - each[:-1] for each in (starts, bounds.key_starts))
    sizes: dict[tuple[int, bool], list[int]] = {}
    for number, (num_queries, num_keys) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        sizes.setdefault((num_queries.bit_length(), num_queries == num_keys), []).append(number)
    return [
        _Group(torch.tensor(numbers), int(queries[numbers].max()), int(keys[numbers].max()), are_whole)
        for (_, are_whole), numbers in sizes.items()
    ]


def _gather(states: Tensor, indices: Tensor) -> Tensor:
    """Return ``states[indices]``. On a CPU, the gradient of plain indexing takes several times as long."""
    rows, columns = indices.shape
    return states.index_select(0, indices.flatten()).view(rows, columns, *states.shape[1:])


def _padded_indices(starts: Tensor, sequences: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the sequences' tokens, a row each, and which of them are not padding."""
    first, end = starts[sequences], starts[sequences + 1]
    columns = torch.arange(length, device=starts.device)
    is_token = columns < (end - first).unsqueeze(1)
    return (first.unsqueeze(1) + columns).masked_fill(~is_token, 0).long(), is_token


def has_kernel(states: Tensor) -> bool:
    """Return whether torch has a fused kernel for packed sequences of this type, device and width."""
    if not states.is_cuda or states.dtype not in KERNEL_TYPES or states.shape[-1] > 256:
        return False
    if not _has_looked_for_kernel:
        _look_for_kernel()
    return _fused is not None


def _look_for_kernel() -> None:
    """Import torch's kernel, if this torch has it."""
    global _fused, _has_looked_for_kernel
    _has_looked_for_kernel = True
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return
    # grouped-query attention: implicit in torch 2.11, an option in later versions
    has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
    _fused = partial(varlen_attn, enable_gqa=True) if has_option else varlen_attn


@cache
@torch.no_grad()
def fused_kernel_is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's kernel agrees with padded attention, found out by a trial.

    The trial has sequences with more keys than queries, with and without a window.
    """
    if not _has_looked_for_kernel:
        _look_for_kernel()
    if _fused is None:
        return False
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (24, 4, 64)
    query, key, value = (torch.randn(shape, generator=generator, device=device) for _ in range(3))
    starts = [torch.tensor(edges, dtype=torch.int32, device=device) for edges in ([0, 3, 10], [0, 9, 24])]
    bounds = SequenceBounds(starts[0], starts[1], 7, 15)
    for window in (-1, 4):
        exact = packed_attention(query[:10], key[:, :2], value[:, :2], bounds, 0.2, window)
        try:
            low = packed_attention(
                query[:10].to(dtype), key[:, :2].to(dtype), value[:, :2].to(dtype), bounds, 0.2, window
            )
        except (RuntimeError, TypeError):
            return False
        if not torch.allclose(low.float(), exact, atol=0.05):
            return False
    return True
