"""Models called with sequences laid end to end instead of padded rows, if they compute the same that way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hacrl.agents.attention import (
    KERNEL_TYPES,
    Segments,
    fused_is_right,
    packed_attention,
    ragged_attention,
)
from hacrl.agents.out_of_memory import is_out_of_memory
from hacrl.agents.packing import TokenPair, model_inputs, pack, whole_sequences
from hacrl.agents.tree_attention import kernels_are_right

NAME = "hacrl_ragged"
_TRANSFORMERS = logging.getLogger("transformers.modeling_utils")
EVERYTHING = -1  # a window that is none
# Prompts and responses; any will do, but of different lengths, and one prompt with two responses.
_PROBES: tuple[TokenPair, ...] = (((3, 1, 4, 1), (5, 9, 2)), ((2, 7), (1, 8)), ((3, 1, 4, 1), (6, 5)))
# Mean difference, as a share of the logits' spread: above rounding, below what a wrong neighbour does. (The
# largest difference would not do: in 16 bits, one of a million logits is always far off.)
_CLOSE = {torch.bfloat16: 0.06, torch.float16: 0.02}
_CLOSE_EXACTLY = 1e-3
_KNOWN: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
Shapes = tuple[tuple[int, int], tuple[int, int]]  # heads and width of keys, and of values
_ASKED: WeakKeyDictionary[Any, dict[int, list[Shapes]]] = WeakKeyDictionary()
_QUERY_HEADS: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


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
    _TRANSFORMERS.addFilter(_is_not_about_masks)
    try:
        yield
    finally:
        _TRANSFORMERS.removeFilter(_is_not_about_masks)
        config._attn_implementation = before


def _is_not_about_masks(record: logging.LogRecord) -> bool:
    """Some models, GPT-2 among them, ask for a mask if the first or the last token may be padding."""
    return "passing in an `attention_mask`" not in str(record.msg)


def has_fused_attention(model: Any) -> bool:
    """Whether sequences of this model can be laid end to end, and there is a fused kernel for it."""
    if model.device.type != "cuda" or model.dtype not in KERNEL_TYPES:
        return False
    return can_be_ragged(model) and fused_is_right(model.device, model.dtype)


def has_tree_attention(model: Any) -> bool:
    """Whether, besides, our own kernels compute all of its attention, prompts and responses as a tree."""
    if not has_fused_attention(model):
        return False
    windows = windows_of_layers(model.config.get_text_config()) or []
    asked = {(shapes, window) for layer, window in enumerate(windows) for shapes in _ASKED[model][layer]}
    return all(
        keys == values and kernels_are_right(model.device, model.dtype, heads, *keys, window)
        for (keys, values), window in asked
        for heads in _QUERY_HEADS[model]
    )


def can_be_ragged(model: Any) -> bool:
    """Whether this model computes the same with sequences laid end to end. Seen by trying, once."""
    if model not in _KNOWN:
        _KNOWN[model] = _same_when_packed(model)
    return _KNOWN[model]


def asked_of_layers(model: Any) -> dict[int, list[Shapes]]:
    """What attention each layer asks for in one pass; empty for a model that cannot be ragged."""
    return _ASKED.get(model, {}) if can_be_ragged(model) else {}


@torch.no_grad()
def _same_when_packed(model: Any) -> bool:
    if model.config._attn_implementation != "sdpa":  # somebody has asked for another one: that is kept
        return False
    device = model.device
    packed = pack(_PROBES, device)
    tokens, positions, segments = whole_sequences([(*one, *two) for one, two in _PROBES], device)
    layers = _EveryLayer(segments)
    try:
        with _switched(model):
            model(**model_inputs(tokens, positions, segments, slots=layers))
            found = model(**packed.inputs).logits[0, packed.before].float()
    except Exception as error:  # whatever a model's code makes of it
        if is_out_of_memory(error):
            raise  # that says nothing of the model
        return False
    windows = windows_of_layers(model.config.get_text_config())
    if windows is None or layers.windows != dict(enumerate(windows)):
        return False  # some of them look at other things, or not as far as the attention is told
    _ASKED[model], _QUERY_HEADS[model] = layers.asked, layers.query_heads
    plain = []
    for prompt, response in _PROBES:
        ids = torch.tensor([[*prompt, *response]], device=device)
        plain.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1])
    expected = torch.cat(plain).float()
    if found.shape != expected.shape:
        return False
    close = _CLOSE.get(model.dtype, _CLOSE_EXACTLY)
    return bool((found - expected).abs().mean() <= close * expected.std())


def windows_of_layers(config: Any) -> list[int] | None:
    """How many tokens before its own each layer sees, -1 for all, by the config; None: in another way.

    Our probes are shorter than any window, so that one which only a mask knows of would not show.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    before = {"full_attention": EVERYTHING} | ({} if window is None else {"sliding_attention": window - 1})
    return [before[kind] for kind in kinds] if before.keys() >= set(kinds) else None


class _EveryLayer:
    """Attends, and remembers who asked for what."""

    def __init__(self, segments: Segments) -> None:
        self.windows: dict[int, int] = {}
        self.asked: dict[int, list[Shapes]] = {}
        self.query_heads: set[int] = set()
        self._segments = segments

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        self.windows[layer] = window
        self.query_heads.add(query.shape[1])
        shapes = (key.shape[1], key.shape[2]), (value.shape[1], value.shape[2])
        self.asked.setdefault(layer, []).append(shapes)
        return packed_attention(query, key, value, self._segments, scale, window)
