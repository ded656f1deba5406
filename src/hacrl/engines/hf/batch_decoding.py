"""Decode a batch of responses in step: every running response gets one token per forward pass.

``SharedPromptRows`` computes and keeps each prompt once for all responses to it. A CPU that decodes waits for
memory: for 8 responses as long as their prompt, attention then reads half as much, and multiplies matrices
instead of vectors. ``PaddedRows`` works for other models with an attention cache: prompts are padded on the
left, and each response has its own copy of its prompt. ``plain_generation`` is for all other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hacrl.engines.hf.slot_cache import PrefilledPrompts, supports_slots
from hacrl.models.architecture import keeps_state
from hacrl.models.device import is_out_of_memory
from hacrl.models.packing import model_inputs, whole_sequences
from hacrl.models.packing_support import (
    NO_WINDOW,
    attention_windows,
    logit_tolerance,
    packed_sequences,
    supports_packing,
)

# Spare tokens of a grown buffer: at least so many, or one in so many. Few, because spare tokens lie between
# rows, and a CPU prefetches memory behind the tokens that it reads.
MIN_SPARE_TOKENS, SPARE_FRACTION = 16, 16
# Sequences of the trial: of different lengths, and how many of each one's tokens are its prompt
_TRIAL: tuple[tuple[tuple[int, ...], int], ...] = (((3, 1, 4, 1, 5, 9, 2), 5), ((2, 7, 1, 8), 2))
_DECODES: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class GrowingLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """Keys and values as the beginning of larger buffers, so that appending a token copies no others."""

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        held, more = self.keys.shape[-2], key_states.shape[-2]
        buffers = self._buffers
        if buffers is None or buffers[0].shape[0] != len(self.keys) or buffers[0].shape[-2] < held + more:
            buffers = self._grow(held + more + max(MIN_SPARE_TOKENS, held // SPARE_FRACTION))
        for part, states in zip(buffers, (key_states, value_states), strict=True):
            part[:, :, held : held + more] = states
        self.keys, self.values = (part[:, :, : held + more] for part in buffers)
        return self.keys, self.values

    def _grow(self, tokens: int) -> tuple[Tensor, Tensor]:
        grown = []
        for states in (self.keys, self.values):
            rows, heads, held, width = states.shape
            part = torch.empty(rows, heads, tokens, width, dtype=states.dtype, device=states.device)
            part[:, :, :held] = states
            grown.append(part)
        self._buffers = grown[0], grown[1]
        return self._buffers


def growing_cache(config: Any) -> DynamicCache:
    """Return a model's usual cache with growing layers; sliding windows and other kinds stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class PaddedRows:
    """Rows of one length in the model's own cache, with a copy of the prompt for every response."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        self._model = model
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):  # left-padded, so that all rows end at the same position
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        mask = mask.to(model.device)
        self._cache = growing_cache(model.config)
        logits = model(
            input_ids=input_ids.to(model.device),
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self._cache.batch_repeat_interleave(group)
        self.logits: Tensor = logits.repeat_interleave(group, dim=0)
        self._mask = mask.repeat_interleave(group, dim=0)

    def forward(self, token_ids: Tensor) -> None:
        """Append one token per row and compute the next logits."""
        self._mask = pad(self._mask, (0, 1), value=1)
        self.logits = self._model(
            input_ids=token_ids.unsqueeze(-1),
            attention_mask=self._mask,
            position_ids=self._mask.sum(dim=-1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]


def decodes_in_step(model: Any) -> bool:
    """Return whether the model computes the same with padded prompts and a cache as without.

    A trial finds out, once a model. A state of recurrent or convolution layers would take up the padding.
    """
    if model not in _DECODES:
        _DECODES[model] = supports_packing(model) or (
            not keeps_state(model.config) and _same_when_padded(model)
        )
    return _DECODES[model]


@torch.no_grad()
def _same_when_padded(model: Any) -> bool:
    try:
        rows = PaddedRows(model, [tokens[:cut] for tokens, cut in _TRIAL], 1)
        found = [rows.logits]
        for step in range(2):
            rows.forward(torch.tensor([tokens[cut + step] for tokens, cut in _TRIAL], device=model.device))
            found.append(rows.logits)
        for row, (tokens, cut) in enumerate(_TRIAL):
            ids = torch.tensor([tokens], device=model.device)
            expected = model(input_ids=ids, use_cache=False).logits[0, cut - 1 :].float()
            gap = (torch.stack([logits[row] for logits in found]).float() - expected).abs().mean()
            if not bool(gap <= logit_tolerance(model.dtype) * expected.std()):
                return False
    except Exception as error:  # a model's code may raise anything
        if is_out_of_memory(error):
            raise  # this is no property of the model
        return False
    return True


def can_share_prompts(model: Any) -> bool:
    """Return whether all layers have full attention that may be computed in parts: in float32 only.

    In 16 bits a matrix product rounds the scores before the softmax; fused kernels do not.
    """
    if model.dtype != torch.float32 or not supports_slots(model):
        return False
    return set(attention_windows(model.config.get_text_config()) or ()) == {NO_WINDOW}


class SharedPromptRows:
    """Rows of one group side by side: they share the prompt's keys and values and add their own."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        self._model = model
        tokens, positions, segments = whole_sequences(prompts, model.device)
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        prefilled = PrefilledPrompts(model.config, segments, len(tokens), like)
        last = segments.query_starts[1:].long() - 1
        with packed_sequences(model):
            inputs = model_inputs(tokens, positions, segments, slots=prefilled)
            logits = model(**inputs, logits_to_keep=last).logits[0]
        self.logits: Tensor = logits.repeat_interleave(group, dim=0)
        lengths = [len(prompt) for prompt in prompts]
        self._group = group
        self._positions = (last - segments.query_starts[:-1]).repeat_interleave(group)  # of the last token
        self._prompts = [_padded(states, lengths) for states in prefilled.states]
        self._padding_mask = _padding(lengths, model.device)
        self._own = [GrowingLayer() for _ in self._prompts]

    def forward(self, token_ids: Tensor) -> None:
        """Append one token per row and compute the next logits."""
        self._positions = self._positions + 1
        with packed_sequences(self._model):
            self.logits = self._model(**model_inputs(token_ids, self._positions, slots=self)).logits[0]

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows. Groups then differ in size, so that each row becomes its own group."""
        prompts = rows // self._group
        self._prompts = [states[:, prompts] for states in self._prompts]
        self._padding_mask = None if self._padding_mask is None else self._padding_mask[prompts]
        self._positions = self._positions[rows]
        self._group = 1
        for layer in self._own:
            if layer.is_initialized:
                layer.batch_select_indices(rows)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """Return attention of one token per row over prompt and own tokens, (rows, heads, D)."""
        rows, heads, width = query.shape
        key_heads = key.shape[1]
        keys, values = self._own[layer].update(key.unsqueeze(2), value.unsqueeze(2))
        prompt_keys, prompt_values = self._prompts[layer]
        prompt_length = prompt_keys.shape[2]
        scaled = (query * scale).view(rows, key_heads, heads // key_heads, width)
        prompt_scores = self._as_groups(scaled) @ prompt_keys.transpose(2, 3)
        if self._padding_mask is not None:
            prompt_scores = prompt_scores.masked_fill(self._padding_mask[:, None, None], -torch.inf)
        scores = torch.cat([self._as_rows(prompt_scores), scaled @ keys.transpose(2, 3)], dim=-1)
        weights = scores.softmax(dim=-1)
        from_prompt = self._as_rows(self._as_groups(weights[..., :prompt_length]) @ prompt_values)
        return (from_prompt + weights[..., prompt_length:] @ values).reshape(rows, heads, width)

    def _as_groups(self, states: Tensor) -> Tensor:
        """Reshape (rows, key heads, queries, ...) to (prompts, key heads, queries of all its rows, ...)."""
        return states.view(-1, self._group, *states.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _as_rows(self, states: Tensor) -> Tensor:
        """Undo :meth:`_as_groups`."""
        prompts, heads, queries, width = states.shape
        by_row = states.view(prompts, heads, self._group, queries // self._group, width)
        return by_row.transpose(1, 2).flatten(0, 1)


def _padded(states: Tensor, lengths: Sequence[int]) -> Tensor:
    """Reshape (2, all tokens, heads, D) to (2, prompts, heads, longest, D), zeros behind shorter ones."""
    each = states.transpose(0, 1).split_with_sizes(list(lengths))
    return pad_sequence(list(each), batch_first=True).permute(2, 0, 3, 1, 4).contiguous()


def _padding(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """Return a mask that is true behind a prompt's end, (prompts, longest); None without padding."""
    if len(set(lengths)) == 1:
        return None
    positions = torch.arange(max(lengths), device=device)
    return positions >= torch.tensor(lengths, device=device).unsqueeze(1)


class RunningRows(Protocol):
    """The model's state for the running responses."""

    logits: Tensor  # (rows, vocabulary) of the next token

    def forward(self, token_ids: Tensor) -> None:
        """Append one token per row and compute the next logits."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        ...


class BatchDecoding:
    """The state of a batch: its running rows, and the tokens that every response has sampled.

    ``rows`` maps the rows of the model's state to rows of the batch.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        shares = group > 1 and can_share_prompts(model)
        kind: Any = SharedPromptRows if shares else PaddedRows
        self._model_rows: RunningRows = kind(model, prompts, group)
        self.rows = torch.arange(len(prompts) * group, device=model.device)
        self.running = torch.ones(len(self.rows), dtype=torch.bool, device=model.device)
        self._tokens: list[tuple[Tensor, Tensor, Tensor]] = []  # per step: batch rows, ids, log-probabilities
        self._size = len(self.rows)

    @property
    def logits(self) -> Tensor:
        """Logits of the next token, (rows, vocabulary)."""
        return self._model_rows.logits

    @property
    def all_stopped(self) -> bool:
        """Whether every response has finished."""
        return not bool(self.running.any())

    def append(self, token_ids: Tensor, logprobs: Tensor, stopped: Tensor) -> None:
        """Record one token for each row that was running."""
        alive = self.running
        self._tokens.append((self.rows[alive], token_ids[alive], logprobs[alive]))
        self.running = alive & ~stopped

    def forward(self, token_ids: Tensor) -> None:
        """Compute the next logits. Drop finished rows once they are half of all."""
        if int(self.running.sum()) * 2 <= len(self.running):
            keep = self.running.nonzero().squeeze(-1)
            self._model_rows.keep(keep)
            self.rows, self.running, token_ids = self.rows[keep], self.running[keep], token_ids[keep]
        self._model_rows.forward(token_ids)

    def responses(self) -> list[tuple[list[int], list[float]]]:
        """Return token ids and log-probabilities of every response, in order."""
        responses: list[tuple[list[int], list[float]]] = [([], []) for _ in range(self._size)]
        for rows, token_ids, logprobs in self._tokens:
            for row, token, logprob in zip(rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True):
                responses[row][0].append(token)
                responses[row][1].append(logprob)
        return responses
