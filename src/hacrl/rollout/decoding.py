"""A batch of responses being decoded in step with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hacrl.errors import ModelError
from hacrl.rollout.roomy_cache import roomy_cache


class Decoding:
    """State of a batch under way: the cache of the rows still running, and what every row has said.

    ``rows`` maps the running rows to their place in the batch that was asked for.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        self.model = model
        device = model.device
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):  # left-padded, so that all rows end at the same position
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        mask = mask.to(device)
        self.cache = roomy_cache(model.config)
        logits = model(
            input_ids=input_ids.to(device),
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        try:
            self.cache.batch_repeat_interleave(group)
        except AttributeError as error:  # state-space layers
            raise ModelError(
                f"{type(model).__name__} keeps a state that cannot be copied per response; "
                "the transformers engine needs a model with an attention cache"
            ) from error
        self.logits: Tensor = logits.repeat_interleave(group, dim=0)
        self.mask = mask.repeat_interleave(group, dim=0)
        self.rows = torch.arange(len(prompts) * group, device=device)
        self.running = torch.ones(len(self.rows), dtype=torch.bool, device=device)
        self._tokens: list[tuple[Tensor, Tensor, Tensor]] = []  # per step: batch rows, ids, log-probabilities
        self._size = len(self.rows)

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
            token_ids = self._drop_ended_rows(token_ids)
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.logits = self.model(
            input_ids=token_ids.unsqueeze(-1),
            attention_mask=self.mask,
            position_ids=self.mask.sum(dim=-1, keepdim=True) - 1,
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]

    def _drop_ended_rows(self, token_ids: Tensor) -> Tensor:
        keep = self.running.nonzero().squeeze(-1)
        self.cache.batch_select_indices(keep)
        self.mask, self.rows, self.running = self.mask[keep], self.rows[keep], self.running[keep]
        return token_ids[keep]

    def responses(self) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probabilities of every row asked for, in order."""
        said: list[tuple[list[int], list[float]]] = [([], []) for _ in range(self._size)]
        for rows, token_ids, logprobs in self._tokens:
            for row, token, logprob in zip(rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True):
                said[row][0].append(token)
                said[row][1].append(logprob)
        return said
