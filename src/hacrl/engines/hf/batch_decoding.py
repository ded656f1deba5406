"""A dynamic cache with room to spare: a new token is written behind the others, which are not copied.

Responses in rows of one length, prompts padded at the left: what every model with a cache can do.

Responses in step whose prompts are computed and kept once for all responses to them.

A processor that decodes waits for memory: with 8 responses to a prompt as long as they become, attention has
half as much to read, and matrices instead of vectors to multiply it with. No masks are made, and no padding
is computed but in attention, where prompts are of different lengths.

A batch of responses being decoded in step with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hacrl.engines.hf.slot_cache import PrefilledPrompts, can_have_slots
from hacrl.errors import ModelError
from hacrl.models.packing import model_inputs, whole_sequences
from hacrl.models.packing_support import NO_WINDOW, attention_windows, packed_sequences

LEAST_ROOM, SHARE = 16, 16  # tokens there is room for each time it runs out, or that part of those held
# Little: a row's room lies behind its tokens, and processors fetch memory ahead of where they read.


class RoomyLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """Keys and values are the beginning of larger tensors."""

    _room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append; the same numbers as appending by copying."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        held, more = self.keys.shape[-2], key_states.shape[-2]
        room = self._room
        if room is None or room[0].shape[0] != len(self.keys) or room[0].shape[-2] < held + more:
            room = self._make_room(held + more + max(LEAST_ROOM, held // SHARE))
        for part, states in zip(room, (key_states, value_states), strict=True):
            part[:, :, held : held + more] = states
        self.keys, self.values = (part[:, :, : held + more] for part in room)
        return self.keys, self.values

    def _make_room(self, tokens: int) -> tuple[Tensor, Tensor]:
        made = []
        for states in (self.keys, self.values):
            rows, heads, held, width = states.shape
            part = torch.empty(rows, heads, tokens, width, dtype=states.dtype, device=states.device)
            part[:, :, :held] = states
            made.append(part)
        self._room = made[0], made[1]
        return self._room


def roomy_cache(config: Any) -> DynamicCache:
    """A model's usual cache; layers that are not plain ones, e.g. sliding windows, stay what they are."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class PaddedRows:
    """The model's own cache, with a copy of its prompt for every response."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        self._model = model
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):  # left-padded, so that all rows end at the same position
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        mask = mask.to(model.device)
        self._cache = roomy_cache(model.config)
        logits = model(
            input_ids=input_ids.to(model.device),
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        try:
            self._cache.batch_repeat_interleave(group)
        except AttributeError as error:  # state-space layers
            raise ModelError(
                f"{type(model).__name__} keeps a state that cannot be copied per response; "
                "the transformers engine needs a model with an attention cache"
            ) from error
        self.logits: Tensor = logits.repeat_interleave(group, dim=0)
        self._mask = mask.repeat_interleave(group, dim=0)

    def forward(self, token_ids: Tensor) -> None:
        """See :class:`Rows`."""
        self._mask = pad(self._mask, (0, 1), value=1)
        self.logits = self._model(
            input_ids=token_ids.unsqueeze(-1),
            attention_mask=self._mask,
            position_ids=self._mask.sum(dim=-1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        """See :class:`Rows`."""
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]


def can_be_grouped(model: Any) -> bool:
    """Whether attention of all layers is plain, sees everything, and is exact if it is computed in parts.

    In 16 bits, scores of a matrix product are rounded before they are weights; fused kernels do not do that.
    """
    if model.dtype != torch.float32 or not can_have_slots(model):
        return False
    return set(attention_windows(model.config.get_text_config()) or ()) == {NO_WINDOW}


class GroupedRows:
    """Rows of one group beside each other; behind a prompt every row has keys and values of its own."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        self._model = model
        tokens, positions, segments = whole_sequences(prompts, model.device)
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        computed = PrefilledPrompts(model.config, segments, len(tokens), like)
        last = segments.query_starts[1:].long() - 1
        with packed_sequences(model):
            inputs = model_inputs(tokens, positions, segments, slots=computed)
            logits = model(**inputs, logits_to_keep=last).logits[0]
        self.logits: Tensor = logits.repeat_interleave(group, dim=0)
        lengths = [len(prompt) for prompt in prompts]
        self._group = group
        self._positions = (last - segments.query_starts[:-1]).repeat_interleave(group)  # of the last token
        self._prompts = [_padded(states, lengths) for states in computed.states]
        self._unseen = _padding(lengths, model.device)
        self._own = [RoomyLayer() for _ in self._prompts]

    def forward(self, token_ids: Tensor) -> None:
        """See :class:`Rows`."""
        self._positions = self._positions + 1
        with packed_sequences(self._model):
            self.logits = self._model(**model_inputs(token_ids, self._positions, slots=self)).logits[0]

    def keep(self, rows: Tensor) -> None:
        """See :class:`Rows`. Groups are of different sizes then: each row is one."""
        prompts = rows // self._group
        self._prompts = [states[:, prompts] for states in self._prompts]
        self._unseen = None if self._unseen is None else self._unseen[prompts]
        self._positions = self._positions[rows]
        self._group = 1
        for layer in self._own:
            if layer.is_initialized:
                layer.batch_select_indices(rows)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """See :class:`hacrl.models.attention.packed.CacheSlots`; (N, heads, D), a token for each row."""
        rows, heads, width = query.shape
        key_heads = key.shape[1]
        keys, values = self._own[layer].update(key.unsqueeze(2), value.unsqueeze(2))
        prompt_keys, prompt_values = self._prompts[layer]
        before = prompt_keys.shape[2]
        asked = (query * scale).view(rows, key_heads, heads // key_heads, width)
        of_prompts = self._as_groups(asked) @ prompt_keys.transpose(2, 3)
        if self._unseen is not None:
            of_prompts = of_prompts.masked_fill(self._unseen[:, None, None], -torch.inf)
        scores = torch.cat([self._as_rows(of_prompts), asked @ keys.transpose(2, 3)], dim=-1)
        weights = scores.softmax(dim=-1)
        from_prompts = self._as_rows(self._as_groups(weights[..., :before]) @ prompt_values)
        return (from_prompts + weights[..., before:] @ values).reshape(rows, heads, width)

    def _as_groups(self, states: Tensor) -> Tensor:
        """(rows, heads of keys, queries, ...) -> (prompts, heads of keys, queries of all its rows, ...)."""
        return states.view(-1, self._group, *states.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _as_rows(self, states: Tensor) -> Tensor:
        """And back."""
        prompts, heads, queries, width = states.shape
        by_row = states.view(prompts, heads, self._group, queries // self._group, width)
        return by_row.transpose(1, 2).flatten(0, 1)


def _padded(states: Tensor, lengths: Sequence[int]) -> Tensor:
    """(2, all tokens, heads, D) -> (2, prompts, heads, most tokens, D), zeros behind shorter ones."""
    each = states.transpose(0, 1).split_with_sizes(list(lengths))
    return pad_sequence(list(each), batch_first=True).permute(2, 0, 3, 1, 4).contiguous()


def _padding(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """What is no token of a prompt, (prompts, most tokens); None if all are."""
    if len(set(lengths)) == 1:
        return None
    places = torch.arange(max(lengths), device=device)
    return places >= torch.tensor(lengths, device=device).unsqueeze(1)


class Rows(Protocol):
    """What has been computed of the responses that are still running."""

    logits: Tensor  # (rows, vocabulary) of the next token

    def forward(self, token_ids: Tensor) -> None:
        """Go on with one token for each row."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Forget all others."""
        ...


class Decoding:
    """State of a batch under way: the rows still running, and what every response has said.

    ``rows`` maps the running rows to their place in the batch that was asked for.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        shares = group > 1 and can_be_grouped(model)
        kind: Any = GroupedRows if shares else PaddedRows
        self._computed: Rows = kind(model, prompts, group)
        self.rows = torch.arange(len(prompts) * group, device=model.device)
        self.running = torch.ones(len(self.rows), dtype=torch.bool, device=model.device)
        self._tokens: list[tuple[Tensor, Tensor, Tensor]] = []  # per step: batch rows, ids, log-probabilities
        self._size = len(self.rows)

    @property
    def logits(self) -> Tensor:
        """Of the next token of every row."""
        return self._computed.logits

    @property
    def all_stopped(self) -> bool:
        """Whether every response has ended."""
        return not bool(self.running.any())

    def append(self, token_ids: Tensor, logprobs: Tensor, stopped: Tensor) -> None:
        """Record one token for each row that was still running."""
        alive = self.running
        self._tokens.append((self.rows[alive], token_ids[alive], logprobs[alive]))
        self.running = alive & ~stopped

    def forward(self, token_ids: Tensor) -> None:
        """Logits of the next token for the rows still running."""
        if int(self.running.sum()) * 2 <= len(self.running):
            keep = self.running.nonzero().squeeze(-1)
            self._computed.keep(keep)
            self.rows, self.running, token_ids = self.rows[keep], self.running[keep], token_ids[keep]
        self._computed.forward(token_ids)

    def responses(self) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probabilities of every row asked for, in order."""
        said: list[tuple[list[int], list[float]]] = [([], []) for _ in range(self._size)]
        for rows, token_ids, logprobs in self._tokens:
            for row, token, logprob in zip(rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True):
                said[row][0].append(token)
                said[row][1].append(logprob)
        return said
