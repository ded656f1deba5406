"""One generation on several replicas: which of them samples what, also after one is lost."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hacrl.engines.base import GenerationRequest, OnFinished, Sample
from hacrl.engines.replicas.connection import request_message, sample_of
from hacrl.engines.replicas.fleet import Fleet
from hacrl.engines.replicas.handle import ReplicaHandle, ReplicaLostError, Reply
from hacrl.engines.sync_check import EngineError

CHECK_SECONDS = 2.0  # between questions whether replicas go on
_JOBS = itertools.count(1)


class Generation:
    """Distributes a request's responses, collects samples, and redistributes what a lost replica leaves."""

    def __init__(self, fleet: Fleet, request: GenerationRequest, on_finished: OnFinished, max_batch: int):
        self.max_batch = max_batch  # becomes smaller if memory runs out on a replica
        self._fleet = fleet
        self._request = request
        self._on_finished = on_finished
        self._seeds = request.seeds_of_responses()
        self._samples: dict[int, Sample] = {}
        self._jobs: dict[int, list[int]] = {}  # number of a job -> indices of its responses
        self._owners: dict[int, ReplicaHandle] = {}  # number of a job -> who has it
        self._pings: dict[ReplicaHandle, Reply] = {}

    def run(self) -> list[Sample]:
        """Return all samples, prompt by prompt."""
        check_every = min(CHECK_SECONDS, self._fleet.settings.timeout / 4)
        next_check = time.monotonic() + check_every
        try:
            self._assign(range(self._request.num_samples))
            while len(self._samples) < self._request.num_samples:
                if time.monotonic() >= next_check:
                    self._check_progress()
                    next_check = time.monotonic() + check_every
                try:
                    replica, message = self._fleet.events.get(timeout=check_every)
                except queue.Empty:
                    continue
                if message is None:
                    self._redistribute(ReplicaLostError(replica, replica.why_lost()))
                elif message["job"] in self._jobs:
                    self._take(replica, message)
        except BaseException:
            for number, replica in self._owners.items():
                replica.post({"do": "cancel", "job": number})
            raise
        return [self._samples[index] for index in range(self._request.num_samples)]

    def _take(self, replica: ReplicaHandle, message: dict[str, Any]) -> None:
        if "error" in message:
            raise EngineError(f"{replica.name} failed while sampling: {message['error']}")
        if "done" in message:
            self._fleet.notes += message["notes"]
            self.max_batch = min(self.max_batch, message["max_batch"])
            return
        indices = self._jobs[message["job"]]
        finished = [(indices[place], sample_of(sample)) for place, *sample in message["finished"]]
        self._samples.update(finished)
        self._on_finished(finished)

    def _assign(self, indices: Iterable[int]) -> None:
        """Split responses over the replicas that have weights, whole groups if there are enough of them."""
        replicas = [replica for replica in self._fleet.replicas if replica.has_weights]
        if not replicas:
            raise self._fleet.all_lost()
        for replica, share in zip(replicas, self._shares(sorted(indices), len(replicas)), strict=True):
            if share:
                self._start(replica, share)

    def _shares(self, indices: Sequence[int], count: int) -> Iterator[list[int]]:
        """Yield each replica's responses: prompts in turn, or single responses if prompts are too few."""
        size = self._request.samples_per_prompt
        by_prompt = [list(group) for _, group in itertools.groupby(indices, lambda index: index // size)]
        parts = by_prompt if len(by_prompt) >= count else [[index] for index in indices]
        for number in range(count):
            yield [index for part in parts[number::count] for index in part]

    def _start(self, replica: ReplicaHandle, indices: list[int]) -> None:
        """Send a job."""
        request, size = self._request, self._request.samples_per_prompt
        is_whole = len(indices) % size == 0 and all(
            indices[start] % size == 0 and indices[start + size - 1] == indices[start] + size - 1
            for start in range(0, len(indices), size)
        )
        group = size if is_whole else 1
        job = next(_JOBS)
        part = GenerationRequest(
            [request.prompts[index // size] for index in indices[::group]],
            group,
            request.sampling,
            request.stop_ids,
            request.seed,
            response_seeds=tuple(self._seeds[index] for index in indices),
            limits=None if request.limits is None else tuple(request.limits[index] for index in indices),
        )
        self._jobs[job], self._owners[job] = indices, replica
        replica.last_progress = time.monotonic()
        replica.post(
            {"do": "generate", "job": job, "request": request_message(part), "max_batch": self.max_batch}
        )

    def _unfinished(self, replica: ReplicaHandle) -> list[int]:
        return [
            index
            for job, owner in self._owners.items()
            if owner is replica
            for index in self._jobs[job]
            if index not in self._samples
        ]

    def _redistribute(self, error: ReplicaLostError) -> None:
        """Give up a replica, and let the others sample what it has not finished."""
        left = self._unfinished(error.replica)
        self._fleet.lose(error)
        for job in [job for job, owner in self._owners.items() if owner is error.replica]:
            del self._owners[job], self._jobs[job]
        if left:
            self._assign(left)

    def _check_progress(self) -> None:
        """Give up replicas that have sampled no token for too long."""
        timeout = self._fleet.settings.timeout
        for replica in self._fleet.replicas:
            if not self._unfinished(replica):
                continue
            steps = self._steps(replica)
            if self._fleet.is_syncing or (steps is not None and steps != replica.steps):
                replica.last_progress = time.monotonic()
                replica.steps = replica.steps if steps is None else steps
            elif time.monotonic() - replica.last_progress > timeout:
                self._redistribute(
                    ReplicaLostError(replica, f"it has sampled no token for {timeout:g} s (replicas.timeout)")
                )

    def _steps(self, replica: ReplicaHandle) -> int | None:
        """Return the replica's answer to the last ping, if there is one, and send the next ping."""
        ping, answer = self._pings.get(replica), None
        if ping is None or ping.has_arrived:
            answer = None if ping is None else ping.result(0)
            self._pings[replica] = replica.ask({"do": "ping"})
        return None if answer is None else int(answer["steps"])
