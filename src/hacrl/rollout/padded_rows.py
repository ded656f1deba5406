"""Responses in rows of one length, prompts padded at the left: what every model with a cache can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hacrl.errors import ModelError
from hacrl.rollout.roomy_cache import roomy_cache


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
        """See :class:`hacrl.rollout.decoding.Rows`."""
        self._mask = pad(self._mask, (0, 1), value=1)
        self.logits = self._model(
            input_ids=token_ids.unsqueeze(-1),
            attention_mask=self._mask,
            position_ids=self._mask.sum(dim=-1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]

    def keep(self, rows: Tensor) -> None:
        """See :class:`hacrl.rollout.decoding.Rows`."""
        self._cache.batch_select_indices(rows)
        self._mask = self._mask[rows]
