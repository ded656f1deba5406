"""From problems to verified rollouts of one agent: render prompts, generate, decode, verify."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

from hacrl.engines.base import Engine, GenerationRequest, Sample
from hacrl.models.agent import Agent
from hacrl.models.stop_strings import Ending, StopStrings
from hacrl.tasks.base import Task
from hacrl.tasks.verdicts import checked_verdicts
from hacrl.types import (
    FinishReason,
    Problem,
    Rollout,
    Sampling,
    Verdict,
    VerifiedRollout,
    VersionSpans,
    first_tokens,
)


class OnResponses(Protocol):
    """A function that handles the number of responses that have just finished."""

    def __call__(self, count: int, /) -> None:
        """Handle ``count`` further responses."""
        ...


class Answers(Protocol):
    """The seam between an agent's worker and what gives the agent's responses: a model, or an endpoint."""

    def generate(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: Sampling,
        seed: int,
        on_responses: OnResponses = ...,
        version: int | None = None,
    ) -> list[Rollout]:
        """Return up to ``samples`` rollouts for each problem, problem by problem, not yet verified."""
        ...

    def verify(self, rollouts: Sequence[Rollout]) -> list[VerifiedRollout]:
        """Return the rollouts that :meth:`generate` returned last with their verdicts."""
        ...

    def abandon(self) -> None:
        """Stop verifying: the verdicts are not needed."""
        ...

    def take_notes(self) -> list[str]:
        """Return sentences for the user that have come up since the last call."""
        ...

    def close(self) -> None:
        """End processes. May be called more than once."""
        ...


class Answerer:
    """Generates and verifies one agent's responses.

    If the task judges each response by itself, responses are verified in a thread while others are still
    being generated. A reward function sees all responses at once, as its author expects: it is called last.
    ``verify_lock`` makes answerers that share a task take turns in calling it.
    """

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        task: Task,
        verify_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.agent = agent
        self.engine = engine
        self._task = task
        self._verify_lock = verify_lock or nullcontext()
        self._verifier = _EarlyVerifier(task, self._verify_lock)  # of the last generation

    def answer(
        self, problems: Sequence[Problem], samples: int, sampling: Sampling, seed: int
    ) -> list[VerifiedRollout]:
        """Return ``samples`` verified rollouts for each problem, problem by problem."""
        try:
            return self.verify(self.generate(problems, samples, sampling, seed))
        finally:
            self.abandon()

    def generate(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: Sampling,
        seed: int,
        on_responses: OnResponses = lambda _: None,
        version: int | None = None,
    ) -> list[Rollout]:
        """Return ``samples`` rollouts for each problem, not yet verified. May run in any thread.

        ``version``: the policy version of the engine's weights at the start; None: the agent's own.
        """
        prompts = self.agent.encode_prompts(problems)
        stop_strings = StopStrings(self.agent, sampling.stop) if sampling.stop else None
        stop_ids = frozenset(self.agent.stop_ids)
        request = GenerationRequest(prompts, samples, sampling, stop_ids, seed, stop_strings)
        rollouts: dict[int, Rollout] = {}
        # One verifier per generation: responses of an abandoned generation may still come from its thread.
        verifier = self._verifier = _EarlyVerifier(self._task, self._verify_lock)

        def on_finished(finished: Sequence[tuple[int, Sample]]) -> None:
            answered = [(problems[index // samples], sample) for index, sample in finished]
            decoded = decode_rollouts(self.agent, answered, stop_strings, version)
            for (index, _), rollout in zip(finished, decoded, strict=True):
                rollouts[index] = rollout
                verifier.add(index, rollout)
            on_responses(len(finished))

        self.engine.generate(request, on_finished)
        return [rollouts[index] for index in range(request.num_samples)]

    def verify(self, rollouts: Sequence[Rollout]) -> list[VerifiedRollout]:
        """Return the rollouts that :meth:`generate` returned last with their verdicts."""
        verdicts = self._verifier.finish()
        if len(verdicts) < len(rollouts):  # the task wants to see all responses at once
            with self._verify_lock:
                return verify_rollouts(self._task, rollouts)
        return [VerifiedRollout(rollout, verdicts[index]) for index, rollout in enumerate(rollouts)]

    def abandon(self) -> None:
        """Stop verifying: the verdicts are not needed. Do nothing after :meth:`verify`."""
        self._verifier.abandon()

    def take_notes(self) -> list[str]:
        """Return nothing: the engine has its own notes."""
        return []

    def close(self) -> None:
        """Do nothing: the task's processes are the task's."""


@dataclass(frozen=True, slots=True)
class DecodedResponse:
    """One response: a sample up to its end, and its text without the stop token and the stop string."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: VersionSpans  # as in Sample
    finish_reason: FinishReason
    stop_text: str  # the stop string that ended the response, and what its last token wrote after it


def decode_responses(
    agent: Agent,
    finished: Sequence[tuple[tuple[int, ...], Sample]],
    stop_strings: StopStrings | None = None,
) -> list[DecodedResponse]:
    """Return an agent's samples, each given with its prompt, cut at stop strings.

    Texts are decoded in few calls.
    """
    stopped = [sample.token_ids[-1] in agent.stop_ids for _, sample in finished]
    prompts = [prompt for prompt, _ in finished]
    spoken = [
        sample.token_ids[:-1] if is_stopped else sample.token_ids
        for (_, sample), is_stopped in zip(finished, stopped, strict=True)
    ]
    texts = agent.decode_responses(spoken, prompts)
    endings: Sequence[Ending | None] = [None] * len(finished)
    if stop_strings is not None:
        endings = stop_strings.endings(spoken, prompts, texts)
    responses = []
    for (_, sample), text, is_stopped, ending in zip(finished, texts, stopped, endings, strict=True):
        kept = len(sample.token_ids) if ending is None else ending.tokens
        reason: FinishReason = "stop" if is_stopped else "length"
        responses.append(
            DecodedResponse(
                text=text if ending is None else ending.text,
                token_ids=sample.token_ids[:kept],
                logprobs=sample.logprobs[:kept],
                versions=first_tokens(sample.versions, kept),
                finish_reason=reason if ending is None else "stop_string",
                stop_text="" if ending is None else ending.stop_text,
            )
        )
    return responses


def decode_rollouts(
    agent: Agent,
    finished: Sequence[tuple[Problem, Sample]],
    stop_strings: StopStrings | None = None,
    version: int | None = None,
) -> list[Rollout]:
    """Return the rollouts of an agent's samples, cut at stop strings.

    ``version``: the policy version of samples that do not say theirs; None: the agent's own.
    """
    sampled_by = agent.policy_version if version is None else version
    prompts = [agent.encode_prompt(problem) for problem, _ in finished]
    samples = [sample for _, sample in finished]
    responses = decode_responses(agent, list(zip(prompts, samples, strict=True)), stop_strings)
    return [
        Rollout.single_turn(
            problem=problem,
            agent=agent.name,
            text=response.text,
            token_ids=response.token_ids,
            token_logprobs=response.logprobs,
            finish_reason=response.finish_reason,
            policy_version=response.versions[0][0] if response.versions else sampled_by,
            tokenizer=agent.tokenizer_fingerprint,
            prompt_ids=prompt,
            versions=response.versions if len(response.versions) > 1 else (),
            stop_text=response.stop_text,
        )
        for (problem, _), prompt, response in zip(finished, prompts, responses, strict=True)
    ]


def verify_rollouts(task: Task, rollouts: Sequence[Rollout]) -> list[VerifiedRollout]:
    """Return every rollout with the task's verdict."""
    verdicts = checked_verdicts(task, rollouts, task.verify(rollouts))
    return [VerifiedRollout(rollout, verdict) for rollout, verdict in zip(rollouts, verdicts, strict=True)]


class _EarlyVerifier:
    """Verifies one generation's responses in a thread as they finish, if the task allows it."""

    def __init__(self, task: Task, lock: AbstractContextManager[object]) -> None:
        self._task = task
        self._lock = lock
        self._is_early = bool(getattr(task, "independent_verdicts", False))
        self._waiting: queue.SimpleQueue[tuple[int, Rollout] | None] = queue.SimpleQueue()
        self._verdicts: dict[int, Verdict] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._is_abandoned = False
        self._changing = threading.Lock()  # of the two attributes above

    def add(self, index: int, rollout: Rollout) -> None:
        """Queue one response. ``index`` identifies its verdict."""
        with self._changing:
            if not self._is_early or self._is_abandoned:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hacrl-verify", daemon=True)
                self._thread.start()
            self._waiting.put((index, rollout))

    def finish(self) -> dict[int, Verdict]:
        """Wait for all queued responses and return their verdicts; empty if the task was not called yet."""
        self._join()
        if self._error is not None:
            raise self._error
        return self._verdicts

    def abandon(self) -> None:
        """Drop queued responses, and ignore further ones."""
        with self._changing:
            self._is_abandoned = True
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        self._join()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def _run(self) -> None:
        """Verify queued responses until None is queued; those that wait together are verified in one call."""
        try:
            is_last = False
            while not is_last:
                batch: list[tuple[int, Rollout]] = []
                item = self._waiting.get()
                while item is not None:
                    batch.append(item)
                    if self._waiting.empty():
                        break
                    item = self._waiting.get()
                is_last = item is None
                if batch:
                    rollouts = [rollout for _, rollout in batch]
                    with self._lock:
                        verdicts = checked_verdicts(self._task, rollouts, self._task.verify(rollouts))
                    self._verdicts.update(zip((index for index, _ in batch), verdicts, strict=True))
        except BaseException as error:  # raised again by finish()
            self._error = error
