"""Sample from vLLM: bring it the policy's weights, prove that they arrived, and start it again if it dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hacrl.config.schema import VllmSettings
from hacrl.engines.base import GenerationRequest, OnFinished, Policy, Sample, SyncReport
from hacrl.engines.sync_check import Proof
from hacrl.engines.vllm.backend import (
    Ask,
    Backend,
    Ended,
    EngineError,
    EngineLostError,
    OtherPolicyError,
)
from hacrl.engines.vllm.start_lock import Starts
from hacrl.engines.vllm.weight_transfer import Transport, exported_weights, make_transport
from hacrl.errors import TrainingError
from hacrl.models.device import current_device
from hacrl.models.lora import is_adapted
from hacrl.seeding import derive_seed

_STARTS = Starts()
_COPYING = threading.Lock()  # of weights, which takes as much memory as they do


class VllmEngine:
    """Keeps an engine at the agent's policy, asks it, and brings it back if it dies."""

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        settings: VllmSettings,
        probes: Sequence[tuple[int, ...]],  # prompts of the responses that prove a weight update
        same_host: bool = True,
        learner_host: str = "127.0.0.1",  # where the engine's machine reaches this one
        before_start: Callable[[], None] = lambda: None,  # whatever can be done before its turn
        starts_alone: bool = True,  # it measures how much memory is free
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.restarts = 0
        self._notes: list[str] = []
        self._settings = settings
        self._probes = list(probes)
        self._same_host = same_host
        self._learner_host = learner_host
        self._before_start = before_start
        self._starts_alone = starts_alone
        self._transport: Transport | None = None
        self._is_started = False
        self._is_asleep = False
        self._is_closed = False
        self._version: int | None = None  # of the policy that it is at
        self._report: SyncReport | None = None  # how it got there, once that is proven
        self._max_length: int | None = None  # most tokens of a prompt and its response, as the engine says

    @property
    def shares_weights(self) -> bool:
        """Return False: weights are sent to the engine."""
        return False

    @property
    def runs_concurrently(self) -> bool:
        """Return False if the engine sleeps on a GPU that it shares."""
        return not self.backend.can_sleep

    def sync(self, proven: bool = True) -> SyncReport | None:
        """Start the engine if necessary and send it the policy's weights if it has others."""
        self._is_closed = False
        self._bring_up()
        _STARTS.wait(self._check_open)
        if proven:
            self._hear([], lambda ended: None)
        return self._report

    def _bring_up(self) -> None:
        if self._version == self.policy.policy_version:
            return
        for attempt in range(self._settings.restarts + 1):
            try:
                if self._is_started:
                    self._check_open()
                    self._synchronise()
                else:
                    self._start()
                return
            except EngineLostError as error:
                self._lost(error, last=attempt == self._settings.restarts)
        raise AssertionError("unreachable")

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """See :class:`hacrl.engines.base.Engine`. What had finished before a crash is kept."""
        # A seeded response must not depend on whether a proof runs beside it.
        self.sync(proven=self._settings.seeded)
        asks = self._asks(request)
        is_greedy = request.sampling.temperature == 0  # then every token has probability 1
        samples: dict[int, Sample] = {}

        def take(ended: Ended) -> None:
            finished = []
            for index, said in ended:
                if not said.token_ids:
                    raise TrainingError(f"{self.backend.name} gave a response without a token")
                logprobs = (0.0,) * len(said.token_ids) if is_greedy else said.logprobs
                finished.append((index, Sample(said.token_ids, logprobs)))
            samples.update(finished)
            if on_finished is not None and finished:
                on_finished(finished)

        self._hear(asks, take)
        return [samples[index] for index in range(request.num_samples)]

    def _hear(self, asks: Sequence[Ask], take: Callable[[Ended], None]) -> None:
        """Whatever is asked for, and a proof if one is due.

        An engine that dies is brought back; one that fails its proof gets the weights once more.
        """
        left = dict(enumerate(asks))
        lost, has_failed = 0, False
        while True:
            try:
                self._bring_up()
                self._hear_once(left, take)
                return
            except EngineLostError as error:
                self._lost(error, last=lost == self._settings.restarts)
                lost += 1
            except OtherPolicyError as error:
                if has_failed:
                    raise
                has_failed = True
                self._notes.append(f"{error}. The weights were brought once more; nothing it said was used")

    def _hear_once(self, left: dict[int, Ask], take: Callable[[Ended], None]) -> None:
        """What was asked for and is left; what is taken is no longer.

        Nothing is taken of an engine that has not proven that it is at the agent's policy.
        """
        proof = None if self._report is not None else Proof(self.policy, self._probes)
        first = [] if proof is None else proof.asks
        places = list(left)
        unproven: Ended = []
        for ended in self.backend.generate([*first, *left.values()]) if first or left else ():
            for position, said in ended:
                if position >= len(first):
                    unproven.append((places[position - len(first)], said))
                elif proof is not None and proof.take(position, said):
                    self._report = self._proven(proof)
            if self._report is not None:
                proven, unproven = unproven, []
                take(proven)
                for place, _ in proven:
                    del left[place]

    def _proven(self, proof: Proof) -> SyncReport:
        assert self._version is not None
        assert self._transport is not None
        version, self._version = self._version, None  # whoever asks again gets weights again, unless ...
        with current_device(self.policy.device):
            gap = proof.gap(self.backend.name, self._settings.max_logprob_gap)
        self._version = version  # ... it is true
        return SyncReport(version, self._transport.name, gap, restarts=self.restarts)

    def take_notes(self) -> list[str]:
        """What happened to the engine since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def state_dict(self) -> dict[str, int]:
        """Nothing: vLLM plans its batches itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Nothing to restore, whichever engine the state is of."""

    def sleep(self) -> None:
        """Give the GPU's memory back; the next :meth:`sync` takes it again and sends the weights."""
        if self._is_started and self.backend.can_sleep and not self._is_asleep:
            try:
                self.backend.sleep()
            except EngineLostError as error:  # it has given everything back
                self._lost(error, last=False)
                return
            self._is_asleep = True
            self._version, self._report = None, None

    def close(self) -> None:
        """End the engine."""
        self._is_closed = True  # at once: whoever waits for it in another thread must not start it again
        if self._transport is not None:
            self._transport.close()
        self.backend.close()
        self._is_started, self._version, self._report, self._transport = False, None, None, None

    def describe(self) -> list[dict[str, Any]]:
        """What the engine's workers say of themselves."""
        described: list[dict[str, Any]] = self.backend.call("hacrl_describe")
        return described

    def _start(self) -> None:
        """And bring the first weights, before another engine starts if this one measures memory."""
        with _STARTS.due():
            self._check_open()
            self._before_start()
            with _STARTS.turn(self._starts_alone), current_device(self.policy.device):
                self._check_open()
                self._have_memory_given_back()
                self.backend.start()
                self._is_started, self._is_asleep = True, False
                self._check_open()
                self._synchronise()

    def _synchronise(self) -> None:
        with current_device(self.policy.device):
            self._bring_weights()
        self._version = self.policy.policy_version

    def _bring_weights(self) -> None:
        self._version, self._report = None, None  # if it breaks off, nobody knows
        if self._is_asleep:
            self._have_memory_given_back()
            self.backend.wake("weights")
        if self._transport is None:
            workers = self.describe()
            check_model(self.policy, self.backend.name, workers)
            self._max_length = min(worker["max_length"] for worker in workers)
            wanted = self._settings.weight_sync
            device = self.policy.device
            self._transport = make_transport(wanted, device, workers, self._same_host, self._learner_host)
        copies = is_adapted(self.policy.model) or self._transport.name == "files"
        with _COPYING if copies else nullcontext():
            self._transport.send(exported_weights(self.policy.model), self.backend)
        if self._is_asleep:
            self.backend.wake("kv_cache")
            self._is_asleep = False
        self.backend.forget_prefixes()

    def _have_memory_given_back(self) -> None:
        """What a learner keeps for later, the engine needs now; as it starts, it measures what is free."""
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        """Another thread may have closed it, meanwhile."""
        if self._is_closed:
            self.close()
            raise EngineError(f"{self.backend.name} was closed")

    def _lost(self, error: EngineLostError, last: bool) -> None:
        """An engine is gone, and with it what it knew."""
        if self._is_closed:  # that is why it is gone
            raise error
        if self._transport is not None:
            self._transport.close()
        self._transport, self._version, self._report = None, None, None
        self._is_started = False
        self.restarts += 1
        if last:
            raise EngineError(
                f"{error} It died {self.restarts} times in this run, {self._settings.restarts} restarts in a "
                f"row are allowed (agents.{self.policy.name}.vllm.restarts)"
            ) from error
        self._notes.append(f"{error} It was started again; finished responses are kept")

    def _asks(self, request: GenerationRequest) -> list[Ask]:
        """Return one request per response, prompt by prompt."""
        request.check_lengths(self.policy.name, self._max_length)  # vLLM would cut responses in silence
        stop_ids = tuple(sorted(request.stop_ids))
        prompts = [prompt for prompt in request.prompts for _ in range(request.samples_per_prompt)]
        return [
            Ask(
                prompt,
                request.sampling,
                stop_ids,
                derive_seed(request.seed, index) if self._settings.seeded else None,
            )
            for index, prompt in enumerate(prompts)
        ]


def check_model(policy: Policy, engine: str, workers: Sequence[dict[str, Any]]) -> None:
    """Refuse an engine that serves a model of another shape than the agent's."""
    config = policy.model.config.get_text_config()
    for worker in workers:
        differing = {
            key: (value, getattr(config, key, None))
            for key, value in worker["model"].items()
            if value is not None and getattr(config, key, value) != value
        }
        if differing:
            shown = "; ".join(
                f"{key} {theirs} instead of {ours}" for key, (theirs, ours) in differing.items()
            )
            raise EngineError(
                f"{engine} serves another model than agent {policy.name!r}: {shown}. Start it with the "
                "agent's model (docs/vllm.md)"
            )
