"""Rollouts of one agent from its own vLLM engine, which follows the agent's policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hacrl.config.schema import VllmSettings
from hacrl.engines.base import EngineReport, Finished
from hacrl.engines.sync_check import Proof
from hacrl.engines.vllm.backend import (
    Backend,
    Completion,
    Completions,
    EngineError,
    EngineLostError,
    PolicyMismatchError,
    Request,
)
from hacrl.engines.vllm.start_lock import StartLock
from hacrl.engines.vllm.weight_transfer import Transport, exported_weights, make_transport
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.device import as_current
from hacrl.models.lora import is_adapted
from hacrl.seeding import derive_seed
from hacrl.types import Problem, Rollout, Sampling

_START_LOCK = StartLock()
_COPYING = threading.Lock()  # of weights, which takes as much memory as they do


class VllmEngine:
    """Keeps an engine at the agent's policy, asks it, and brings it back if it dies."""

    def __init__(
        self,
        agent: Agent,
        backend: Backend,
        settings: VllmSettings,
        probes: Sequence[Problem],  # what an engine is asked to prove that it is at the agent's policy
        same_host: bool = True,
        learner_host: str = "127.0.0.1",  # where the engine's machine reaches this one
        before_start: Callable[[], None] = lambda: None,  # whatever can be done before its turn
        starts_alone: bool = True,  # it measures how much memory is free
    ) -> None:
        self.agent = agent
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
        self._report: EngineReport | None = None  # how it got there, once that is proven
        self._max_length: int | None = None  # most tokens of a prompt and its response, as the engine says

    @property
    def shares_weights(self) -> bool:
        """No: weights are brought to it."""
        return False

    @property
    def is_apart(self) -> bool:
        """Unless its memory is others' while it sleeps."""
        return not self.backend.can_sleep

    def prepare(self, proven: bool = True) -> EngineReport | None:
        """Start the engine if it is not there, and bring it to the agent's policy if it is not at it."""
        self._is_closed = False
        self._bring_up()
        _START_LOCK.wait_for_all(self._check_open)
        if proven:
            self._hear([], lambda ended: None)
        return self._report

    def _bring_up(self) -> None:
        if self._version == self.agent.policy_version:
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

    def generate(
        self,
        problems: Sequence[Problem],
        samples_per_prompt: int,
        sampling: Sampling,
        seed: int,
        on_finished: Finished | None = None,
    ) -> list[Rollout]:
        """See :class:`hacrl.engines.base.RolloutEngine`. What was finished before a crash is kept."""
        # how a seeded response is computed must not depend on whether there is something to prove beside it
        self.prepare(proven=self._settings.seeded)
        asks = self._asks(problems, samples_per_prompt, sampling, seed)
        rollouts: dict[int, Rollout] = {}

        def take(ended: Completions) -> None:
            asked = [problems[place // samples_per_prompt] for place, _ in ended]
            made = self._rollouts(asked, [said for _, said in ended], sampling)
            for (place, _), rollout in zip(ended, made, strict=True):
                rollouts[place] = rollout
                if on_finished is not None:
                    on_finished(place, rollout)

        self._hear(asks, take)
        return [rollouts[place] for place in range(len(asks))]

    def _hear(self, asks: Sequence[Request], take: Callable[[Completions], None]) -> None:
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
            except PolicyMismatchError as error:
                if has_failed:
                    raise
                has_failed = True
                self._notes.append(f"{error}. The weights were brought once more; nothing it said was used")

    def _hear_once(self, left: dict[int, Request], take: Callable[[Completions], None]) -> None:
        """What was asked for and is left; what is taken is no longer.

        Nothing is taken of an engine that has not proven that it is at the agent's policy.
        """
        proof = None if self._report is not None else Proof(self.agent, self._probes)
        first = [] if proof is None else proof.asks
        places = list(left)
        unproven: Completions = []
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

    def _proven(self, proof: Proof) -> EngineReport:
        assert self._version is not None
        assert self._transport is not None
        version, self._version = self._version, None  # whoever asks again gets weights again, unless ...
        with as_current(self.agent.device):
            gap = proof.gap(self.backend.name, self._settings.max_logprob_gap)
        self._version = version  # ... it is true
        return EngineReport(version, self._transport.name, gap, restarts=self.restarts)

    def take_notes(self) -> list[str]:
        """What happened to the engine since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def state_dict(self) -> dict[str, int]:
        """Nothing: vLLM plans its batches itself."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Nothing to restore, whichever engine the state is of."""

    def rest(self) -> None:
        """Give the GPU's memory back; the next :meth:`prepare` takes it again and brings the weights."""
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
        with _START_LOCK.announce():
            self._check_open()
            self._before_start()
            with _START_LOCK.hold(self._starts_alone), as_current(self.agent.device):
                self._check_open()
                self._have_memory_given_back()
                self.backend.start()
                self._is_started, self._is_asleep = True, False
                self._check_open()
                self._synchronise()

    def _synchronise(self) -> None:
        with as_current(self.agent.device):
            self._bring_weights()
        self._version = self.agent.policy_version

    def _bring_weights(self) -> None:
        self._version, self._report = None, None  # if it breaks off, nobody knows
        if self._is_asleep:
            self._have_memory_given_back()
            self.backend.wake("weights")
        if self._transport is None:
            workers = self.describe()
            check_model(self.agent, self.backend.name, workers)
            self._max_length = min(worker["max_length"] for worker in workers)
            wanted = self._settings.weight_sync
            device = self.agent.device
            self._transport = make_transport(wanted, device, workers, self._same_host, self._learner_host)
        copies = is_adapted(self.agent.model) or self._transport.name == "files"
        with _COPYING if copies else nullcontext():
            self._transport.send(exported_weights(self.agent.model), self.backend)
        if self._is_asleep:
            self.backend.wake("kv_cache")
            self._is_asleep = False
        self.backend.reset_prefix_cache()

    def _have_memory_given_back(self) -> None:
        """What a learner keeps for later, the engine needs now; as it starts, it measures what is free."""
        if self.agent.device.type == "cuda":
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
                f"row are allowed (agents.{self.agent.name}.vllm.restarts)"
            ) from error
        self._notes.append(f"{error} It was started again; finished responses are kept")

    def _asks(
        self, problems: Sequence[Problem], samples: int, sampling: Sampling, seed: int
    ) -> list[Request]:
        """One for each response, problem by problem."""
        prompts = [self.agent.encode_prompt(problem) for problem in problems]
        self._check_lengths(problems, prompts, sampling)
        stop_ids = tuple(sorted(self.agent.stop_ids))
        asked = [prompt for prompt in prompts for _ in range(samples)]
        seeded = self._settings.seeded
        return [
            Request(prompt, sampling, stop_ids, derive_seed(seed, place) if seeded else None)
            for place, prompt in enumerate(asked)
        ]

    def _check_lengths(
        self, problems: Sequence[Problem], prompts: Sequence[tuple[int, ...]], sampling: Sampling
    ) -> None:
        """vLLM would cut responses at the end of its context without a word."""
        for problem, prompt in zip(problems, prompts, strict=True):
            needed = len(prompt) + sampling.max_new_tokens
            if self._max_length is not None and needed > self._max_length:
                raise EngineError(
                    f"agent {self.agent.name!r}: problem {problem.id[:80]!r} and max_new_tokens="
                    f"{sampling.max_new_tokens} need {needed} tokens, {self.backend.name} takes "
                    f"{self._max_length}: use shorter prompts or fewer new tokens, or an engine with a "
                    f"larger agents.{self.agent.name}.vllm.max_length"
                )

    def _rollouts(
        self, problems: Sequence[Problem], said: Sequence[Completion], sampling: Sampling
    ) -> list[Rollout]:
        """Of responses that have ended together; their texts are decoded together."""
        if not all(one.token_ids for one in said):
            raise TrainingError(f"{self.backend.name} gave a response without a token")
        stopped = [one.token_ids[-1] in self.agent.stop_ids for one in said]
        prompts = [self.agent.encode_prompt(problem) for problem in problems]
        texts = self.agent.decode_responses(
            [one.token_ids[:-1] if stop else one.token_ids for one, stop in zip(said, stopped, strict=True)],
            prompts,
        )
        greedy = sampling.temperature == 0  # its tokens have probability 1 under the distribution used
        assert self._version is not None
        return [
            Rollout.single_turn(
                problem=problem,
                agent=self.agent.name,
                text=text,
                token_ids=one.token_ids,
                token_logprobs=(0.0,) * len(one.token_ids) if greedy else one.logprobs,
                finish_reason="stop" if stop else "length",
                policy_version=self._version,
                tokenizer=self.agent.tokenizer_fingerprint,
                prompt_ids=prompt,
            )
            for problem, prompt, one, stop, text in zip(problems, prompts, said, stopped, texts, strict=True)
        ]


def check_model(agent: Agent, engine: str, workers: Sequence[dict[str, Any]]) -> None:
    """Refuse an engine that serves a model of another shape than the agent's."""
    config = agent.model.config.get_text_config()
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
                f"{engine} serves another model than agent {agent.name!r}: {shown}. Start it with the "
                "agent's model (docs/vllm.md)"
            )
