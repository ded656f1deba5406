"""Other agents' text in the learner's tokens. Measured, not assumed: every loss of a rollout has a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hacrl.agents.agent import Agent
from hacrl.types import Rollout

DropReason = Literal["too_long", "not_representable", "non_finite", "empty"]


@dataclass(frozen=True, slots=True)
class LearnerTokens:
    """One response as a learner's token ids; ``reused`` if they are the source's own."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    reused: bool


def learner_tokens(learner: Agent, rollout: Rollout, same_tokenizer: bool) -> LearnerTokens | DropReason:
    """The learner's view of a rollout, whole or not at all: it is never cut to fit."""
    prompt_ids = learner.encode_prompt(rollout.problem)
    if same_tokenizer:
        response_ids = rollout.token_ids
    else:
        stopped = rollout.finish_reason == "stop"
        response_ids = learner.encode_response(rollout.text, stopped)
        spelled = response_ids[: len(response_ids) - stopped]
        if learner.decode(spelled) != rollout.text or not learner.special_ids.isdisjoint(spelled):
            return "not_representable"
    limit = learner.context_length
    if limit is not None and len(prompt_ids) + len(response_ids) > limit:
        return "too_long"
    return LearnerTokens(prompt_ids, response_ids, reused=same_tokenizer)
