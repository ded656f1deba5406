"""Hand-made rollouts in an agent's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hacrl.models.agent import Agent
from hacrl.types import Rollout, Verdict, VerifiedRollout
from tests.support.sevens import problem


def rollout(
    agent: Agent,
    text: str,
    stopped: bool = True,
    prompt: str = "1:",
    token_ids: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
) -> Rollout:
    """Return a rollout with this text; the default log-probability of token t is -0.25 * (t + 1)."""
    spelled = (*agent.tokenizer(text, add_special_tokens=False).input_ids, *[agent.stop_id] * stopped)
    ids = tuple(token_ids) if token_ids is not None else spelled
    given = tuple(logprobs) if logprobs is not None else tuple(-0.25 * (t + 1) for t in range(len(ids)))
    return Rollout.single_turn(
        problem=problem(prompt),
        agent=agent.name,
        text=text,
        token_ids=ids,
        token_logprobs=given,
        finish_reason="stop" if stopped else "length",
        policy_version=0,
        tokenizer=agent.tokenizer_fingerprint,
        prompt_ids=agent.encode_prompt(problem(prompt)),
    )


def with_logprobs(one: Rollout, logprobs: Sequence[float]) -> Rollout:
    """Return the single-turn rollout with other log-probabilities."""
    (segment,) = one.segments
    return replace(one, segments=(replace(segment, token_logprobs=tuple(logprobs)),))


def judged(one: Rollout, reward: float) -> VerifiedRollout:
    """Return the rollout with a verdict of this reward."""
    return VerifiedRollout(one, Verdict(reward, "correct" if reward > 0 else "wrong"))
