"""Attention over responses of different lengths laid end to end: no padding, so nothing is computed for it.

transformers lets an attention function be registered by name and hands it whatever keywords a model was
called with. Ours is told where each response begins and, while decoding, which slots of a cache hold what
came before. On a GPU it is torch's FlashAttention for ragged batches; elsewhere, and in float32, one plain
call per response, which is slower and means the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    _fused: Any = None
else:  # torch 2.11's shares heads without being told, later ones want to be told
    _told = "enable_gqa" in inspect.signature(varlen_attn).parameters
    _fused = partial(varlen_attn, enable_gqa=True) if _told else varlen_attn

NAME = "hacrl_ragged"
_PROBES = ((3, 1, 4, 1, 5, 9), (2, 7, 1, 8))  # token ids; any will do, but two lengths
_CLOSE = 0.1  # of a logit's spread: far above rounding in 16 bits, far below what a wrong neighbour does
KERNEL_TYPES = (torch.bfloat16, torch.float16)
_KNOWN: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class Slots(Protocol):
    """Keys and values of tokens that came before; see :class:`hacrl.rollout.slots.SlotCache`."""

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
    max_length_q: int | None = None,
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
        out = _attend(slots, module.layer_idx, flat[0], flat[1], flat[2], scale, window)
    elif cu_seq_lens_q is not None and max_length_q is not None:
        out = packed_attention(flat[0], flat[1], flat[2], cu_seq_lens_q, max_length_q, scale, window)
    else:  # the model does not pass on what it was called with
        raise CannotBeRagged
    return out.unsqueeze(0), None


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _attend(
    slots: Slots, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
) -> Tensor:
    """Not for the compiler: every layer has other slots, and it would compile each anew."""
    return slots.attend(layer, query, key, value, scale, window)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float, window: int
) -> Tensor:
    """Causal attention within each of the sequences that begin at ``starts`` (one more than there are)."""
    if has_kernel(query):
        fused: Tensor = _fused(
            query, key, value, starts, starts, longest, longest, scale=scale, window_size=(window, 0)
        )
        return fused
    edges = starts.tolist()
    parts = []
    for begin, end in pairwise(edges):
        mask = None
        if -1 < window < end - begin - 1:
            ahead = torch.arange(end - begin, device=query.device)
            distance = ahead.unsqueeze(1) - ahead
            mask = (distance >= 0) & (distance <= window)
        queries, keys, values = (part[begin:end].transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


def has_kernel(states: Tensor) -> bool:
    """Whether torch has a fused kernel for ragged batches of this kind."""
    return _fused is not None and states.is_cuda and states.dtype in KERNEL_TYPES and states.shape[-1] <= 256


def packed_inputs(sequences: Sequence[Sequence[int]], device: torch.device) -> dict[str, Any]:
    """What a model is called with: all tokens in one row, where each sequence begins, and their positions."""
    lengths = [len(sequence) for sequence in sequences]
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    longest = max(lengths)
    return {
        "input_ids": flat.unsqueeze(0).to(device),
        "position_ids": positions.unsqueeze(0).to(device),
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }


@contextmanager
def ragged(model: Any, wanted: bool = True) -> Iterator[None]:
    """Within the block the model's attention is the ragged one.

    A backward pass belongs into the block too: checkpointed layers are computed again in it.
    """
    if not wanted:
        yield
        return
    _register()
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def packs(model: Any) -> bool:
    """Whether laying sequences end to end is possible and of use: there is a fused kernel for it."""
    return model.device.type == "cuda" and model.dtype in KERNEL_TYPES and can_be_ragged(model)


def can_be_ragged(model: Any) -> bool:
    """Whether this model computes the same with sequences laid end to end. Seen by trying, once."""
    if model not in _KNOWN:
        _KNOWN[model] = _same_when_packed(model)
    return _KNOWN[model]


@torch.no_grad()
def _same_when_packed(model: Any) -> bool:
    device = model.device
    inputs = packed_inputs(_PROBES, device)
    layers = _EveryLayer(inputs["cu_seq_lens_q"], inputs["max_length_q"])
    try:
        with ragged(model):
            packed = model(**inputs, slots=layers).logits[0].float()
    except (CannotBeRagged, TypeError, ValueError, RuntimeError, AttributeError):
        return False
    if layers.seen != set(range(model.config.get_text_config().num_hidden_layers)):
        return False  # some of them look at other things, or at one sequence's end from the next
    plain = torch.cat(
        [
            model(input_ids=torch.tensor([probe], device=device), use_cache=False).logits[0]
            for probe in _PROBES
        ]
    ).float()
    return packed.shape == plain.shape and bool((packed - plain).abs().max() <= _CLOSE * plain.std())


class _EveryLayer:
    """Attends, and remembers who asked."""

    def __init__(self, starts: Tensor, longest: int) -> None:
        self.seen: set[int] = set()
        self._starts, self._longest = starts, longest

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        self.seen.add(layer)
        return packed_attention(query, key, value, self._starts, self._longest, scale, window)


def _register() -> None:
    from transformers import AttentionInterface

    # No mask function goes with it, so that transformers makes no masks: where sequences begin says it all.
    AttentionInterface.register(NAME, ragged_attention)
