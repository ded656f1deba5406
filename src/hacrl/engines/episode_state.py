"""One episode while it is played: the tokens so far, and what the agent and the environment have done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hacrl.engines.answering import DecodedResponse
from hacrl.environments.interface import FailureKind, Outcome
from hacrl.models.agent import Agent
from hacrl.models.dialect import ParsedAction
from hacrl.types import Episode, EpisodeEnd, Problem, Rollout, Segment, Turn

# What an episode waits for. "opening": the environment's reset. "action": the agent's next turn.
# "observation": the environment's answer to it. "reward": the end of the environment. "nothing": it is over.
Waiting = Literal["opening", "action", "observation", "reward", "nothing"]


@dataclass
class EpisodeState:
    """An episode of one agent, from the environment's reset to its reward."""

    key: int  # in the environments' pool
    problem: Problem
    sample: int  # among the agent's episodes of the problem
    most_tokens: int  # that actions and observations may have together; before the opening came: with it
    waiting: Waiting = "opening"
    end: EpisodeEnd | None = None
    opening: str = ""
    prompt_ids: tuple[int, ...] = ()
    segments: list[Segment] = field(default_factory=list)
    turns: int = 0  # actions so far
    tokens: int = 0  # of all segments
    turn_rewards: list[float] = field(default_factory=list)
    reward: float | None = None
    failure: str = ""
    failure_kind: FailureKind = ""
    tool_errors: int = 0
    unread_calls: list[str] = field(default_factory=list)
    first_version: int | None = None  # of the policy that sampled the first token

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and all segments: what the next action continues."""
        return self.prompt_ids + tuple(token for segment in self.segments for token in segment.token_ids)

    def room(self, context_length: int | None) -> int:
        """Return how many more tokens fit into the episode and into the model's context."""
        left = self.most_tokens - self.tokens
        if context_length is None:
            return left
        return min(left, context_length - len(self.prompt_ids) - self.tokens)

    def add_action(self, response: DecodedResponse, parsed: ParsedAction, version: int) -> None:
        """Append the agent's turn. ``version``: of the policy, where the response does not say it."""
        versions = response.versions
        if self.first_version is None:
            self.first_version = versions[0][0] if versions else version
        if not versions and version != self.first_version:
            versions = ((version, len(response.token_ids)),)
        self.segments.append(
            Segment(
                "action",
                response.text,
                response.token_ids,
                response.logprobs,
                versions,
                response.stop_text,
                (parsed.turn,),
                response.finish_reason,
            )
        )
        self.turns += 1
        self.tokens += len(response.token_ids)
        if parsed.error:
            self.unread_calls.append(parsed.error)

    def add_observation(self, text: str, ids: Sequence[int], turns: Sequence[Turn]) -> None:
        """Append what the environment said."""
        self.segments.append(Segment("observation", text, tuple(ids), turns=tuple(turns)))
        self.tokens += len(ids)

    def fail(self, outcome: Outcome) -> None:
        """End the episode: the environment has failed."""
        self.waiting, self.end = "nothing", "failed"
        self.failure, self.failure_kind = outcome.failure, outcome.failure_kind
        self.reward = None

    def close(self, outcome: Outcome, is_text: bool) -> None:
        """End the episode with the environment's reward; in the text form without, the sum of the turns'."""
        self.waiting, self.reward = "nothing", outcome.reward
        if self.reward is None and is_text:
            self.reward = math.fsum(self.turn_rewards)

    def rollout(self, agent: Agent, version: int) -> Rollout:
        """Return the record of the finished episode."""
        assert self.end is not None, "the episode is under way"
        segments = self.segments
        if segments and segments[-1].kind == "observation":  # the agent has not answered it
            segments = segments[:-1]
        last = segments[-1].finish_reason if segments else None
        return Rollout(
            problem=self.problem,
            agent=agent.name,
            segments=tuple(segments),
            finish_reason=last or "length",
            policy_version=version if self.first_version is None else self.first_version,
            tokenizer=agent.tokenizer_fingerprint,
            prompt_ids=self.prompt_ids,
            episode=Episode(
                end=self.end,
                dialect=agent.dialect.fingerprint,
                opening=self.opening,
                turn_rewards=tuple(self.turn_rewards),
                reward=self.reward,
                failure=self.failure,
                failure_kind=self.failure_kind,
                tool_errors=self.tool_errors,
                unread_calls=tuple(self.unread_calls),
            ),
        )
