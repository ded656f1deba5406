"""Continuous batching: a response that has ended makes room for one that waits.

Prompts are computed once for all responses to them, many at a time; a response begins by copying its prompt's
keys and values into a free slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hacrl.engines.hf.slot_cache import PrefilledPrompts
from hacrl.engines.hf.slot_decoder import Group, Look, PromptStates, Quotes, Said, SlotDecoder
from hacrl.models.compile import compiled
from hacrl.models.device import free_failed_attempt, is_out_of_memory
from hacrl.models.footprint import PREFILL_TOKENS
from hacrl.models.packing import model_inputs, whole_sequences
from hacrl.models.packing_support import packed_sequences

STEPS_BETWEEN_LOOKS = 4  # looking at who has ended waits for the device


@dataclass(frozen=True, slots=True)
class Request:
    """One response to come."""

    place: int  # in the list that was asked for
    prompt: tuple[int, ...]  # with what has been said already, if an attempt was broken off
    limit: int  # most new tokens, of those still to come


Ended = tuple[Request, Said]


class Asked:
    """Responses to come. One that was broken off goes on from what it has said."""

    def __init__(self, prompts: Sequence[tuple[int, ...]], group: int, most_new_tokens: int) -> None:
        self._requests = {
            place: Request(place, prompts[place // group], most_new_tokens)
            for place in range(len(prompts) * group)
        }
        self._said: dict[int, Said] = {}

    @property
    def missing(self) -> list[Request]:
        """Those that have not ended, in order."""
        return list(self._requests.values())

    def end(self, request: Request, said: Said) -> Said:
        """A response has ended; returns all that it has said."""
        del self._requests[request.place]
        return self._in_all(request, said)

    def go_on(self, under_way: Sequence[Ended]) -> None:
        """These were broken off."""
        for request, said in under_way:
            self._said[request.place] = self._in_all(request, said)
            left = request.limit - len(said.token_ids)
            self._requests[request.place] = Request(request.place, (*request.prompt, *said.token_ids), left)

    def _in_all(self, request: Request, said: Said) -> Said:
        before = self._said.get(request.place, Said([], []))
        return Said([*before.token_ids, *said.token_ids], [*before.logprobs, *said.logprobs])


class NotFinite(Exception):  # noqa: N818 - the caller knows what to say of it
    """The model gave numbers from which nothing can be drawn."""


class BrokenOff(Exception):  # noqa: N818 - the caller goes on
    """Memory ran out. What responses under way have said so far must not be drawn again.

    Those that have ended are kept: if the others had another chance to end soon, all would be too short.
    """

    def __init__(self, under_way: Sequence[Ended]) -> None:
        super().__init__()
        self.under_way = under_way


class Prompts:
    """Keys and values of prompts that are about to be answered, computed when the first of them is needed."""

    def __init__(self, model: Any, prompts: Sequence[tuple[int, ...]], compiles: bool = False) -> None:
        self._model = model
        self._compiles = compiles
        self._ahead = deque(prompt for prompt, _ in groupby(prompts))  # in the order of answering
        self._numbers = {prompt: number for number, prompt in enumerate(self._ahead)}
        self._states: dict[tuple[int, ...], PromptStates] = {}

    def are_there(self, prompt: tuple[int, ...]) -> bool:
        """Whether the prompt need not be computed, and no older ones forgotten."""
        return prompt in self._states

    def states(self, prompt: tuple[int, ...]) -> PromptStates:
        """Of all tokens but the last. Older prompts are forgotten if this one has to be computed."""
        if prompt not in self._states:
            while self._ahead[0] != prompt:  # equal to one that was there when it was asked for
                self._ahead.popleft()
            self._states.clear()
            self._compute()
        return self._states[prompt]

    def _compute(self) -> None:
        """The next prompts, as many as go together."""
        batch: list[tuple[int, ...]] = []
        taken = 0
        while self._ahead and (not batch or taken + len(self._ahead[0]) <= PREFILL_TOKENS):
            batch.append(self._ahead.popleft())
            taken += len(batch[-1])
        heads = [prompt[:-1] for prompt in batch if len(prompt) > 1]
        tokens, positions, segments = whole_sequences(heads or [batch[0]], self._model.device)
        like = torch.empty(0, dtype=self._model.dtype, device=self._model.device)
        kept = PrefilledPrompts(self._model.config, segments, len(tokens), like)
        with packed_sequences(self._model), compiled(self._model, self._compiles):
            self._model(**model_inputs(tokens, positions, segments, slots=kept), logits_to_keep=1)
        start = 0
        for prompt in batch:
            self._states[prompt] = PromptStates(kept.states, start, len(prompt) - 1, self._numbers[prompt])
            start += len(prompt) - 1


class _Running:
    """Which slot has which response, and how many tokens it may still say for all that is known here."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self._since: dict[int, int] = {}  # steps made when the response began
        self.steps = 0  # made in all

    def begin(self, together: Iterable[tuple[int, Request]]) -> None:
        """Responses that begin with the next step."""
        for slot, request in together:
            self.requests[slot] = request
            self._since[slot] = self.steps

    def ended(self, alive: Sequence[bool], steps: int) -> list[int]:
        """Slots that have ended, by what was seen after so many steps; later ones were not there yet."""
        return [slot for slot in self.requests if not alive[slot] and self._since[slot] < steps]

    @property
    def most_left(self) -> int:
        """Tokens that the longest response may still say."""
        left = [request.limit + self._since[slot] for slot, request in self.requests.items()]
        return max(left, default=self.steps) - self.steps


def decode_all(
    decoder: SlotDecoder, requests: Sequence[Request], seed: int, on_ended: Callable[[Sequence[Ended]], None]
) -> None:
    """Answer all requests, in their order as slots become free; ``on_ended`` hears of them as they end."""
    decoder.reset(seed)
    answering = _Answering(decoder, requests, on_ended)
    try:
        answering.answer_all()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        free_failed_attempt(
            error, decoder.model.device
        )  # to look at what has been said takes a little memory
        raise BrokenOff(answering.leave_off()) from error


class _Answering:
    """Requests on their way: who waits, who runs in which slot, and who has ended without being told of."""

    def __init__(
        self,
        decoder: SlotDecoder,
        requests: Sequence[Request],
        on_ended: Callable[[Sequence[Ended]], None],
    ) -> None:
        self._decoder = decoder
        self._on_ended = on_ended
        self._waiting = deque(requests)
        self._prompts = Prompts(decoder.model, [request.prompt for request in requests], decoder.compiles)
        self._free = list(range(decoder.in_use))
        self._running = _Running()
        self._looks: deque[tuple[int, Look]] = deque()  # steps made before, and what will be seen
        self._ended: list[tuple[list[Request], Quotes]] = []

    def answer_all(self) -> None:
        """Until nobody waits or runs.

        A GPU is given its next steps before anybody looks at the last ones, so that it never waits; what is
        done with ended responses is done while it works on the others.
        """
        decoder, running, looks = self._decoder, self._running, self._looks
        while running.requests or self._waiting:
            if self._free and self._waiting:
                running.begin(self._admit())
            if running.most_left > 0:
                size = decoder.work_on(sorted(running.requests))
                for _ in range(min(STEPS_BETWEEN_LOOKS, running.most_left)):
                    decoder.step(size)
                    running.steps += 1
                looks.append((running.steps, decoder.look()))
                if len(looks) <= decoder.looks_behind:
                    continue
            self._tell()
            steps, look = looks.popleft()
            alive, broken = look.seen()
            if broken:
                raise NotFinite
            self._end(running.ended(alive, steps))
        self._tell()

    def leave_off(self) -> list[Ended]:
        """Tell of all that have ended, and return what the others have said so far."""
        alive, _ = self._decoder.look().seen()
        self._end([slot for slot in self._running.requests if not alive[slot]])
        self._tell()
        slots = list(self._running.requests)
        said = self._decoder.said(slots).read() if slots else []
        return list(zip(self._running.requests.values(), said, strict=True))

    def _end(self, slots: Sequence[int]) -> None:
        """Their slots are free; what they said is read when the device has its next steps."""
        if slots:
            said = self._decoder.said(slots)
            self._ended.append(([self._running.requests.pop(slot) for slot in slots], said))
            self._free = sorted([*self._free, *slots])

    def _tell(self) -> None:
        while self._ended:
            requests, said = self._ended.pop(0)
            self._on_ended(list(zip(requests, said.read(), strict=True)))

    def _admit(self) -> list[tuple[int, Request]]:
        """Fill free slots, in one go what was computed together; returns who is where."""
        free, waiting = self._free, self._waiting
        admitted: list[tuple[int, Request]] = []
        groups: list[Group] = []
        while free and waiting:
            prompt = waiting[0].prompt
            if groups and not self._prompts.are_there(prompt):
                self._decoder.admit(groups)
                groups = []  # before the next are computed, or there would be memory for both
            together: list[tuple[int, Request]] = []
            while free and waiting and waiting[0].prompt == prompt:
                together.append((free.pop(0), waiting.popleft()))
            slots, limits = [slot for slot, _ in together], [request.limit for _, request in together]
            groups.append(Group(self._prompts.states(prompt), prompt[-1], slots, limits))
            admitted += together
        self._decoder.admit(groups)
        return admitted
