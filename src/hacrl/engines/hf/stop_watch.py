"""End responses that contain a stop string while the others of their batch go on."""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.models.stop_strings import StopStrings


class StopWatch:
    """Remembers the last tokens of each response of a batch, and finds stop strings in them.

    A response that has ended stays ended.
    """

    def __init__(self, stop_strings: StopStrings) -> None:
        self._stop_strings = stop_strings
        self._tails: dict[int, list[int]] = {}  # by row of the batch
        self._lengths: dict[int, int] = {}  # tokens so far, by row
        self.ended_at: dict[int, int] = {}  # tokens of the rows that have ended, by row

    def ended(self, rows: Tensor, token_ids: Tensor, running: Tensor) -> Tensor:
        """Take the next token of every row; return which rows contain a stop string.

        ``rows`` are the rows' numbers in the batch. Rows that no longer run are not looked at.
        """
        numbers = rows.tolist()
        looked_at = []
        for number, token, is_running in zip(numbers, token_ids.tolist(), running.tolist(), strict=True):
            if is_running and number not in self.ended_at:
                tail = self._tails.setdefault(number, [])
                tail.append(token)
                del tail[: -self._stop_strings.window]
                self._lengths[number] = self._lengths.get(number, 0) + 1
                looked_at.append(number)
        found = self._stop_strings.are_in([self._tails[number] for number in looked_at])
        ended = [number for number, is_ended in zip(looked_at, found, strict=True) if is_ended]
        self.ended_at |= {number: self._lengths[number] for number in ended}
        return torch.tensor([number in self.ended_at for number in numbers], device=rows.device)
