"""Warn about responses that are cut before they can reach an answer."""

from __future__ import annotations

from collections.abc import Sequence

from hacrl.config.schema import RunConfig
from hacrl.models.tokenizing import TextCodec
from hacrl.plain_text import half_character
from hacrl.tasks.base import Task
from hacrl.types import Problem

SAMPLED = 200  # solutions that are measured, evenly spaced
# Share of the solutions that do not fit, above which a run can hardly succeed: a response is rarely shorter
# than the solution that the data set gives.
TOO_LONG_SHARE = 0.1


def response_length_warnings(
    config: RunConfig, task: Task, problems: Sequence[Problem], codecs: Sequence[TextCodec]
) -> list[str]:
    """Return a warning for each limit that is too short for the task's own solutions, or gold answers."""
    solutions = list(getattr(task, "solutions", ()))
    what = "solutions" if solutions else "gold answers"
    texts = solutions or [problem.answer for problem in problems if problem.answer]
    texts = [text for text in texts if half_character(text) is None]  # which no tokenizer can read
    texts = texts[:: -(-len(texts) // SAMPLED) or 1]
    if not texts:
        return []
    lengths = {codec.name: _lengths(codec, texts) for codec in codecs}
    longest = max(lengths, key=lambda name: sum(lengths[name]))  # the agent that needs the most tokens
    limits = {"rollout.max_new_tokens": config.rollout.max_new_tokens}
    if config.evaluation.max_new_tokens is not None:
        limits["evaluation.max_new_tokens"] = config.evaluation.max_new_tokens
    return [
        warning for key, limit in limits.items() if (warning := _warning(key, limit, longest, what, lengths))
    ]


def _warning(key: str, limit: int, agent: str, what: str, lengths: dict[str, list[int]]) -> str | None:
    ordered = sorted(lengths[agent])
    too_long = sum(length > limit for length in ordered) / len(ordered)
    if too_long <= TOO_LONG_SHARE:
        return None
    return (
        f"{key}={limit} is too short: {too_long:.0%} of the task's {what} ({len(ordered)} measured) are "
        f"longer in the tokens of agent {agent}; the median is {ordered[len(ordered) // 2]} tokens and the "
        f"longest {ordered[-1]}. A response that is cut has no answer, so it earns nothing. Set "
        f"{key}={_enough(ordered)}, or leave it out for the task's default"
    )


def _enough(ordered: Sequence[int]) -> int:
    """Return a power of 2 with room for twice the length of all but a twentieth of the solutions."""
    needed = 2 * ordered[(len(ordered) - 1) * 19 // 20]
    return int(2 ** (needed - 1).bit_length()) if needed > 1 else 2


def _lengths(codec: TextCodec, texts: Sequence[str]) -> list[int]:
    return [len(ids) for ids in codec.tokenizer(list(texts), add_special_tokens=False).input_ids]
