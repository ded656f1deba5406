"""What a run reports of one agent's episodes in one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hacrl.types import Episode, Rollout, VerifiedRollout

MOST_FAILURES = 3  # kinds of failure that a report names


@dataclass(frozen=True)
class EpisodesReport:
    """One agent's episodes in one step. Means are over all episodes, failed ones included."""

    turns: float  # actions per episode, mean
    tool_calls: float  # per episode, mean
    observation_tokens: float  # per episode, mean
    tool_errors: int  # tool calls whose result is an error
    unread_calls: int  # actions with a tool call that could not be read
    failed: int  # episodes whose environment failed
    timeouts: int  # those of them whose environment did not answer in time
    ends: dict[str, int] = field(default_factory=dict)  # why episodes ended -> episodes
    failures: dict[str, int] = field(default_factory=dict)  # most frequent reason first -> episodes


def episodes_report(rollouts: Sequence[VerifiedRollout]) -> EpisodesReport | None:
    """Summarise one agent's episodes; None if its rollouts are no episodes."""
    found = [verified.rollout for verified in rollouts]
    episodes = [rollout.episode for rollout in found if rollout.episode is not None]
    if not episodes:
        return None
    failed = [episode for episode in episodes if episode.end == "failed"]
    # Equal counts in the order of their texts, so that equal steps give equal reports.
    reasons = sorted(Counter(map(_reason, failed)).items(), key=lambda item: (-item[1], item[0]))
    return EpisodesReport(
        turns=_mean(len(_actions(rollout)) for rollout in found),
        tool_calls=_mean(_tool_calls(rollout) for rollout in found),
        observation_tokens=_mean(len(rollout.token_ids) - rollout.num_tokens for rollout in found),
        tool_errors=sum(episode.tool_errors for episode in episodes),
        unread_calls=sum(len(episode.unread_calls) for episode in episodes),
        failed=len(failed),
        timeouts=sum(episode.failure_kind == "timeout" for episode in failed),
        ends=dict(sorted(Counter(episode.end for episode in episodes).items())),
        failures=dict(reasons[:MOST_FAILURES]),
    )


def _reason(episode: Episode) -> str:
    return episode.failure[:200]


def _actions(rollout: Rollout) -> list[object]:
    return [segment for segment in rollout.segments if segment.kind == "action"]


def _tool_calls(rollout: Rollout) -> int:
    return sum(len(turn.tool_calls) for segment in rollout.segments for turn in segment.turns)


def _mean(values: Iterable[int]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)
