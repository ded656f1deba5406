"""A batch of responses being decoded in step with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hacrl.rollout.grouped_rows import GroupedRows, can_be_grouped
from hacrl.rollout.padded_rows import PaddedRows


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
