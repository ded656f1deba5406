"""Call models with packed sequences, if a trial shows that they compute the same as with padded rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hacrl.models.attention.packed import (
    KERNEL_TYPES,
    SequenceBounds,
    fused_kernel_is_correct,
    packed_attention,
    packed_attention_function,
)
from hacrl.models.attention.tree_attention import kernels_are_correct
from hacrl.models.device import is_out_of_memory
from hacrl.models.packing import TokenPair, model_inputs, pack, whole_sequences

NAME = "hacrl_packed"  # of the attention function, as transformers knows it
NO_WINDOW = -1  # a layer attends to all earlier tokens
_TRANSFORMERS_LOGGER = logging.getLogger("transformers.modeling_utils")
# Prompts and responses of the trial: of different lengths, and one prompt with two responses.
_TRIAL_PAIRS: tuple[TokenPair, ...] = (((3, 1, 4, 1), (5, 9, 2)), ((2, 7), (1, 8)), ((3, 1, 4, 1), (6, 5)))
# Largest mean difference in a trial, as a share of the logits' standard deviation: above rounding, below the
# effect of attending to a wrong token. The largest difference would not do: in 16 bits, one of a million
# logits is always far off.
_TOLERANCES = {torch.bfloat16: 0.06, torch.float16: 0.02}
_FULL_PRECISION_TOLERANCE = 1e-3
Shapes = tuple[tuple[int, int], tuple[int, int]]  # number of heads and their width, of keys and of values
_SUPPORTED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_SHAPES: WeakKeyDictionary[Any, dict[int, list[Shapes]]] = WeakKeyDictionary()
_QUERY_HEADS: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


@contextmanager
def packed_sequences(model: Any, enabled: bool = True) -> Iterator[None]:
    """Make the model compute packed attention within the block.

    The block must include the backward pass: it computes checkpointed layers again.
    """
    if enabled:
        supports_packing(model)  # the trial, if there was none yet, must run outside of the block
        with _packed_attention_enabled(model):
            yield
    else:
        yield


@contextmanager
def _packed_attention_enabled(model: Any) -> Iterator[None]:
    from transformers import AttentionInterface

    # No mask function is registered, so transformers makes no masks: the sequences' bounds replace them.
    AttentionInterface.register(NAME, packed_attention_function)
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    _TRANSFORMERS_LOGGER.addFilter(_is_not_about_masks)
    try:
        yield
    finally:
        _TRANSFORMERS_LOGGER.removeFilter(_is_not_about_masks)
        config._attn_implementation = before


def _is_not_about_masks(record: logging.LogRecord) -> bool:
    """Some models, GPT-2 among them, ask for a mask if the first or the last token may be padding."""
    return "passing in an `attention_mask`" not in str(record.msg)


def has_fused_attention(model: Any) -> bool:
    """Return whether a fused attention kernel exists for packed sequences of this model."""
    if model.device.type != "cuda" or model.dtype not in KERNEL_TYPES:
        return False
    return supports_packing(model) and fused_kernel_is_correct(model.device, model.dtype)


def has_tree_attention(model: Any) -> bool:
    """Return whether hacrl's kernels can compute the attention of all layers over a prefix tree."""
    if not has_fused_attention(model):
        return False
    windows = attention_windows(model.config.get_text_config()) or []
    needed = {(shapes, window) for layer, window in enumerate(windows) for shapes in _SHAPES[model][layer]}
    return all(
        keys == values and kernels_are_correct(model.device, model.dtype, heads, *keys, window)
        for (keys, values), window in needed
        for heads in _QUERY_HEADS[model]
    )


def supports_packing(model: Any) -> bool:
    """Return whether the model computes the same for packed sequences, found out by a trial, once a model."""
    if model not in _SUPPORTED:
        _SUPPORTED[model] = _same_when_packed(model)
    return _SUPPORTED[model]


def attention_shapes(model: Any) -> dict[int, list[Shapes]]:
    """Return the shapes of each layer's attention calls; empty for a model without packing support."""
    return _SHAPES.get(model, {}) if supports_packing(model) else {}


@torch.no_grad()
def _same_when_packed(model: Any) -> bool:
    if model.config._attn_implementation != "sdpa":  # the user chose another attention implementation
        return False
    device = model.device
    packed = pack(_TRIAL_PAIRS, device)
    tokens, positions, bounds = whole_sequences(
        [(*prompt, *response) for prompt, response in _TRIAL_PAIRS], device
    )
    recorder = _AttentionRecorder(bounds)
    try:
        with _packed_attention_enabled(model):
            model(**model_inputs(tokens, positions, bounds, slots=recorder))
            logits = model(**packed.inputs).logits[0, packed.before].float()
    except Exception as error:  # a model's code may raise anything
        if is_out_of_memory(error):
            raise  # this is no property of the model
        return False
    windows = attention_windows(model.config.get_text_config())
    if windows is None or recorder.windows != dict(enumerate(windows)):
        return False  # some layers do not attend as the config says
    _SHAPES[model], _QUERY_HEADS[model] = recorder.shapes, recorder.query_heads
    plain = []
    for prompt, response in _TRIAL_PAIRS:
        ids = torch.tensor([[*prompt, *response]], device=device)
        plain.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1])
    expected = torch.cat(plain).float()
    if logits.shape != expected.shape:
        return False
    return bool((logits - expected).abs().mean() <= logit_tolerance(model.dtype) * expected.std())


def logit_tolerance(dtype: torch.dtype) -> float:
    """Return the largest mean difference in a trial, as a share of the logits' standard deviation."""
    return _TOLERANCES.get(dtype, _FULL_PRECISION_TOLERANCE)


def attention_windows(config: Any) -> list[int] | None:
    """Return how many earlier tokens each layer attends to, -1 for all; None for other kinds of attention.

    The config decides, because the trial's sequences are shorter than any window.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        layers = getattr(config, "num_hidden_layers", 0)  # 0: of a kind that is described in another way
        kinds = ["full_attention" if window is None else "sliding_attention"] * layers
    windows = {"full_attention": NO_WINDOW} | ({} if window is None else {"sliding_attention": window - 1})
    return [windows[kind] for kind in kinds] if kinds and windows.keys() >= set(kinds) else None


class _AttentionRecorder:
    """Computes attention and records each layer's window and shapes."""

    def __init__(self, bounds: SequenceBounds) -> None:
        self.windows: dict[int, int] = {}
        self.shapes: dict[int, list[Shapes]] = {}
        self.query_heads: set[int] = set()
        self._bounds = bounds

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        self.windows[layer] = window
        self.query_heads.add(query.shape[1])
        shapes = (key.shape[1], key.shape[2]), (value.shape[1], value.shape[2])
        self.shapes.setdefault(layer, []).append(shapes)
        return packed_attention(query, key, value, self._bounds, scale, window)
