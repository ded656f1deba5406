"""An evaluation cut into pieces: each is asked, judged and written down before the next is begun.

A piece has its own seed, so an interrupted evaluation goes on where it stopped, to the same responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some problems, and some of their samples, that are decoded together."""

    positions: tuple[int, ...]  # of the problems, in the order of the evaluation
    first_sample: int
    samples: int
    max_new_tokens: int  # 0: the prompt leaves no room for a response; nothing is asked

    @property
    def responses(self) -> int:
        """How many responses the chunk has."""
        return len(self.positions) * self.samples

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Problem position and sample of each response, in the order they are generated."""
        samples = range(self.first_sample, self.first_sample + self.samples)
        return [(position, sample) for position in self.positions for sample in samples]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All chunks of one agent on one benchmark, and what its context length did to them."""

    chunks: tuple[Chunk, ...]
    max_new_tokens: int  # of all problems but the shortened and the unanswered
    shortened: tuple[int, ...]  # positions of long prompts that leave less room
    unanswered: tuple[int, ...]  # positions of prompts that leave none

    @property
    def responses(self) -> int:
        """How many responses there will be."""
        return sum(chunk.responses for chunk in self.chunks)


def plan_chunks(
    prompt_lengths: Sequence[int], context: int | None, max_new_tokens: int, samples: int, batch: int
) -> ChunkPlan:
    """Cut an evaluation into chunks of at most ``batch`` responses.

    All problems get the same number of new tokens: what was asked for, or what the longest prompt of up to
    half the context leaves. Longer prompts get what is left of the context, one at a time, so that a few
    of them do not shorten everybody's responses.
    """
    usual = [length for length in prompt_lengths if context is None or 2 * length <= context]
    budget = max_new_tokens
    if context is not None and usual:
        budget = min(budget, context - max(usual))
    room = [max_new_tokens if context is None else max(0, context - length) for length in prompt_lengths]
    together = [position for position, left in enumerate(room) if left >= budget]
    alone = [position for position, left in enumerate(room) if left < budget]
    at_once = max(1, batch // samples)
    groups = [together[i : i + at_once] for i in range(0, len(together), at_once)]
    chunks = [
        Chunk(tuple(group), first, min(batch, samples - first), new_tokens)
        for group, new_tokens in [(g, budget) for g in groups] + [([p], room[p]) for p in alone]
        for first in range(0, samples, batch)
    ]
    return ChunkPlan(
        tuple(chunks),
        budget,
        shortened=tuple(position for position in alone if room[position]),
        unanswered=tuple(position for position in alone if not room[position]),
    )
