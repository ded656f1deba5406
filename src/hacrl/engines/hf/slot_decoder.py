"""One token more for every running response, each at its own position; on a GPU as one recorded graph.

A decoder layer is dozens of small kernels, which a GPU runs faster than Python can launch them. A CUDA graph
is recorded once for each size of batch and replayed with a single launch. It remembers addresses: all that it
reads and writes is allocated once, here, and it is recorded anew if the model's weights have moved.
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
from hacrl.models.packing import model_inputs
from hacrl.models.packing_support import packed_sequences
from hacrl.models.sampling import draw
from hacrl.types import Sampling

FINE = 64  # batches above this size come in four sizes for every doubling
SPARE = 1.25  # how much larger than needed a cache may be to be used once more


class CannotRecord(Exception):  # noqa: N818 - the caller knows another way
    """The model does what a graph cannot hold."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a response consists of."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptStates:
    """Keys and values of a prompt, all but its last token: a stretch of what was computed together."""

    states: Tensor  # (layers, 2, tokens, heads, D)
    start: int
    tokens: int
    number: int  # equal prompts have equal ones


@dataclass(frozen=True, slots=True)
class Group:
    """Responses to one prompt that begin together."""

    prompt: PromptStates
    last_token: int
    slots: list[int]
    limits: list[int]  # most new tokens of each


class Look:
    """Who was running at a moment; the answer is on its way."""

    def __init__(self, flags: Tensor) -> None:
        self._flags = HostCopy(flags)

    def seen(self) -> tuple[list[bool], bool]:
        """Per slot whether it was running, and whether a number was not finite. Waits for the answer."""
        (flags,) = self._flags.wait()
        *alive, broken = flags.tolist()
        return alive, broken


class Quotes:
    """What responses had said at a moment; the words are on their way."""

    def __init__(self, counts: Tensor, token_ids: Tensor, logprobs: Tensor) -> None:
        self._words = HostCopy(counts, token_ids, logprobs)

    def read(self) -> list[Said]:
        """Of each. Waits for the words."""
        return [
            Said(token_ids[:count], logprobs[:count])
            for count, token_ids, logprobs in zip(
                *(part.tolist() for part in self._words.wait()), strict=True
            )
        ]


class SlotDecoder:
    """The cache and, for every slot, what its response has said so far. The last slot is nobody's."""

    def __init__(
        self,
        model: Any,
        slots: int,
        length: int,
        sampling: Sampling,
        stop_ids: Sequence[int],
        compiles: bool = False,
    ) -> None:
        device = model.device
        self.compiles = compiles  # layers are compiled; False if it turns out that they cannot be
        self.problem = ""  # why not
        self.wanted = slots  # more than there are, if there was no memory for more
        self.in_use = slots  # fewer than there are, if it was made for more: draws depend on it
        self.model = model
        self.sampling = sampling
        self.cache = SlotCache(model.config, slots, length, model.dtype, device)
        self.generator = torch.Generator(device=device)
        self._stop_ids = torch.tensor(sorted(stop_ids), device=device)
        rows = slots + 1
        self._rows = torch.full((slots,), self.cache.nobody, device=device)  # slots at work, then nobody's
        self._token = torch.zeros(rows, dtype=torch.long, device=device)  # the last one, not in the cache yet
        self._position = torch.zeros(rows, dtype=torch.long, device=device)  # of that token
        self._prompt = torch.zeros(rows, dtype=torch.long, device=device)  # tokens, all but the last one
        self._alive = torch.zeros(rows, dtype=torch.bool, device=device)
        self._count = torch.zeros(rows, dtype=torch.long, device=device)
        self._limit = torch.zeros(rows, dtype=torch.long, device=device)
        # one column more, for what rows say that have ended without anybody having looked yet
        said = (rows, sampling.max_new_tokens + 1)
        self._said_ids = torch.zeros(said, dtype=torch.long, device=device)
        self._said_logprobs = torch.zeros(said, dtype=torch.float32, device=device)
        self._broken = torch.zeros(1, dtype=torch.bool, device=device)  # a number was not finite
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._addresses = self._weight_addresses()
        self._pool: Any = None

    def will_do(self, slots: int, length: int) -> bool:
        """Whether it can be used for this work and would not be much larger than needed."""
        cache = self.cache
        return length <= cache.length <= SPARE * length and slots <= self.wanted <= SPARE * slots

    def admit(self, groups: Sequence[Group]) -> None:
        """Begin responses, to prompts that were computed together.

        The last token of a prompt is the first that is decoded: so the first new token is drawn as all
        others are.
        """
        begun = [
            (slot, group.prompt.start, group.prompt.tokens, group.last_token, limit)
            for group in groups
            for slot, limit in zip(group.slots, group.limits, strict=True)
        ]
        slots, starts, counts, last, limits = copy_to_device(torch.tensor(begun), self._token.device).unbind(
            1
        )
        self.cache.share({slot: group.prompt.number for group in groups for slot in group.slots})
        tokens = sum(one[2] for one in begun)
        self.cache.fill(groups[0].prompt.states, slots, starts, counts, tokens)
        self._token[slots] = last
        self._prompt[slots] = counts
        self._position[slots] = counts
        self._limit[slots] = limits
        self._count.index_fill_(0, slots, 0)  # to assign a plain number would wait for the device
        self._alive.index_fill_(0, slots, True)

    def work_on(self, slots: Sequence[int]) -> int:
        """Say which slots the next steps are for; returns the size of the batch that will be computed."""
        size = self._batch_size(len(slots))
        rows = [*slots, *[self.cache.nobody] * (len(self._rows) - len(slots))]
        self._rows.copy_(copy_to_device(rows, self._rows.device))
        return size

    def step(self, size: int) -> None:
        """One token for each of the first ``size`` rows."""
        if self._rows.is_cuda:
            if size not in self._graphs:
                self._record(size)
            self._graphs[size].replay()
        else:
            self._decode(size)

    @property
    def looks_behind(self) -> int:
        """How many looks may be outstanding while more is computed: none where computing is not beside us."""
        return 1 if self._rows.is_cuda else 0

    def look(self) -> Look:
        """Ask which slots are still running, and whether a number was not finite, after the steps so far."""
        return Look(torch.cat([self._alive, self._broken]))

    def said(self, slots: Sequence[int]) -> Quotes:
        """Ask what has been said in these slots; others may begin there at once."""
        places = copy_to_device(slots, self._rows.device)
        return Quotes(self._count[places], self._said_ids[places], self._said_logprobs[places])

    def reset(self, seed: int) -> None:
        """Nobody is running, and draws begin anew."""
        self._alive.fill_(False)
        self._broken.fill_(False)
        self.cache.forget()
        self.generator.manual_seed(seed)
        if self._weight_addresses() != self._addresses:
            self._graphs.clear()
            self._pool = None
            self._addresses = self._weight_addresses()

    def _batch_size(self, running: int) -> int:
        """A little more than are running, or everybody: few sizes, so few graphs are recorded."""
        size = 1 << (running - 1).bit_length()
        if size > FINE:
            quarter = size // 8  # of the doubling
            size = -(-running // quarter) * quarter
        return min(size, self.in_use)

    def _weight_addresses(self) -> int:
        return hash(tuple(parameter.data_ptr() for parameter in self.model.parameters()))

    def _record(self, size: int) -> None:
        """Record a step, made for nobody so that it changes nothing; draws go on as if it had not been."""
        rows, state = self._rows.clone(), self.generator.get_state()
        self._rows.fill_(self.cache.nobody)
        stream = _recording_stream(self._rows.device)
        stream.wait_stream(torch.cuda.current_stream(self._rows.device))
        with torch.cuda.stream(stream):
            self._try(size)  # libraries choose and set up their kernels the first time
        torch.cuda.current_stream(self._rows.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=_capturing_stream(self._rows.device)):
                self._decode(size)
        except RuntimeError as error:  # e.g. experts that are chosen by looking at numbers
            if is_out_of_memory(error):
                raise
            raise CannotRecord(str(error).strip().splitlines()[0]) from error
        self._pool = self._pool or graph.pool()
        self._graphs[size] = graph
        self._rows.copy_(rows)
        self.generator.set_state(state)

    def _try(self, size: int) -> None:
        """A first step; what cannot be compiled is done without."""
        try:
            self._decode(size)
        except Exception as error:
            if not self.compiles or is_out_of_memory(error):
                raise
            self.compiles, self.problem = False, f"{type(error).__name__}: {str(error).strip()[:200]}"
            self._decode(size)

    def _decode(self, size: int) -> None:
        rows = self._rows[:size]
        positions, prompts, alive = self._position[rows], self._prompt[rows], self._alive[rows]
        with packed_sequences(self.model), compiled(self.model, self.compiles):
            tokens = DecodedTokens(self.cache, rows, positions, prompts)
            logits = self.model(**model_inputs(self._token[rows], positions, slots=tokens)).logits[0]
            token_ids, logprobs = draw(logits, self.sampling, self.generator)
        columns = torch.where(alive, self._count[rows], self.sampling.max_new_tokens)
        self._said_ids[rows, columns] = token_ids
        self._said_logprobs[rows, columns] = logprobs
        counts = self._count[rows] + alive
        ended = (token_ids.unsqueeze(1) == self._stop_ids).any(dim=1) | (counts >= self._limit[rows])
        self._count[rows] = counts
        self._token[rows] = token_ids
        self._alive[rows] = alive & ~ended
        # whoever has ended goes on behind its prompt, which others may be reading
        self._position[rows] = torch.where(alive & ~ended, positions + 1, prompts)
        self._broken |= (alive & ~logprobs.isfinite()).any()


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries take memory for every stream that they see, and keep it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _capturing_stream(device: torch.device) -> torch.cuda.Stream:
    """Torch's own is on the GPU of whoever recorded first."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
