"""Sample from vLLM: send it the policy's weights, prove that they arrived, and restart it if it dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hacrl.config.schema import VllmSettings
from hacrl.engines.base import GenerationRequest, OnFinished, Policy, Sample, SyncReport
from hacrl.engines.sync_check import EngineError, PolicyMismatchError, SyncCheck
from hacrl.engines.vllm.backend import Backend, EngineLostError, IndexedSamples, Request
from hacrl.engines.vllm.start_lock import StartLock
from hacrl.engines.vllm.weight_transfer import (
    Transport,
    exported_weights,
    make_transport,
    weights_device,
)
from hacrl.errors import TrainingError
from hacrl.models.device import current_device
from hacrl.models.lora import is_adapted

_START_LOCK = StartLock()
_COPY_LOCK = threading.Lock()  # a copy of an agent's weights takes as much memory as the weights

MAX_RESTARTS = 3  # of an engine that died, in a row


class VllmEngine:
    """Keeps a vLLM engine at a policy, samples from it, and restarts it if it dies."""

    shares_weights = False

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        settings: VllmSettings,
        probes: Sequence[tuple[int, ...]],  # prompts of the samples that prove a weight update
        same_host: bool = True,
        learner_host: str = "127.0.0.1",  # where the engine's machine reaches this one
        before_start: Callable[[], None] = lambda: None,  # what can be prepared while other engines start
        starts_alone: bool = True,  # the engine measures the free memory when it starts
        sending: AbstractContextManager[object] | None = None,  # shared by the engines of one agent
    ) -> None:
        self.policy = policy
        self.follows_policy = True
        self.backend = backend
        self.restarts = 0
        self._notes: list[str] = []
        self._settings = settings
        self._probes = list(probes)
        self._same_host = same_host
        self._learner_host = learner_host
        self._before_start = before_start
        self.starts_alone = starts_alone
        self._transport: Transport | None = None
        self._is_started = False
        self._is_asleep = False
        self._is_closed = False
        self._version: int | None = None  # the policy version whose weights were sent
        self._report: SyncReport | None = None  # set when these weights are proven to have arrived
        self._has_old_cache = False  # keys and values of older weights, which salted requests do not see
        self._max_length: int | None = None  # tokens of a prompt with its response, as the engine reports
        # Engines of one agent read its weights in turns: ranks gather them together, and copies take memory.
        self._sending = sending or nullcontext()
        self.restarts_in_generation = True  # False: others take over, and the next sync() starts it again
        self._starts = 0
        self._losing = threading.Lock()  # two threads notice the death of an engine with live updates

    @property
    def runs_concurrently(self) -> bool:
        """Return False if the engine sleeps on a GPU that it shares."""
        return not self.backend.can_sleep

    @property
    def updates_while_generating(self) -> bool:
        """Return whether running requests can be paused while weights are sent."""
        return self.backend.updates_while_generating

    @property
    def is_started(self) -> bool:
        """Whether the engine was started, and has not died as far as known."""
        return self._is_started

    @property
    def version(self) -> int | None:
        """The policy version whose weights the engine got; None: unknown."""
        return self._version

    @property
    def max_length(self) -> int | None:
        """Tokens of a prompt with its response, as the engine reports; None: it has not yet."""
        return self._max_length

    def sync(self, proven: bool = True) -> SyncReport | None:
        """Start the engine if necessary and send it the policy's weights if it has others."""
        self._is_closed = False
        self._start_or_send_weights()
        _START_LOCK.wait_for_all(self._check_open)
        if proven:
            self._run([], lambda samples: None)
        return self._report

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """See :class:`hacrl.engines.base.Engine`. What had finished before a crash is kept."""
        if self.follows_policy or not self._is_started:
            # A seeded response must not depend on whether a proof runs beside it.
            self.sync(proven=self._settings.seeded or not self.follows_policy)
        requests = self._requests(request)
        is_greedy = request.sampling.temperature == 0  # then every token has probability 1
        samples: dict[int, Sample] = {}

        def take(finished: IndexedSamples) -> None:
            if not all(sample.token_ids for _, sample in finished):
                raise TrainingError(f"{self.backend.name} gave a response without a token")
            if is_greedy:
                finished = [
                    (index, replace(sample, logprobs=(0.0,) * len(sample.token_ids)))
                    for index, sample in finished
                ]
            samples.update(finished)
            if on_finished is not None and finished:
                on_finished(finished)

        if self.follows_policy:
            self._run(requests, take)
        else:
            self._run_live(requests, take)
        return [samples[index] for index in range(request.num_samples)]

    def _start_or_send_weights(self) -> None:
        """Start the engine, or send it weights if the policy was updated; restart it if it dies meanwhile."""
        if self._version == self.policy.policy_version:
            return
        for attempt in range(MAX_RESTARTS + 1):
            used = self._starts if self._is_started else None
            try:
                if self._is_started:
                    self._check_open()
                    self._send_weights()
                else:
                    self._start()
                return
            except EngineLostError as error:
                self._forget_lost_engine(error, used, is_last=attempt == MAX_RESTARTS)
        raise AssertionError("unreachable")

    def _run(self, requests: Sequence[Request], take: Callable[[IndexedSamples], None]) -> None:
        """Serve all requests, and a sync check if one is due.

        An engine that dies is restarted. An engine that fails its check gets the weights once more.
        """
        unserved = dict(enumerate(requests))
        crashes, has_failed_check = 0, False
        while True:
            self._start_or_send_weights()
            used = self._starts
            try:
                self._run_once(unserved, take)
                return
            except EngineLostError as error:
                others_go_on = bool(requests) and not self.restarts_in_generation
                self._forget_lost_engine(error, used, crashes == MAX_RESTARTS, others_go_on)
                crashes += 1
                if others_go_on:
                    raise
            except PolicyMismatchError as error:
                if has_failed_check:
                    raise
                has_failed_check = True
                self._notes.append(f"{error}. The weights were sent once more; none of its samples was used")

    def _run_live(self, requests: Sequence[Request], take: Callable[[IndexedSamples], None]) -> None:
        """Serve all requests with the weights that :meth:`sync` sent last, while the policy is trained.

        The learner's weights must not be read here, so an engine that dies is not started again.
        """
        used = self._starts
        try:
            for finished in self.backend.generate_live(requests, self._settings.max_sequences):
                take(finished)
        except EngineLostError as error:
            if not self.restarts_in_generation:
                self._forget_lost_engine(error, used, is_last=False, others_go_on=True)
                raise
            raise EngineError(
                f"{error} Its agent is being trained, so its weights could not be sent to a new engine: "
                "hacrl resume goes on from the last checkpoint"
            ) from error

    def _run_once(self, unserved: dict[int, Request], take: Callable[[IndexedSamples], None]) -> None:
        """Serve requests until all are served, and remove each from ``unserved`` when it is.

        Samples are held back until the engine has passed its sync check.
        """
        check = None if self._report is not None else SyncCheck(self.policy, self._probes)
        probes = [] if check is None else self._probe_requests(check)
        indices = list(unserved)
        held_back: IndexedSamples = []
        if not probes and not unserved:
            return
        for finished in self._responses([*probes, *unserved.values()]):
            for position, sample in finished:
                if position >= len(probes):
                    held_back.append((indices[position - len(probes)], sample))
                elif check is not None and check.add(position, sample):
                    self._report = self._pass_check(check)
            if self._report is not None:
                samples, held_back = held_back, []
                take(samples)
                for index, _ in samples:
                    del unserved[index]

    def _responses(self, requests: Sequence[Request]) -> Iterator[IndexedSamples]:
        """Yield responses to all requests as they finish, none of them from keys of older weights."""
        if self._is_live:
            return self.backend.generate_live(requests, len(requests))
        if self._has_old_cache:
            self.backend.reset_prefix_cache()
            self._has_old_cache = False
        return self.backend.generate(requests)

    def _probe_requests(self, check: SyncCheck) -> list[Request]:
        """Return the check's requests, shortened to the engine's context: servers refuse longer ones."""
        stop_ids, limit = tuple(sorted(self.policy.stop_ids)), check.sampling.max_new_tokens
        requests = []
        for prompt in check.prompts:
            fitting = limit if self._max_length is None else max(1, self._max_length - len(prompt))
            sampling = replace(check.sampling, max_new_tokens=min(limit, fitting))
            requests.append(Request(prompt, sampling, stop_ids, seed=None))
        return requests

    def _pass_check(self, check: SyncCheck) -> SyncReport:
        """Return the report of a passed check. After a failed one, the weights count as not sent."""
        assert self._version is not None
        assert self._transport is not None
        version, self._version = self._version, None
        with current_device(self.policy.device), self._sending:
            gap = check.gap(self.backend.name, self._settings.max_logprob_gap)
        self._version = version
        return SyncReport(version, self._transport.name, gap, restarts=self.restarts)

    def take_notes(self) -> list[str]:
        """Return what happened to the engine since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def state_dict(self) -> dict[str, int]:
        """Return nothing: vLLM plans its batches itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Do nothing: there is nothing to restore."""

    def sleep(self) -> None:
        """Give the GPU's memory back; the next :meth:`sync` takes it again and sends the weights."""
        if self._is_started and self.backend.can_sleep and not self._is_asleep:
            try:
                self.backend.sleep()
            except EngineLostError as error:  # its memory is free, too
                self._forget_lost_engine(error, self._starts, is_last=False)
                return
            self._is_asleep = True
            self._version, self._report = None, None

    def close(self) -> None:
        """End the engine."""
        self._is_closed = True  # first: another thread that waits for the engine must not start it again
        if self._transport is not None:
            self._transport.close()
        self.backend.close()
        self._is_started, self._version, self._report, self._transport = False, None, None, None

    def describe(self) -> list[dict[str, Any]]:
        """Return what each of the engine's workers reports: model, device, largest context."""
        described: list[dict[str, Any]] = self.backend.call("hacrl_describe")
        return described

    def _start(self) -> None:
        """Start the engine and send the first weights, before an engine that measures memory starts."""
        with _START_LOCK.announce():
            self._check_open()
            self._before_start()
            with _START_LOCK.hold(self.starts_alone), current_device(self.policy.device):
                self._check_open()
                self._free_cached_memory()
                self.backend.start()
                self._is_started, self._is_asleep = True, False
                self._starts += 1
                self._check_open()
                self._send_weights()

    def _send_weights(self) -> None:
        """Send the policy's weights; wake the engine around this if it sleeps."""
        self._version, self._report = None, None  # unknown if the transfer breaks off
        with current_device(self.policy.device):
            if self._is_asleep:
                self._free_cached_memory()
                self.backend.wake("weights")
            if self._transport is None:
                self._transport = self._connect()
            copies = is_adapted(self.policy.model) or self._transport.name == "files"
            with self._paused() if self._is_live else nullcontext():
                with _COPY_LOCK if copies else nullcontext(), self._sending:
                    self._transport.send(exported_weights(self.policy.model), self.backend)
                if self._is_live:
                    self.backend.set_version(self.policy.policy_version)
            if self._is_asleep:
                self.backend.wake("kv_cache")
                self._is_asleep = False
            self._has_old_cache = self._is_live  # running requests use it
            if not self._is_live:
                self.backend.reset_prefix_cache()
        self._version = self.policy.policy_version

    @property
    def _is_live(self) -> bool:
        """Whether weights may be sent while responses are generated."""
        return not self.follows_policy and self.backend.updates_while_generating

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Within the block no token is sampled."""
        self.backend.pause()
        try:
            yield
        finally:
            self.backend.resume()

    def _connect(self) -> Transport:
        """Check the engine's model and return the fastest transport to its workers."""
        workers = self.describe()
        check_model(self.policy, self.backend.name, workers)
        self._max_length = min(worker["max_length"] for worker in workers)
        wanted, device = self._settings.weight_sync, weights_device(self.policy)
        return make_transport(wanted, device, workers, self._same_host, self._learner_host)

    def _free_cached_memory(self) -> None:
        """Free GPU memory that torch caches for the learner: the engine needs and measures it."""
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        """Raise EngineError if another thread has closed the engine."""
        if self._is_closed:
            self.close()
            raise EngineError(f"{self.backend.name} was closed")

    def _forget_lost_engine(
        self, error: EngineLostError, used: int | None, is_last: bool, others_go_on: bool = False
    ) -> None:
        """Note that the engine died, or raise if it must not be restarted again.

        ``used``: the number of its start that was in use; None: it was starting. If another thread has
        noticed already, do nothing.
        """
        if self._is_closed:  # closing it is why it is gone
            raise error
        with self._losing:
            if used is not None and (used != self._starts or not self._is_started):
                return
            if self._transport is not None:
                self._transport.close()
            self._transport, self._version, self._report = None, None, None
            self._is_started = False
            self.restarts += 1
        if is_last:
            raise EngineError(
                f"{error} It died {self.restarts} times in this run, {MAX_RESTARTS} restarts in a "
                "row are allowed"
            ) from error
        if others_go_on:
            self.backend.close()  # what is left of it keeps memory
        instead = (
            "The agent's other engines sample what is left; the next weight sync starts it again"
            if others_go_on
            else "It was started again; finished responses are kept"
        )
        self._notes.append(f"{error} {instead}")

    def _requests(self, request: GenerationRequest) -> list[Request]:
        """Return one request per sample, prompt by prompt."""
        request.check_lengths(self.policy.name, self._max_length)  # vLLM would cut responses in silence
        stop_ids = tuple(sorted(request.stop_ids))
        prompts = [prompt for prompt in request.prompts for _ in range(request.samples_per_prompt)]
        seeds = self._seeds(request)
        return [
            Request(
                prompt, replace(request.sampling, max_new_tokens=request.limit(index)), stop_ids, seeds[index]
            )
            for index, prompt in enumerate(prompts)
        ]

    def _seeds(self, request: GenerationRequest) -> Sequence[int | None]:
        """Return each response's seed, or Nones if vLLM draws from one stream (``vllm.seeded``)."""
        if not self._settings.seeded:
            return [None] * request.num_samples
        return request.seeds_of_responses()


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
