"""Responses in step whose prompts are computed and kept once for all responses to them.

A processor that decodes waits for memory: with 8 responses to a prompt as long as they become, attention has
half as much to read, and matrices instead of vectors to multiply it with. No masks are made, and no padding
is computed but in attention, where prompts are of different lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hacrl.agents.packing import model_inputs, whole_sequences
from hacrl.agents.ragged import EVERYTHING, ragged, windows_of_layers
from hacrl.rollout.roomy_cache import RoomyLayer
from hacrl.rollout.slots import PrefilledPrompts, can_have_slots


def can_be_grouped(model: Any) -> bool:
    """Whether attention of all layers is plain, sees everything, and is exact if it is computed in parts.

    In 16 bits, scores of a matrix product are rounded before they are weights; fused kernels do not do that.
    """
    if model.dtype != torch.float32 or not can_have_slots(model):
        return False
    return set(windows_of_layers(model.config.get_text_config()) or ()) == {EVERYTHING}


class GroupedRows:
    """Rows of one group beside each other; behind a prompt every row has keys and values of its own."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        self._model = model
        tokens, positions, segments = whole_sequences(prompts, model.device)
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        computed = PrefilledPrompts(model.config, segments, len(tokens), like)
        last = segments.queries[1:].long() - 1
        with ragged(model):
            inputs = model_inputs(tokens, positions, segments, slots=computed)
            logits = model(**inputs, logits_to_keep=last).logits[0]
        self.logits: Tensor = logits.repeat_interleave(group, dim=0)
        lengths = [len(prompt) for prompt in prompts]
        self._group = group
        self._positions = (last - segments.queries[:-1]).repeat_interleave(group)  # of the last token
        self._prompts = [_padded(states, lengths) for states in computed.states]
        self._unseen = _padding(lengths, model.device)
        self._own = [RoomyLayer() for _ in self._prompts]

    def forward(self, token_ids: Tensor) -> None:
        """See :class:`hacrl.rollout.decoding.Rows`."""
        self._positions = self._positions + 1
        with ragged(self._model):
            self.logits = self._model(**model_inputs(token_ids, self._positions, slots=self)).logits[0]

    def keep(self, rows: Tensor) -> None:
        """See :class:`hacrl.rollout.decoding.Rows`. Groups are of different sizes then: each row is one."""
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
        """See :class:`hacrl.agents.attention.Slots`; (N, heads, D), a token for each row."""
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
