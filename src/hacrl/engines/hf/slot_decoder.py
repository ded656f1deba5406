"""Decode one token for every running response, each at its own position; on a GPU with CUDA graphs.

A decoder layer is dozens of small kernels, which a GPU runs faster than Python can launch them. A CUDA graph
is recorded once per batch size and replayed with a single launch. A graph stores addresses: the decoder
allocates all that it reads and writes once, and records graphs anew if the model's weights have moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hacrl.engines.hf.slot_cache import DecodedTokens, SlotCache
from hacrl.models.compile import compiled
from hacrl.models.device import HostCopy, copy_to_device, is_out_of_memory
from hacrl.models.keyed_noise import token_keys
from hacrl.models.packing import model_inputs
from hacrl.models.packing_support import packed_sequences
from hacrl.models.sampling import draw
from hacrl.types import Sampling, VersionSpans

LARGE_BATCH = 64  # up to here batch sizes are powers of two; above, there are four per doubling
MAX_OVERSIZE = 1.25  # a cache up to this many times the needed size is used again


class CannotRecord(Exception):  # noqa: N818 - the caller decodes without graphs
    """The model does what a CUDA graph cannot hold."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled token ids and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]
    versions: VersionSpans = ()  # which policy sampled how many; empty where the weights never change


@dataclass(frozen=True, slots=True)
class PromptStates:
    """Keys and values of a prompt but its last token: a slice of what one prefill computed."""

    states: Tensor  # (layers, 2, tokens, heads, D)
    start: int
    tokens: int
    number: int  # equal prompts have equal numbers


@dataclass(frozen=True, slots=True)
class Group:
    """Responses to one prompt that start together, one per slot."""

    prompt: PromptStates
    last_token: int
    slots: list[int]
    limits: list[int]  # most new tokens, per slot
    seeds: list[int]  # of the draws, per slot; 0 where the decoder's generator draws
    sampled: list[int]  # tokens that the response had before an interruption, per slot


@dataclass(frozen=True, slots=True)
class Status:
    """Per slot whether it was running, and the last tokens that it had sampled."""

    alive: list[bool]
    is_broken: bool  # a number was not finite
    tails: list[list[int]]  # empty if nobody asked for them


class PendingStatus:
    """Which slots were running after some step, on its way from the device."""

    def __init__(self, flags: Tensor, *tails_and_lengths: Tensor) -> None:
        self._download = HostCopy(flags, *tails_and_lengths)

    def read(self) -> Status:
        """Wait; return what was running."""
        (*alive, is_broken), *rest = (part.tolist() for part in self._download.wait())
        kept = [tail[max(0, len(tail) - length) :] for tail, length in zip(*rest, strict=True)]
        return Status(alive, is_broken, kept)


class PendingTokens:
    """The tokens that some slots had sampled, on their way from the device."""

    def __init__(self, counts: Tensor, token_ids: Tensor, logprobs: Tensor) -> None:
        self._download = HostCopy(counts, token_ids, logprobs)

    def read(self) -> list[SampledTokens]:
        """Wait; return the tokens of each slot."""
        return [
            SampledTokens(token_ids[:count], logprobs[:count])
            for count, token_ids, logprobs in zip(
                *(part.tolist() for part in self._download.wait()), strict=True
            )
        ]


class SlotDecoder:
    """A cache and, for every slot, the state of its response. The last slot only pads batches.

    ``is_keyed``: a response's draws depend on its own seed alone, not on its slot and the other responses.
    """

    def __init__(
        self,
        model: Any,
        slots: int,
        length: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
        compiles: bool = False,
        is_keyed: bool = False,
    ) -> None:
        device = model.device
        self.compiles = compiles  # whether layers are compiled; becomes False if that fails
        self.compile_error = ""
        self.requested_slots = slots  # may exceed the cache's, which memory limits
        self.active_slots = slots  # used now; may be fewer than the cache's. Draws depend on it
        self.model = model
        self.sampling = sampling
        self.cache = SlotCache(model.config, slots, length, model.dtype, device)
        self.generator = torch.Generator(device=device)
        self.is_keyed = is_keyed
        self._stop_ids = torch.tensor(sorted(stop_ids), device=device)
        rows = slots + 1
        # slots of the present batch, then the padding slot
        self._rows = torch.full((slots,), self.cache.padding_slot, device=device)
        self._token = torch.zeros(rows, dtype=torch.long, device=device)  # last one, not in the cache yet
        self._position = torch.zeros(rows, dtype=torch.long, device=device)  # of that token
        self._prompt_length = torch.zeros(rows, dtype=torch.long, device=device)  # without the last token
        self._alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self._num_sampled = torch.zeros(rows, dtype=torch.long, device=device)
        self._limit = torch.zeros(rows, dtype=torch.long, device=device)
        self._seed = torch.zeros(rows, dtype=torch.long, device=device)
        self._sampled_before = torch.zeros(rows, dtype=torch.long, device=device)
        # the extra column takes what finished rows sample before a check frees their slot
        shape = (rows, sampling.max_new_tokens + 1)
        self._sampled_ids = torch.zeros(shape, dtype=torch.long, device=device)
        self._sampled_logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._is_broken = torch.zeros(1, dtype=torch.bool, device=device)  # a number was not finite
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._addresses = self._weight_addresses()
        self._pool: Any = None

    def can_serve(self, slots: int, length: int) -> bool:
        """Return whether the decoder is large enough, and not much larger than needed."""
        cache = self.cache
        fits_length = length <= cache.length <= MAX_OVERSIZE * length
        return fits_length and slots <= self.requested_slots <= MAX_OVERSIZE * slots

    def admit(self, groups: Sequence[Group]) -> None:
        """Start responses whose prompts come from one prefill.

        Decoding starts with the last token of the prompt, so that the first new token is drawn as all
        others are.
        """
        started = [
            (slot, group.prompt.start, group.prompt.tokens, group.last_token, *own)
            for group in groups
            for slot, *own in zip(group.slots, group.limits, group.seeds, group.sampled, strict=True)
        ]
        slots, starts, counts, last, limits, seeds, sampled = copy_to_device(
            torch.tensor(started), self._token.device
        ).unbind(1)
        self.cache.set_prompts({slot: group.prompt.number for group in groups for slot in group.slots})
        tokens = sum(count for _, _, count, *_ in started)
        self.cache.write_prompts(groups[0].prompt.states, slots, starts, counts, tokens)
        self._token[slots] = last
        self._prompt_length[slots] = counts
        self._position[slots] = counts
        self._limit[slots] = limits
        self._seed[slots] = seeds
        self._sampled_before[slots] = sampled
        self._num_sampled.index_fill_(0, slots, 0)  # assigning a number would wait for the device
        self._alive.index_fill_(0, slots, True)

    def select(self, slots: Sequence[int]) -> int:
        """Choose the slots of the next steps; return the size of their padded batch."""
        size = self._batch_size(len(slots))
        rows = [*slots, *[self.cache.padding_slot] * (len(self._rows) - len(slots))]
        self._rows.copy_(copy_to_device(rows, self._rows.device))
        return size

    def step(self, size: int) -> None:
        """Decode one token for each of the first ``size`` selected rows."""
        if self._rows.is_cuda:
            if size not in self._graphs:
                self._record(size)
            self._graphs[size].replay()
        else:
            self._decode(size)

    @property
    def checks_in_flight(self) -> int:
        """How many status reads may be outstanding while more is decoded: none without a GPU."""
        return 1 if self._rows.is_cuda else 0

    def status(self, tail: int = 0) -> PendingStatus:
        """Start to copy from the device which slots run after the steps so far.

        ``tail``: how many of the last tokens of each slot to copy.
        """
        flags = torch.cat([self._alive, self._is_broken])
        if not tail:
            return PendingStatus(flags)
        width = min(tail, self.sampling.max_new_tokens)
        columns = self._num_sampled.unsqueeze(1) - torch.arange(width, 0, -1, device=flags.device)
        return PendingStatus(flags, self._sampled_ids.gather(1, columns.clamp(min=0)), self._num_sampled)

    def sampled_counts(self) -> list[int]:
        """Wait for the device; return how many tokens the response in each slot has sampled."""
        counts: list[int] = self._num_sampled.tolist()
        return counts

    def fetch(self, slots: Sequence[int]) -> PendingTokens:
        """Start to copy what the slots have sampled; new responses may take the slots at once."""
        rows = copy_to_device(slots, self._rows.device)
        return PendingTokens(self._num_sampled[rows], self._sampled_ids[rows], self._sampled_logprobs[rows])

    def reset(self, seed: int) -> None:
        """Stop all responses and seed the draws. Drop the graphs if weights have moved."""
        self._alive.fill_(False)
        self._is_broken.fill_(False)
        self.cache.clear_prompts()
        self.generator.manual_seed(seed)
        if self._weight_addresses() != self._addresses:
            self._graphs.clear()
            self._pool = None
            self._addresses = self._weight_addresses()

    def _batch_size(self, running: int) -> int:
        """Round up to one of few sizes, so that few graphs are recorded."""
        size = 1 << (running - 1).bit_length()
        if size > LARGE_BATCH:
            quarter = size // 8  # of the last doubling
            size = -(-running // quarter) * quarter
        return min(size, self.active_slots)

    def _weight_addresses(self) -> int:
        return hash(tuple(parameter.data_ptr() for parameter in self.model.parameters()))

    def _record(self, size: int) -> None:
        """Record a step over the padding slot, which changes no response and no later draw."""
        rows, state = self._rows.clone(), self.generator.get_state()
        self._rows.fill_(self.cache.padding_slot)
        stream = _recording_stream(self._rows.device)
        stream.wait_stream(torch.cuda.current_stream(self._rows.device))
        with torch.cuda.stream(stream):
            self._warm_up(size)  # libraries choose their kernels in the first run
        torch.cuda.current_stream(self._rows.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            # thread_local: a learner in another thread may allocate memory while this one records
            stream = _capturing_stream(self._rows.device)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self._decode(size)
        except RuntimeError as error:  # e.g. experts chosen by values on the host
            if is_out_of_memory(error):
                raise
            raise CannotRecord(str(error).strip().splitlines()[0]) from error
        self._pool = self._pool or graph.pool()
        self._graphs[size] = graph
        self._rows.copy_(rows)
        self.generator.set_state(state)

    def _warm_up(self, size: int) -> None:
        """Run a first step; if the layers cannot be compiled, run it without compiling."""
        try:
            self._decode(size)
        except Exception as error:
            if not self.compiles or is_out_of_memory(error):
                raise
            self.compiles, self.compile_error = False, f"{type(error).__name__}: {str(error).strip()[:200]}"
            self._decode(size)

    def _decode(self, size: int) -> None:
        rows = self._rows[:size]
        positions, prompts, alive = self._position[rows], self._prompt_length[rows], self._alive[rows]
        with packed_sequences(self.model), compiled(self.model, self.compiles):
            tokens = DecodedTokens(self.cache, rows, positions, prompts)
            logits = self.model(**model_inputs(self._token[rows], positions, slots=tokens)).logits[0]
            keys = self._keys(rows) if self.is_keyed else None
            token_ids, logprobs = draw(logits, self.sampling, self.generator, keys)
        columns = torch.where(alive, self._num_sampled[rows], self.sampling.max_new_tokens)
        self._sampled_ids[rows, columns] = token_ids
        self._sampled_logprobs[rows, columns] = logprobs
        counts = self._num_sampled[rows] + alive
        finished = (token_ids.unsqueeze(1) == self._stop_ids).any(dim=1) | (counts >= self._limit[rows])
        self._num_sampled[rows] = counts
        self._token[rows] = token_ids
        self._alive[rows] = alive & ~finished
        # a finished row writes behind its prompt, which other slots may read
        self._position[rows] = torch.where(alive & ~finished, positions + 1, prompts)
        self._is_broken |= (alive & ~logprobs.isfinite()).any()

    def _keys(self, rows: Tensor) -> Tensor:
        return token_keys(self._seed[rows], self._sampled_before[rows] + self._num_sampled[rows])


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all warm-ups: libraries keep memory for every stream that they see."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all recordings: torch's own is on the GPU that recorded first."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
