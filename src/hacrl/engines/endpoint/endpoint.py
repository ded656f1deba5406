"""An endpoint as a sampler: it shares memory with nobody, and its weights never change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.config.endpoint import EndpointSettings
from hacrl.engines.answering import OnResponses
from hacrl.engines.base import SyncReport
from hacrl.engines.endpoint.client import EndpointClient, Question, TooFewRepliesError, Unanswered
from hacrl.engines.endpoint.replies import Reply
from hacrl.models.tokenizing import plain_conversation
from hacrl.seeding import derive_seed
from hacrl.types import Problem, Sampling, Turn

SEEDS = 2**31  # what every server takes


class Endpoint:
    """Asks an endpoint for responses. Implements :class:`hacrl.engines.base.Sampler`.

    ``uses_logprobs``: whether responses come with log-probabilities.
    """

    follows_policy = False
    shares_weights = True  # there are no weights to send
    runs_concurrently = True
    updates_while_generating = True

    def __init__(self, name: str, settings: EndpointSettings, key: str | None) -> None:
        self.name = name
        self.settings = settings
        self.uses_logprobs = settings.logprobs is not False
        self.notes: list[str] = []  # sentences for the user
        self._client = EndpointClient(name, settings, key)

    def ask(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: Sampling,
        seed: int,
        on_responses: OnResponses,
    ) -> list[list[Reply]]:
        """Return each problem's replies, at most ``samples``.

        Raise TooFewRepliesError as soon as more are missing than ``max_unanswered`` allows.
        """
        questions = [
            self._question(problem, sampling, derive_seed(seed, problem.id, number))
            for problem in problems
            for number in range(samples)
        ]
        replies: dict[int, Reply] = {}
        missing: Counter[str] = Counter()
        for number, ended in self._client.ask(questions):
            if isinstance(ended, Unanswered):
                missing[ended.reason] += 1
                self._check_missing(missing, len(questions))
            else:
                replies[number] = ended
            on_responses(1)
        if missing:
            self.notes.append(
                f"agent {self.name!r}: its endpoint left {missing.total()} of {len(questions)} requests "
                f"unanswered ({_listed(missing)}); they are left out"
            )
        by_problem: list[list[Reply]] = [[] for _ in problems]
        for number in sorted(replies):
            by_problem[number // samples].append(replies[number])
        return by_problem

    def _check_missing(self, missing: Counter[str], asked: int) -> None:
        if missing.total() > self.settings.max_unanswered * asked:
            raise TooFewRepliesError(
                f"agent {self.name!r}: {self._client.url} left {missing.total()} of {asked} requests "
                f"unanswered, more than agents.{self.name}.endpoint.max_unanswered="
                f"{self.settings.max_unanswered:g} allows ({_listed(missing)}). hacrl resume goes on once it "
                "answers",
                _listed(missing),
            )

    def _question(self, problem: Problem, sampling: Sampling, seed: int) -> Question:
        turns = (*problem.context, Turn("user", problem.prompt))
        is_chat = self.settings.interface == "chat"
        body: dict[str, Any] = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % SEEDS,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if is_chat:
            body["messages"] = [turn.as_message() for turn in turns]
        else:
            body["prompt"] = plain_conversation(turns)
        if self.uses_logprobs:
            body["logprobs"] = True if is_chat else 1
        body |= self.settings.request
        body = {key: value for key, value in body.items() if value is not None}
        return Question(body, seed, bool(sampling.stop), sampling.max_new_tokens)

    def sync(self, proven: bool = True) -> SyncReport | None:
        """Return None: nothing is sent."""
        return None

    def take_notes(self) -> list[str]:
        """Return the notes since the last call."""
        notes, self.notes = self.notes, []
        return notes

    def state_dict(self) -> dict[str, int]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Do nothing."""

    def sleep(self) -> None:
        """Do nothing: no memory is held."""

    def close(self) -> None:
        """Do nothing: connections end with the requests."""


def _listed(missing: Counter[str]) -> str:
    """Return the reasons with their counts, the most frequent ones first."""
    return ", ".join(f"{count} x {reason}" for reason, count in missing.most_common(3))
