"""Split an evaluation into chunks: a chunk is generated, verified and saved before the next one starts.

Each chunk has its own seed, so an interrupted evaluation continues where it stopped, with the same responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some samples of some problems, which are generated together."""

    positions: tuple[int, ...]  # of the problems in the benchmark
    first_sample: int
    samples: int
    max_new_tokens: int  # 0: the prompt leaves no room for a response; nothing is generated

    @property
    def response_count(self) -> int:
        """Number of responses in the chunk."""
        return len(self.positions) * self.samples

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Problem position and sample number of each response, in the order of generation."""
        samples = range(self.first_sample, self.first_sample + self.samples)
        return [(position, sample) for position in self.positions for sample in samples]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """All chunks of one model on one benchmark, and how the model's context length limits them."""

    chunks: tuple[Chunk, ...]
    max_new_tokens: int  # of all problems except the shortened and the unanswered ones
    shortened: tuple[int, ...]  # positions of long prompts, which leave room for fewer tokens
    unanswered: tuple[int, ...]  # positions of prompts that leave no room

    @property
    def response_count(self) -> int:
        """Number of responses in all chunks."""
        return sum(chunk.response_count for chunk in self.chunks)


def plan_chunks(
    prompt_lengths: Sequence[int], context: int | None, max_new_tokens: int, samples: int, batch: int
) -> ChunkPlan:
    """Split an evaluation into chunks of at most ``batch`` responses.

    All problems get the same number of new tokens: ``max_new_tokens``, or less if the longest prompt of up to
    half the context leaves less. Longer prompts get the rest of the context, one problem a chunk, so that a
    few long prompts do not shorten all responses.
    """
    usual = [length for length in prompt_lengths if context is None or 2 * length <= context]
    budget = max_new_tokens
    if context is not None and usual:
        budget = min(budget, context - max(usual))
    room = [max_new_tokens if context is None else max(0, context - length) for length in prompt_lengths]
    batched = [position for position, tokens in enumerate(room) if tokens >= budget]
    alone = [position for position, tokens in enumerate(room) if tokens < budget]
    group_size = max(1, batch // samples)
    groups = [batched[i : i + group_size] for i in range(0, len(batched), group_size)]
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
