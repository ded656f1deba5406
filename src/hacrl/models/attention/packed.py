"""Attention over sequences of different lengths laid end to end: no padding, so nothing is computed for it.

transformers lets an attention function be registered by name and hands it whatever keywords a model was
called with. Ours is told where each sequence begins, or which grows from which, and, while decoding, which
slots of a cache hold what came before. In 16 bits on a GPU kernels of ours compute it or, if heads are wide
and before decoding, torch's FlashAttention for ragged batches; elsewhere attention alone is padded, and
nothing else.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hacrl.models.attention.tree import Tree
from hacrl.models.attention.tree_attention import Shared, handed_out, tree_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    _fused: Any = None
else:  # torch 2.11's shares heads without being told, later ones want to be told
    _told = "enable_gqa" in inspect.signature(varlen_attn).parameters
    _fused = partial(varlen_attn, enable_gqa=True) if _told else varlen_attn

KERNEL_TYPES = (torch.bfloat16, torch.float16)


class Segments(NamedTuple):
    """Where queries and keys of each sequence begin, one more than there are, and how many the longest has.

    A sequence with fewer queries than keys has the last ones: those before were computed elsewhere.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


class Slots(Protocol):
    """Keys and values of tokens that came before; see :class:`hacrl.engines.hf.slot_cache.SlotCache`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """Store the keys and values of new tokens, and look at them and those before: all (N, heads, D)."""
        ...


class CannotBeRagged(Exception):  # noqa: N818 - an answer, not an error
    """This model's attention needs more than a ragged one can do."""


def ragged_attention(
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
    shared_keys: Shared | None = None,
    tree: Tree | None = None,
    slots: Slots | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: (1, heads, N, D) -> (1, N, heads, D)."""
    if query.shape[0] != 1 or dropout or any(others.get(key) is not None for key in ("softcap", "s_aux")):
        raise CannotBeRagged
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = -1 if sliding_window is None else sliding_window - 1  # tokens before one's own
    flat = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
    if slots is not None:
        out = _attend(slots, module, flat[0], flat[1], flat[2], scale, window)
    elif tree is not None:
        out = tree_attention(flat[0], flat[1], flat[2], tree, scale, window)
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        segments = Segments(cu_seq_lens_q, cu_seq_lens_k, max_length_q or 0, max_length_k or 0)
        keys = flat[1:] if shared_keys is None else [handed_out(states, shared_keys) for states in flat[1:]]
        out = packed_attention(flat[0], keys[0], keys[1], segments, scale, window)
    else:  # the model does not pass on what it was called with
        raise CannotBeRagged
    return out.unsqueeze(0), None


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _attend(
    slots: Slots, module: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
) -> Tensor:
    """Not for the compiler: it would compile every layer anew if it saw a layer's number or its slots."""
    return slots.attend(module.layer_idx, query, key, value, scale, window)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int
) -> Tensor:
    """Causal attention within each sequence; (tokens, heads, D)."""
    if has_kernel(query):
        fused: Tensor = _fused(query, key, value, *segments, scale=scale, window_size=(window, 0))
        return fused
    return _padded_attention(query, key, value, segments, scale, window)


def _padded_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int
) -> Tensor:
    """The same where there is no such kernel: attention alone is padded, and everything else is not."""
    found, places = [], torch.empty_like(segments.queries[1:])  # of a sequence's first query in what is found
    padded = 0
    for alike, most, most_keys, are_whole in _of_similar_size(segments):
        queries, is_query = _padded_places(segments.queries, alike, most)
        keys, is_key = _padded_places(segments.keys, alike, most_keys)
        is_causal = are_whole and window < 0  # which needs no mask: padding comes last
        seen = None if is_causal else _seen(is_query, is_key, window)
        out = scaled_dot_product_attention(
            _rows(query, queries).transpose(1, 2),
            _rows(key, keys).transpose(1, 2),
            _rows(value, keys).transpose(1, 2),
            attn_mask=seen,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=True,
        )
        found.append(out.transpose(1, 2).flatten(0, 1))
        starts = padded + most * torch.arange(len(queries), device=query.device)
        places = places.index_copy(0, alike, starts.to(places.dtype))
        padded += queries.numel()
    tokens = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)
    row = torch.searchsorted(segments.queries, tokens, right=True) - 1
    together = found[0] if len(found) == 1 else torch.cat(found)
    return together.index_select(0, places[row] + tokens - segments.queries[row])


def _seen(is_query: Tensor, is_key: Tensor, window: int) -> Tensor:
    """Which keys each query may look at, (rows, 1, queries, keys)."""
    first = is_key.sum(dim=1) - is_query.sum(dim=1)  # position of a sequence's first query
    at = first[:, None, None] + torch.arange(is_query.shape[1], device=first.device)[:, None]
    columns = torch.arange(is_key.shape[1], device=first.device)
    seen = (columns <= at) & is_key.unsqueeze(1)
    if window >= 0:
        seen &= columns >= at - window
    seen |= ~is_query.unsqueeze(2) & (columns == 0)  # padding has to look at something
    return seen.unsqueeze(1)


def _of_similar_size(segments: Segments) -> list[tuple[Tensor, int, int, bool]]:
    """Numbers of sequences that are padded together, the most queries and keys of one, and if all are whole.

    Prompts may have many more queries than the responses to them. A GPU would have to be waited for to know,
    and a compiler cannot.
    """
    starts = segments.queries
    if starts.device.type != "cpu" or torch.compiler.is_compiling():
        everyone = torch.arange(len(starts) - 1, device=starts.device)
        return [(everyone, segments.most_queries, segments.most_keys, False)]
    queries, keys = (each[1:] - each[:-1] for each in (starts, segments.keys))
    sizes: dict[tuple[int, bool], list[int]] = {}
    for number, (asking, asked) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        sizes.setdefault((asking.bit_length(), asking == asked), []).append(number)
    return [
        (torch.tensor(alike), int(queries[alike].max()), int(keys[alike].max()), are_whole)
        for (_, are_whole), alike in sizes.items()
    ]


def _rows(states: Tensor, places: Tensor) -> Tensor:
    """The same as ``states[places]``, whose gradient takes a CPU several times as long."""
    rows, columns = places.shape
    return states.index_select(0, places.flatten()).view(rows, columns, *states.shape[1:])


def _padded_places(starts: Tensor, some: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Of the tokens of some sequences, a row each, and which of them are not padding."""
    first, end = starts[some], starts[some + 1]
    columns = torch.arange(most, device=starts.device)
    real = columns < (end - first).unsqueeze(1)
    return (first.unsqueeze(1) + columns).masked_fill(~real, 0).long(), real


def has_kernel(states: Tensor) -> bool:
    """Whether torch has a fused kernel for ragged batches of this kind."""
    return _fused is not None and states.is_cuda and states.dtype in KERNEL_TYPES and states.shape[-1] <= 256


@cache
@torch.no_grad()
def fused_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel means what we mean, sequences with more keys than queries included: tried, once."""
    if _fused is None:
        return False
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (24, 4, 64)
    query, key, value = (torch.randn(shape, generator=generator, device=device) for _ in range(3))
    starts = [torch.tensor(edges, dtype=torch.int32, device=device) for edges in ([0, 3, 10], [0, 9, 24])]
    segments = Segments(starts[0], starts[1], 7, 15)
    for window in (-1, 4):
        exact = packed_attention(query[:10], key[:, :2], value[:, :2], segments, 0.2, window)
        try:
            low = packed_attention(
                query[:10].to(dtype), key[:, :2].to(dtype), value[:, :2].to(dtype), segments, 0.2, window
            )
        except (RuntimeError, TypeError):
            return False
        if not torch.allclose(low.float(), exact, atol=0.05):
            return False
    return True
