"""Continuous batching: a response that ends frees its slot for a waiting one.

The model computes each prompt once for all responses to it, many prompts per forward pass. A response starts
with a copy of its prompt's keys and values in a free slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from hacrl.engines.hf.live_update import LiveUpdate
from hacrl.engines.hf.slot_cache import PrefilledPrompts
from hacrl.engines.hf.slot_decoder import (
    Group,
    PendingStatus,
    PendingTokens,
    PromptStates,
    SampledTokens,
    SlotDecoder,
    Status,
)
from hacrl.models.compile import compiled
from hacrl.models.device import free_failed_attempt, is_out_of_memory
from hacrl.models.footprint import PREFILL_TOKENS
from hacrl.models.packing import model_inputs, whole_sequences
from hacrl.models.packing_support import packed_sequences
from hacrl.models.stop_strings import StopStrings
from hacrl.types import VersionSpans, merged_spans

STEPS_BETWEEN_CHECKS = 4  # a check for finished responses waits for the device


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate."""

    index: int  # in the list of all requests
    prompt: tuple[int, ...]  # and what was sampled before an interruption
    limit: int  # most new tokens still to come
    seed: int = 0  # of its draws, if the decoder is keyed
    sampled: int = 0  # tokens before an interruption


FinishedRequest = tuple[Request, SampledTokens]
OnFinished = Callable[[Sequence[FinishedRequest]], None]


class PendingRequests:
    """The requests without a finished response. An interrupted one continues after its sampled tokens."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        group: int,
        limit: Callable[[int], int],  # most new tokens of a response, by index
        seeds: Sequence[int] | None = None,
    ) -> None:
        self._requests = {
            index: Request(index, prompts[index // group], limit(index), seeds[index] if seeds else 0)
            for index in range(len(prompts) * group)
        }
        self._sampled: dict[int, SampledTokens] = {}  # before interruptions, by index

    @property
    def unfinished(self) -> list[Request]:
        """Requests that have no finished response, in order."""
        return list(self._requests.values())

    def finish(self, request: Request, tokens: SampledTokens) -> SampledTokens:
        """Remove a finished request; return all tokens of its response."""
        del self._requests[request.index]
        return self._whole(request, tokens)

    def interrupt(self, running: Sequence[FinishedRequest]) -> None:
        """Keep what interrupted responses have sampled, and ask for the rest only."""
        for request, tokens in running:
            self._sampled[request.index] = self._whole(request, tokens)
            count = len(tokens.token_ids)
            self._requests[request.index] = replace(
                request,
                prompt=(*request.prompt, *tokens.token_ids),
                limit=request.limit - count,
                sampled=request.sampled + count,
            )

    def _whole(self, request: Request, tokens: SampledTokens) -> SampledTokens:
        earlier = self._sampled.get(request.index, SampledTokens([], []))
        return SampledTokens(
            [*earlier.token_ids, *tokens.token_ids],
            [*earlier.logprobs, *tokens.logprobs],
            merged_spans([*earlier.versions, *tokens.versions]),
        )


class NotFinite(Exception):  # noqa: N818 - the caller makes the message
    """The model's logits are not finite, so nothing can be sampled from them."""


class Interrupted(Exception):  # noqa: N818 - the caller continues
    """Memory ran out. ``running``: unfinished requests and what they have sampled, to be continued from.

    Sampling those tokens again would give each response a second chance to end early, and bias lengths.
    """

    def __init__(self, running: Sequence[FinishedRequest]) -> None:
        super().__init__()
        self.running = running


class Prompts:
    """Keys and values of prompts, computed when the first of a batch of prompts is needed."""

    def __init__(self, model: Any, prompts: Sequence[tuple[int, ...]], compiles: bool = False) -> None:
        self._model = model
        self._compiles = compiles
        self._states: dict[tuple[int, ...], PromptStates] = {}
        self._first_number = 0
        self.restart(prompts)

    def restart(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Forget all prompts and expect these: the model's weights have changed."""
        self._states.clear()
        self._upcoming = deque(prompt for prompt, _ in groupby(prompts))  # in the order of their requests
        # Numbers are never used twice: a new response must not read keys of the old weights.
        self._numbers = {prompt: number for number, prompt in enumerate(self._upcoming, self._first_number)}
        self._first_number += len(self._upcoming)

    def has(self, prompt: tuple[int, ...]) -> bool:
        """Return whether the prompt is computed; if not, :meth:`states` drops the present ones."""
        return prompt in self._states

    def states(self, prompt: tuple[int, ...]) -> PromptStates:
        """Return keys and values of all tokens but the last; compute this and the next prompts if need be."""
        if prompt not in self._states:
            while self._upcoming[0] != prompt:  # a repetition of a prompt that was computed already
                self._upcoming.popleft()
            self._states.clear()
            self._compute()
        return self._states[prompt]

    def _compute(self) -> None:
        """Compute the next prompts in one forward pass of up to ``PREFILL_TOKENS`` tokens."""
        batch: list[tuple[int, ...]] = []
        tokens_in_batch = 0
        while self._upcoming and (not batch or tokens_in_batch + len(self._upcoming[0]) <= PREFILL_TOKENS):
            batch.append(self._upcoming.popleft())
            tokens_in_batch += len(batch[-1])
        heads = [prompt[:-1] for prompt in batch if len(prompt) > 1]
        tokens, positions, segments = whole_sequences(heads or [batch[0]], self._model.device)
        like = torch.empty(0, dtype=self._model.dtype, device=self._model.device)
        prefilled = PrefilledPrompts(self._model.config, segments, len(tokens), like)
        with packed_sequences(self._model), compiled(self._model, self._compiles):
            self._model(**model_inputs(tokens, positions, segments, slots=prefilled), logits_to_keep=1)
        start = 0
        for prompt in batch:
            self._states[prompt] = PromptStates(
                prefilled.states, start, len(prompt) - 1, self._numbers[prompt]
            )
            start += len(prompt) - 1


class _RunningRequests:
    """Which request each slot serves. Finished ones stay until a check has seen that they have ended."""

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}  # by slot
        self._started_at: dict[int, int] = {}  # by slot, in steps
        self.steps = 0  # decoded in all

    def start(self, admitted: Iterable[tuple[int, Request]]) -> None:
        """Add requests, by slot, whose decoding starts with the next step."""
        for slot, request in admitted:
            self.requests[slot] = request
            self._started_at[slot] = self.steps

    def finished_slots(self, alive: Sequence[bool], steps: int) -> list[int]:
        """Return the slots whose response had ended after ``steps`` steps; skip those started later."""
        return [slot for slot in self.requests if not alive[slot] and self._started_at[slot] < steps]

    @property
    def most_remaining(self) -> int:
        """How many more tokens the longest running response may take."""
        ends = [request.limit + self._started_at[slot] for slot, request in self.requests.items()]
        return max(ends, default=self.steps) - self.steps


def decode_all(
    decoder: SlotDecoder,
    requests: Sequence[Request],
    seed: int,
    on_finished: OnFinished,
    live_update: LiveUpdate | None = None,
    stop_strings: StopStrings | None = None,
) -> None:
    """Answer all requests, in their order as slots become free; report responses as they finish.

    Updates of the weights that ``live_update`` announces are made between two steps. A response with a stop
    string ends at the next check, a few tokens after the string.

    Raise :class:`Interrupted` if memory runs out and :class:`NotFinite` if logits are not finite.
    """
    decoder.reset(seed)
    scheduler = _Scheduler(decoder, requests, on_finished, live_update, stop_strings)
    try:
        scheduler.run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        free_failed_attempt(error, decoder.model.device)  # fetching sampled tokens takes a little memory
        raise Interrupted(scheduler.interrupt()) from error


# The spans of a response but its last one, and the version that sampled the rest of its tokens
_Versions = tuple[VersionSpans, int | None]


class _SlotVersions:
    """Which policy version sampled which tokens of the response in each slot."""

    def __init__(self, live_update: LiveUpdate | None) -> None:
        self._live_update = live_update
        self._spans: dict[int, VersionSpans] = {}

    def note(self, counts: dict[int, int]) -> None:
        """Note how many tokens the response in each slot has sampled before the weights change."""
        assert self._live_update is not None
        for slot, count in counts.items():
            spans = self._spans.get(slot, ())
            before = sum(tokens for _, tokens in spans)
            self._spans[slot] = (*spans, (self._live_update.version, count - before))

    def take(self, slot: int) -> _Versions:
        """Return what is known of a slot's response, and forget it."""
        version = None if self._live_update is None else self._live_update.version
        return self._spans.pop(slot, ()), version


def _with_versions(tokens: Sequence[SampledTokens], versions: Sequence[_Versions]) -> list[SampledTokens]:
    return [
        sampled
        if version is None
        else replace(
            sampled,
            versions=merged_spans(
                [*spans, (version, len(sampled.token_ids) - sum(count for _, count in spans))]
            ),
        )
        for sampled, (spans, version) in zip(tokens, versions, strict=True)
    ]


class _Scheduler:
    """The state of :func:`decode_all`: waiting requests, running ones by slot, finished ones to report."""

    def __init__(
        self,
        decoder: SlotDecoder,
        requests: Sequence[Request],
        on_finished: OnFinished,
        live_update: LiveUpdate | None,
        stop_strings: StopStrings | None,
    ) -> None:
        self._decoder = decoder
        self._on_finished = on_finished
        self._live_update = live_update
        self._versions = _SlotVersions(live_update)
        self._stop_strings = stop_strings
        # tokens in which a string may have appeared since the last check
        self._tail = 0 if stop_strings is None else stop_strings.window + STEPS_BETWEEN_CHECKS
        self._waiting = deque(requests)
        self._prompts = Prompts(decoder.model, [request.prompt for request in requests], decoder.compiles)
        self._free = list(range(decoder.active_slots))
        self._running = _RunningRequests()
        self._checks: deque[tuple[int, PendingStatus]] = deque()  # steps decoded before, and the status
        self._finished: list[tuple[list[Request], PendingTokens, list[_Versions]]] = []  # not reported yet

    def run(self) -> None:
        """Decode until no request waits or runs.

        A GPU gets its next steps before the status of the last ones is read, so that it never waits. The
        caller handles finished responses while the GPU decodes the others.
        """
        decoder, running, checks = self._decoder, self._running, self._checks
        while running.requests or self._waiting:
            self._let_weights_change()
            if self._free and self._waiting:
                running.start(self._admit())
            if running.most_remaining > 0:
                size = decoder.select(sorted(running.requests))
                for _ in range(min(STEPS_BETWEEN_CHECKS, running.most_remaining)):
                    decoder.step(size)
                    running.steps += 1
                checks.append((running.steps, decoder.status(self._tail)))
                if len(checks) <= decoder.checks_in_flight:
                    continue
            self._report()
            steps, status = checks.popleft()
            found = status.read()
            if found.is_broken:
                raise NotFinite
            self._release(running.finished_slots(self._alive(found), steps))
        self._report()

    def _alive(self, status: Status) -> list[bool]:
        """Return per slot whether its response goes on: neither ended nor with a stop string."""
        alive = list(status.alive)
        if self._stop_strings is not None:
            slots = [slot for slot in self._running.requests if alive[slot]]
            found = self._stop_strings.are_in([status.tails[slot] for slot in slots])
            for slot, has_stop_string in zip(slots, found, strict=True):
                alive[slot] = not has_stop_string
        return alive

    def interrupt(self) -> list[FinishedRequest]:
        """Report all finished responses; return the unfinished requests with what they have sampled."""
        alive = self._alive(self._decoder.status(self._tail).read())
        self._release([slot for slot in self._running.requests if not alive[slot]])
        self._report()
        slots = list(self._running.requests)
        tokens = self._decoder.fetch(slots).read() if slots else []
        versions = [self._versions.take(slot) for slot in slots]
        return list(zip(self._running.requests.values(), _with_versions(tokens, versions), strict=True))

    def _let_weights_change(self) -> None:
        """Let an announced update be made; note which tokens were sampled before."""
        if self._live_update is None:
            return
        self._live_update.count_step()
        if not self._live_update.is_announced:
            return
        counts = self._decoder.sampled_counts()
        self._versions.note({slot: counts[slot] for slot in self._running.requests})
        self._live_update.end_of_token()
        self._prompts.restart([request.prompt for request in self._waiting])

    def _release(self, slots: Sequence[int]) -> None:
        """Free the slots; their tokens are read once the device has its next steps."""
        if slots:
            tokens = self._decoder.fetch(slots)
            requests = [self._running.requests.pop(slot) for slot in slots]
            self._finished.append((requests, tokens, [self._versions.take(slot) for slot in slots]))
            self._free = sorted([*self._free, *slots])

    def _report(self) -> None:
        while self._finished:
            requests, tokens, versions = self._finished.pop(0)
            self._on_finished(list(zip(requests, _with_versions(tokens.read(), versions), strict=True)))

    def _admit(self) -> list[tuple[int, Request]]:
        """Fill free slots, all prompts of one prefill at a time; return the new requests by slot."""
        free, waiting = self._free, self._waiting
        admitted: list[tuple[int, Request]] = []
        groups: list[Group] = []
        while free and waiting:
            prompt = waiting[0].prompt
            if groups and not self._prompts.has(prompt):
                self._decoder.admit(groups)
                groups = []  # drop their states first: there may be no memory for two prefills
            same_prompt: list[tuple[int, Request]] = []
            while free and waiting and waiting[0].prompt == prompt:
                same_prompt.append((free.pop(0), waiting.popleft()))
            requests = [request for _, request in same_prompt]
            groups.append(
                Group(
                    self._prompts.states(prompt),
                    prompt[-1],
                    slots=[slot for slot, _ in same_prompt],
                    limits=[request.limit for request in requests],
                    seeds=[request.seed for request in requests],
                    sampled=[request.sampled for request in requests],
                )
            )
            admitted += same_prompt
        self._decoder.admit(groups)
        return admitted
