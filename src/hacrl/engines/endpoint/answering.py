"""From problems to verified rollouts of an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from hacrl.engines.answering import OnResponses, verify_rollouts
from hacrl.engines.endpoint.endpoint import Endpoint
from hacrl.engines.endpoint.replies import Reply
from hacrl.tasks.base import Task
from hacrl.types import Problem, Remote, Rollout, Sampling, Segment, VerifiedRollout


class EndpointAnswerer:
    """Generates and verifies an endpoint's responses. Implements :class:`hacrl.engines.answering.Answers`."""

    def __init__(
        self, endpoint: Endpoint, task: Task, verify_lock: AbstractContextManager[object] | None = None
    ) -> None:
        self._endpoint = endpoint
        self._task = task
        self._verify_lock = verify_lock or nullcontext()

    def generate(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: Sampling,
        seed: int,
        on_responses: OnResponses = lambda _: None,
        version: int | None = None,
    ) -> list[Rollout]:
        """Return up to ``samples`` rollouts for each problem, problem by problem, not yet verified."""
        replies = self._endpoint.ask(problems, samples, sampling, seed, on_responses)
        return [
            self._rollout(problem, reply)
            for problem, found in zip(problems, replies, strict=True)
            for reply in found
        ]

    def verify(self, rollouts: Sequence[Rollout]) -> list[VerifiedRollout]:
        """Return the rollouts with their verdicts."""
        with self._verify_lock:
            return verify_rollouts(self._task, rollouts)

    def abandon(self) -> None:
        """Do nothing: nothing is verified before :meth:`verify`."""

    def take_notes(self) -> list[str]:
        """Return nothing: the endpoint has its own notes."""
        return []

    def close(self) -> None:
        """Do nothing: the worker closes the endpoint."""

    def _rollout(self, problem: Problem, reply: Reply) -> Rollout:
        logprobs = reply.logprobs if self._endpoint.uses_logprobs else ()
        segment = Segment("action", reply.text, (), logprobs, stop_text=reply.stop_text)
        return Rollout(
            problem=problem,
            agent=self._endpoint.name,
            segments=(segment,),
            finish_reason=reply.finish_reason,
            policy_version=0,
            tokenizer=f"endpoint:{self._endpoint.settings.model}",  # equal to no learner's
            remote=Remote(reply.tokens, reply.has_stop_token),
        )
