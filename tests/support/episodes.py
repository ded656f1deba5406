"""Hand-made episodes: what an agent would have sampled, in its own tokens and dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.models.tokenizing import TextCodec
from hacrl.types import Episode, FinishReason, Problem, Rollout, Segment, Turn


@dataclass(frozen=True)
class Action:
    """One action; the turns that answer it follow, unless it is the last one."""

    turn: Turn
    answer: tuple[Turn, ...] = ()
    finish_reason: FinishReason = "stop"


def said(text: str, answer: str = "", finish_reason: FinishReason = "stop") -> Action:
    """Return an action of text; a user's turn answers it."""
    answers = (Turn("user", answer),) if answer else ()
    return Action(Turn("assistant", text), answers, finish_reason)


def play(source: TextCodec, problem: Problem, actions: Sequence[Action], opening: str = "") -> Rollout:
    """Return the episode; the log-probabilities of its action tokens are -0.25, -0.5, -0.75, ..."""
    prompt = source.encode_prompt(problem, opening)
    segments: list[Segment] = []
    context, sampled = prompt, 0
    for action in actions:
        text = source.dialect.action(action.turn, problem.tools)
        assert text is not None
        (ids,) = source.encode_responses([text], [context])
        assert ids is not None
        ids = (*ids, source.stop_id) if action.finish_reason == "stop" else ids
        logprobs = tuple(-0.25 * (sampled + t + 1) for t in range(len(ids)))
        sampled += len(ids)
        turns = (source.dialect.parse(text, problem.tools).turn,)
        reason = action.finish_reason
        segments.append(Segment("action", text, ids, logprobs, turns=turns, finish_reason=reason))
        context += ids
        if action.answer:
            seen = source.dialect.observation(action.answer, reason)
            segments.append(Segment("observation", seen.text, seen.ids, turns=action.answer))
            context += seen.ids
    return Rollout(
        problem,
        source.name,
        tuple(segments),
        actions[-1].finish_reason,
        0,
        source.tokenizer_fingerprint,
        prompt,
        Episode("answered", source.dialect.fingerprint, opening),
    )
