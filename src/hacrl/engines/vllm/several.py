"""Several vLLM engines of one agent: each has all of its weights and samples a part of the responses.

Prompts are dealt out in turn. With ``vllm.seeded`` every response has a seed of its own, so responses depend
neither on the number of engines nor on which one samples them, but for rounding. What an engine that dies
leaves is sampled by the others; the next weight sync starts it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from hacrl.engines.base import GenerationRequest, OnFinished, Policy, Sample, SyncReport
from hacrl.engines.concurrent import MainThread, run_concurrently
from hacrl.engines.sync_check import EngineError, PolicyMismatchError
from hacrl.engines.vllm.backend import EngineLostError
from hacrl.engines.vllm.engine import VllmEngine

LOOK_SECONDS = 0.5  # between looks whether the generation was abandoned
Work = Callable[[VllmEngine, MainThread], Any]


class VllmEngines:
    """Keeps several engines at a policy and distributes requests over them. See :class:`Engine`."""

    shares_weights = False

    def __init__(self, policy: Policy, engines: Sequence[VllmEngine]) -> None:
        self.policy = policy
        self.engines = list(engines)  # without those that were given up
        self._names = {
            id(engine): f"{policy.name} (number {number})" for number, engine in enumerate(engines)
        }
        self._has_worked: set[int] = set()  # ids of engines that have passed a weight sync
        self._given_up_restarts = 0  # of engines that were given up
        self._notes: list[str] = []
        self._follows_policy = True
        for engine in engines:
            engine.restarts_in_generation = False

    @property
    def follows_policy(self) -> bool:
        """Whether generate() first brings the engines to the policy's weights."""
        return self._follows_policy

    @follows_policy.setter
    def follows_policy(self, value: bool) -> None:
        self._follows_policy = value
        for engine in self.engines:
            engine.follows_policy = value

    @property
    def runs_concurrently(self) -> bool:
        """Return False if an engine sleeps on a GPU that it shares."""
        return all(engine.runs_concurrently for engine in self.engines)

    @property
    def updates_while_generating(self) -> bool:
        """Return whether the running requests of all engines can be paused while weights are sent."""
        return all(engine.updates_while_generating for engine in self.engines)

    def sync(self, proven: bool = True) -> SyncReport | None:
        """Start engines that do not run, and send all of them the policy's weights.

        An engine that was lost while its agent generated is started again with the next weights.
        """
        version = self.policy.policy_version
        current = [engine for engine in self.engines if engine.is_started and engine.version == version]
        due = current or self.engines
        reports = self._each(due, lambda engine, _: self._sync_one(engine, proven))
        found = [report for report in reports if isinstance(report, SyncReport)]
        if not self.engines:
            raise EngineError(
                f"agent {self.policy.name!r}: all of its vLLM engines are lost; {self._notes[-1]}"
            )
        if not found:
            return None
        return SyncReport(
            version,
            "+".join(sorted({report.weight_sync for report in found})),
            max(report.logprob_gap for report in found),
            self._given_up_restarts + sum(engine.restarts for engine in self.engines),
        )

    def _sync_one(self, engine: VllmEngine, proven: bool) -> SyncReport | EngineError | None:
        """Bring one engine to the weights; return the error of one that worked and cannot any more."""
        try:
            report = engine.sync(proven)
        except PolicyMismatchError:
            raise
        except EngineError as error:
            # An engine that never worked is a mistake in the settings, which must not stay unseen.
            if id(engine) not in self._has_worked:
                raise
            return error
        self._has_worked.add(id(engine))
        return report

    def _each(self, engines: Sequence[VllmEngine], work: Work) -> list[Any]:
        """Do the work for all engines at the same time; give up engines whose result is an error."""
        jobs = {self._names[id(engine)]: partial(work, engine) for engine in engines}
        results = run_concurrently(jobs)
        for engine in engines:
            error = results[self._names[id(engine)]]
            if isinstance(error, EngineError):
                self._give_up(engine, error)
        return list(results.values())

    def _give_up(self, engine: VllmEngine, error: EngineError) -> None:
        """Go on without an engine that does not start any more."""
        # a new list, because another thread may be generating with the old one
        self.engines = [one for one in self.engines if one is not engine]
        self._notes += engine.take_notes()
        self._given_up_restarts += engine.restarts
        engine.close()
        self._notes.append(f"{error}. The run goes on without it: {len(self.engines)} engines are left")

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """See :class:`hacrl.engines.base.Engine`. What had finished before a crash is kept."""
        work = SharedRequest(request, on_finished or (lambda _: None))
        while not work.is_finished:
            if self.follows_policy or not self._has_worked:
                self.sync(proven=False)  # each engine's first responses prove it
            limits = [engine.max_length for engine in self.engines if engine.max_length is not None]
            request.check_lengths(self.policy.name, min(limits, default=None))
            running = [engine for engine in self.engines if engine.is_started]
            if not running:
                raise EngineError(
                    f"agent {self.policy.name!r}: all of its vLLM engines were lost while it was being "
                    "trained; hacrl resume goes on from the last checkpoint"
                )
            work.deal([self._names[id(engine)] for engine in running])
            self._each(running, partial(self._serve, work))
        return work.samples

    def _serve(self, work: SharedRequest, engine: VllmEngine, main: MainThread) -> None:
        """Sample one engine's share, and then what lost engines have left."""
        name = self._names[id(engine)]
        for indices in work.shares_of(name, main):
            finish = partial(work.finish, indices)
            try:
                engine.generate(
                    work.part(indices),
                    lambda finished, finish=finish: main.post(partial(finish, finished)),  # type: ignore[misc]
                )
            except EngineLostError:  # the engine has noted it
                main.call(partial(work.lose, name))
                return
            self._has_worked.add(id(engine))

    def take_notes(self) -> list[str]:
        """Return what happened to the engines since the last call."""
        notes, self._notes = self._notes, []
        return notes + [note for engine in self.engines for note in engine.take_notes()]

    def state_dict(self) -> dict[str, int]:
        """Return nothing: vLLM plans its batches itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Do nothing: there is nothing to restore."""

    def sleep(self) -> None:
        """Give back the memory of GPUs that the learner uses, too."""
        for engine in self.engines:
            engine.sleep()

    def close(self) -> None:
        """End all engines."""
        for engine in self.engines:
            engine.close()


class SharedRequest:
    """One request that several engines serve: which of them samples what, and what is left.

    Engines' threads ask for shares and wait for what others leave; everything else happens in one thread.
    """

    def __init__(self, request: GenerationRequest, on_finished: OnFinished) -> None:
        self._request = request
        self._on_finished = on_finished
        self._seeds = request.seeds_of_responses()
        self._samples: dict[int, Sample] = {}
        self._shares: dict[str, list[int]] = {}  # engine -> what it has been given and may not have finished
        self._waiting: dict[str, list[int]] = {}  # engine -> what it has not begun
        self._changed = threading.Condition()

    @property
    def is_finished(self) -> bool:
        """Whether all responses are there."""
        return len(self._samples) == self._request.num_samples

    @property
    def samples(self) -> list[Sample]:
        """All samples, prompt by prompt."""
        return [self._samples[index] for index in range(self._request.num_samples)]

    def part(self, indices: Sequence[int]) -> GenerationRequest:
        """Return the request for some of the responses."""
        request = self._request
        return GenerationRequest(
            [request.prompts[index // request.samples_per_prompt] for index in indices],
            1,
            request.sampling,
            request.stop_ids,
            request.seed,
            request.stop_strings,
            tuple(self._seeds[index] for index in indices),
            None if request.limits is None else tuple(request.limits[index] for index in indices),
        )

    def deal(self, engines: Sequence[str]) -> None:
        """Give all responses that are not there to the engines."""
        left = [index for index in range(self._request.num_samples) if index not in self._samples]
        with self._changed:
            self._waiting = self._dealt(left, engines)
            self._shares = {engine: list(share) for engine, share in self._waiting.items()}

    def _dealt(self, indices: Sequence[int], engines: Sequence[str]) -> dict[str, list[int]]:
        """Return each engine's responses: prompts in turn, or single responses if prompts are too few."""
        size, count = self._request.samples_per_prompt, len(engines)
        by_prompt = [list(group) for _, group in groupby(indices, lambda index: index // size)]
        parts = by_prompt if len(by_prompt) >= count else [[index] for index in indices]
        return {
            engine: [index for part in parts[number::count] for index in part]
            for number, engine in enumerate(engines)
        }

    def shares_of(self, engine: str, main: MainThread) -> Iterator[list[int]]:
        """Yield what an engine has to sample, until nothing is left for anybody."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting.get(engine) or self.is_finished, LOOK_SECONDS)
                share, self._waiting[engine] = self._waiting.get(engine, []), []
            if share:
                yield share
            elif self.is_finished:
                return
            else:
                main.post(lambda: None)  # raises if nobody waits for the responses any more

    def finish(self, indices: Sequence[int], finished: Sequence[tuple[int, Sample]]) -> None:
        """Take samples of a part."""
        own = [(indices[place], sample) for place, sample in finished]
        with self._changed:
            self._samples.update(own)
            if self.is_finished:
                self._changed.notify_all()
        self._on_finished(own)

    def lose(self, engine: str) -> None:
        """Give what an engine has not finished to the others, if there are others."""
        with self._changed:
            left = [index for index in self._shares.pop(engine) if index not in self._samples]
            self._waiting.pop(engine, None)
            others = list(self._shares)
            for other, share in self._dealt(left, others).items() if others else ():
                self._shares[other] += share
                self._waiting[other] = self._waiting.get(other, []) + share
            self._changed.notify_all()
