"""Attention over responses of different lengths laid end to end: no padding, so nothing is computed for it.

transformers lets an attention function be registered by name and hands it whatever keywords a model was
called with. Ours is told where each response begins and, while decoding, which slots of a cache hold what
came before. On a GPU it is torch's FlashAttention for ragged batches; elsewhere, and in float32, one plain
call per response, which is slower and means the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hacrl.agents.packing import TokenPair, pack

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    _fused: Any = None
else:  # torch 2.11's shares heads without being told, later ones want to be told
    _told = "enable_gqa" in inspect.signature(varlen_attn).parameters
    _fused = partial(varlen_attn, enable_gqa=True) if _told else varlen_attn

NAME = "hacrl_ragged"
# Prompts and responses; any will do, but of different lengths, and one prompt with two responses.
_PROBES: tuple[TokenPair, ...] = (((3, 1, 4, 1), (5, 9, 2)), ((2, 7), (1, 8)), ((3, 1, 4, 1), (6, 5)))
# Mean difference, as a share of the logits' spread: above rounding, below what a wrong neighbour does. (The
# largest difference would not do: in 16 bits, one of a million logits is always far off.)
_CLOSE = {torch.bfloat16: 0.06, torch.float16: 0.02}
_CLOSE_EXACTLY = 1e-3
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
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    shared_keys: Tensor | None = None,
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
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        segments = Segments(cu_seq_lens_q, cu_seq_lens_k, max_length_q or 0, max_length_k or 0)
        keys, values = flat[1], flat[2]
        if shared_keys is not None:
            keys, values = keys[shared_keys], values[shared_keys]
        out = packed_attention(flat[0], keys, values, segments, scale, window)
    else:  # the model does not pass on what it was called with
        raise CannotBeRagged
    return out.unsqueeze(0), None


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _attend(
    slots: Slots, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
) -> Tensor:
    """Not for the compiler: every layer has other slots, and it would compile each anew."""
    return slots.attend(layer, query, key, value, scale, window)


class Segments(NamedTuple):
    """Where queries and keys of each sequence begin, one more than there are, and how many the longest has.

    A sequence with fewer queries than keys has the last ones: those before were computed elsewhere.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int
) -> Tensor:
    """Causal attention within each sequence; (tokens, heads, D)."""
    if has_kernel(query):
        fused: Tensor = _fused(query, key, value, *segments, scale=scale, window_size=(window, 0))
        return fused
    # elsewhere attention alone is padded, and everything else is not
    queries, is_query = _padded_places(segments.queries, segments.most_queries)
    keys, is_key = _padded_places(segments.keys, segments.most_keys)
    first = is_key.sum(dim=1) - is_query.sum(dim=1)  # position of a sequence's first query
    at = first[:, None, None] + torch.arange(segments.most_queries, device=query.device)[:, None]
    places = torch.arange(segments.most_keys, device=query.device)
    seen = (places <= at) & is_key.unsqueeze(1)
    if window >= 0:
        seen &= places >= at - window
    seen |= ~is_query.unsqueeze(2) & (places == 0)  # padding has to look at something
    out = scaled_dot_product_attention(
        query[queries].transpose(1, 2),
        key[keys].transpose(1, 2),
        value[keys].transpose(1, 2),
        attn_mask=seen.unsqueeze(1),
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2)[is_query]


def _padded_places(starts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Of each sequence's tokens, a row each, and which of them are not padding."""
    columns = torch.arange(most, device=starts.device)
    real = columns < (starts[1:] - starts[:-1]).unsqueeze(1)
    return (starts[:-1].unsqueeze(1) + columns).masked_fill(~real, 0).long(), real


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
        "shared_keys": None,
        "slots": None,
        "use_cache": False,
    }


def decoding_inputs(token_ids: Tensor, positions: Tensor, slots: Slots) -> dict[str, Any]:
    """The same for one token of each response: the same keywords always, or compiled layers would stumble."""
    return {
        "input_ids": token_ids.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "cu_seq_lens_q": None,
        "cu_seq_lens_k": None,
        "max_length_q": None,
        "max_length_k": None,
        "shared_keys": None,
        "slots": slots,
        "use_cache": False,
    }


def segments_of(inputs: Mapping[str, Any]) -> Segments:
    """Of what :func:`packed_inputs` gave."""
    return Segments(
        inputs["cu_seq_lens_q"], inputs["cu_seq_lens_k"], inputs["max_length_q"], inputs["max_length_k"]
    )


@contextmanager
def ragged(model: Any, wanted: bool = True) -> Iterator[None]:
    """Within the block the model's attention is the ragged one.

    A backward pass belongs into the block too: checkpointed layers are computed again in it.
    """
    if wanted:
        can_be_ragged(model)  # to be found out before, if at all
        with _switched(model):
            yield
    else:
        yield


@contextmanager
def _switched(model: Any) -> Iterator[None]:
    from transformers import AttentionInterface

    # No mask function goes with it, so that transformers makes no masks: where sequences begin says it all.
    AttentionInterface.register(NAME, ragged_attention)
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def has_fused_attention(model: Any) -> bool:
    """Whether sequences of this model can be laid end to end, and there is a fused kernel for it."""
    if model.device.type != "cuda" or model.dtype not in KERNEL_TYPES:
        return False
    return can_be_ragged(model) and fused_is_right(model.device, model.dtype)


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


def can_be_ragged(model: Any) -> bool:
    """Whether this model computes the same with sequences laid end to end. Seen by trying, once."""
    if model not in _KNOWN:
        _KNOWN[model] = _same_when_packed(model)
    return _KNOWN[model]


@torch.no_grad()
def _same_when_packed(model: Any) -> bool:
    device = model.device
    packed = pack(_PROBES, device)
    whole = packed_inputs([(*prompt, *response) for prompt, response in _PROBES], device)
    layers = _EveryLayer(segments_of(whole))
    try:
        with _switched(model):
            model(**{**whole, "slots": layers})
            found = model(**packed.inputs).logits[0, packed.before].float()
    except (CannotBeRagged, TypeError, ValueError, RuntimeError, AttributeError):
        return False
    if layers.seen != set(range(model.config.get_text_config().num_hidden_layers)):
        return False  # some of them look at other things, or at one sequence's end from the next
    plain = []
    for prompt, response in _PROBES:
        ids = torch.tensor([[*prompt, *response]], device=device)
        plain.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1])
    expected = torch.cat(plain).float()
    if found.shape != expected.shape:
        return False
    close = _CLOSE.get(model.dtype, _CLOSE_EXACTLY)
    return bool((found - expected).abs().mean() <= close * expected.std())


class _EveryLayer:
    """Attends, and remembers who asked."""

    def __init__(self, segments: Segments) -> None:
        self.seen: set[int] = set()
        self._segments = segments

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        self.seen.add(layer)
        return packed_attention(query, key, value, self._segments, scale, window)
