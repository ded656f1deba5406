"""Prompts and responses laid end to end for one forward pass, a prompt once for all responses to it.

The keys and values of a shared prompt are seen by the attention of each of its responses, and computed once.
With 8 responses as long as their prompt, that is 9 parts of work instead of 16.

Models called with sequences laid end to end instead of padded rows, if they compute the same that way.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from hacrl.models.attention.packed import (
    KERNEL_TYPES,
    Segments,
    Slots,
    fused_is_right,
    packed_attention,
    ragged_attention,
)
from hacrl.models.attention.tree import Tree, plant, ranges
from hacrl.models.attention.tree_attention import Shared, kernels_are_right, share
from hacrl.models.device import is_out_of_memory, upload

TokenPair = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids
LossMasks = Sequence[Sequence[bool]] | None  # per pair and response token: whether it is wanted; None: all


class _Told(TypedDict, total=False):
    """What attention is told of who sees whom."""

    tree: Tree
    segments: Segments
    shared_keys: Shared


@dataclass(frozen=True)
class Packed:
    """What the model is called with, and where in it the responses are."""

    inputs: dict[str, Any]
    before: Tensor  # (N,) places of the tokens before the wanted response tokens, in the pairs' order
    targets: Tensor  # (N,) the wanted response tokens


def packed_tokens(pairs: Sequence[TokenPair]) -> int:
    """Tokens of a forward pass over these pairs."""
    prompts = {tuple(prompt) for prompt, _ in pairs}
    return sum(map(len, prompts)) + sum(len(response) for _, response in pairs)


def padded_tokens(pairs: Sequence[TokenPair]) -> int:
    """The same, in rows of equal length."""
    return len(pairs) * max(len(prompt) + len(response) for prompt, response in pairs)


def pack(
    pairs: Sequence[TokenPair], device: torch.device, as_tree: bool = False, loss_masks: LossMasks = None
) -> Packed:
    """Prompt after prompt, each followed by its responses.

    Attention is told of a tree, or of keys that are handed out to all who see them.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (prompt, _) in enumerate(pairs):
        groups.setdefault(tuple(prompt), []).append(number)
    tokens = array("q")  # torch reads it as it is; numbers of a list it would read one by one
    sequences: list[tuple[int, int, int, int]] = []  # what each sees first, and itself: (place, length) twice
    prompt_ends = [0] * len(pairs)  # place of the token before a response
    starts = [0] * len(pairs)  # of a response

    def add(ids: Sequence[int], seen: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """A sequence that sees these places, then itself; returns its own."""
        own = (len(tokens), len(ids))
        tokens.extend(ids)
        sequences.append((*seen, *own))
        return own

    for prompt, numbers in groups.items():
        if len(numbers) == 1:  # nobody to share with
            (number,) = numbers
            start, _ = add((*prompt, *pairs[number][1]))
            prompt_ends[number], starts[number] = start + len(prompt) - 1, start + len(prompt)
            continue
        shared_prompt = add(prompt)
        for number in numbers:
            prompt_ends[number] = sum(shared_prompt) - 1
            starts[number], _ = add(pairs[number][1], shared_prompt)

    seen_place, seen_length, own_place, own_length = torch.tensor(sequences).unbind(1)
    if as_tree:
        planted = plant(own_place, own_length, seen_place, seen_length)
        told: _Told = {"tree": planted.moved(partial(upload, device=device))}
    else:
        told = {
            "segments": Segments(
                _starts(own_length, device),
                _starts(seen_length + own_length, device),
                int(own_length.max()),
                int((seen_length + own_length).max()),
            )
        }
        if len(groups) < len(pairs):
            keys = ranges(
                torch.stack([seen_length, own_length], 1).flatten(),
                torch.stack([seen_place, own_place], 1).flatten(),
            )
            told["shared_keys"] = share(keys, len(tokens), device)
    ids = torch.frombuffer(tokens, dtype=torch.int64)
    lengths = torch.tensor([len(response) for _, response in pairs])
    places, before = _wanted_places(lengths, starts, prompt_ends, loss_masks)
    positions = ranges(own_length, seen_length)
    inputs = model_inputs(upload(ids, device), upload(positions, device), **told)
    return Packed(inputs, upload(before, device), upload(ids[places], device))


def _wanted_places(
    lengths: Tensor, starts: Sequence[int], prompt_ends: Sequence[int], loss_masks: LossMasks
) -> tuple[Tensor, Tensor]:
    """Return the places of the wanted response tokens and of the tokens before them, (N,) each."""
    places = ranges(lengths, torch.tensor(starts))
    is_first = ranges(lengths) == 0
    before = torch.where(is_first, torch.tensor(prompt_ends).repeat_interleave(lengths), places - 1)
    if loss_masks is None:
        return places, before
    wanted = torch.tensor([one for loss_mask in loss_masks for one in loss_mask], dtype=torch.bool)
    return places[wanted], before[wanted]


def whole_sequences(
    sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, Segments]:
    """Sequences that share nothing: their tokens in one row, the tokens' positions, and where each begins."""
    lengths = [len(sequence) for sequence in sequences]
    tokens = upload([token for sequence in sequences for token in sequence], device)
    all_lengths = torch.tensor(lengths)
    positions = upload(ranges(all_lengths), device)
    # one for both would be compiled apart
    queries, keys = _starts(all_lengths, device), _starts(all_lengths, device)
    return tokens, positions, Segments(queries, keys, max(lengths), max(lengths))


def model_inputs(
    tokens: Tensor,
    positions: Tensor,
    segments: Segments | None = None,
    shared_keys: Shared | None = None,
    tree: Tree | None = None,
    slots: Slots | None = None,
) -> dict[str, Any]:
    """What a model is called with, and its attention told. Always the same keywords: compilers mind."""
    return {
        "input_ids": tokens.unsqueeze(0),
        "position_ids": positions.unsqueeze(0),
        "cu_seq_lens_q": segments.queries if segments else None,
        "cu_seq_lens_k": segments.keys if segments else None,
        "max_length_q": segments.most_queries if segments else None,
        "max_length_k": segments.most_keys if segments else None,
        "shared_keys": shared_keys,
        "tree": tree,
        "slots": slots,
        "use_cache": False,
    }


def _starts(lengths: Tensor, device: torch.device) -> Tensor:
    """Where each begins, and where the last one ends."""
    return upload(pad(lengths.cumsum(0), (1, 0)), device, torch.int32)


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
