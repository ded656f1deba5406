"""A dynamic cache with room to spare: a new token is written behind the others, which are not copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

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
