"""Write an episode as a conversation that people can read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hacrl.types import Episode, FinishReason, Segment, Turn

ENDS = {
    "done": "the environment ended it",
    "answered": "the agent called no tool",
    "max_turns": "task.options.max_turns ended it",
    "max_tokens": "rollout.max_new_tokens or task.options.max_turn_tokens ended it",
    "max_seconds": "task.options.max_seconds ended it",
    "failed": "the environment failed",
}
_CUT: dict[FinishReason | None, str] = {"length": " (cut)", "stop_string": " (stop string)"}


def conversation(segments: Sequence[Segment]) -> str:
    """Return the turns of an episode, each under a heading that says who speaks."""
    return "\n".join(line for segment in segments for line in _segment_lines(segment))


def how_it_ended(episode: Episode) -> str:
    """Return why an episode ended, and what failed."""
    failure = f": it {episode.failure}" if episode.failure else ""
    unread = "".join(f"; a tool call could not be read: {error}" for error in episode.unread_calls)
    return f"{ENDS[episode.end]}{failure}{unread}"


def _segment_lines(segment: Segment) -> Iterator[str]:
    if not segment.turns:
        yield segment.text
    for turn in segment.turns:
        yield f"[{_speaker(turn)}]{_CUT.get(segment.finish_reason, '')}"
        if turn.content:
            yield turn.content
        for call in turn.tool_calls:
            yield f"-> {call.name}({call.arguments})"


def _speaker(turn: Turn) -> str:
    return f"{turn.role} {turn.tool}" if turn.tool else turn.role
