"""Other agents' text in the learner's tokens. Measured, not assumed: every loss of a rollout has a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hacrl.agents.agent import Agent
from hacrl.types import Rollout

BROKEN_CHARACTER = "\ufffd"  # what incomplete UTF-8 decodes to

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
    stopped = rollout.finish_reason == "stop"
    if same_tokenizer:
        response_ids: tuple[int, ...] | None = rollout.token_ids[: rollout.num_tokens - stopped]
    elif BROKEN_CHARACTER in rollout.text:  # the source's bytes are lost: this text is not what it said
        response_ids = None
    else:
        response_ids = learner.encode_response(rollout.text, prompt_ids)
    if response_ids is None:
        return "not_representable"
    if stopped:
        response_ids = (*response_ids, _stop_id(learner, rollout, same_tokenizer))
    limit = learner.context_length
    if limit is not None and len(prompt_ids) + len(response_ids) > limit:
        return "too_long"
    return LearnerTokens(prompt_ids, response_ids, reused=same_tokenizer)


def _stop_id(learner: Agent, rollout: Rollout, same_tokenizer: bool) -> int:
    """The source's own stop token if it ends the learner's responses too, else the learner's."""
    source_stop = rollout.token_ids[-1]
    return source_stop if same_tokenizer and source_stop in learner.stop_ids else learner.stop_id
