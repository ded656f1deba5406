"""How one model writes a conversation with an environment: tool calls, results, and the turns between them.

A :class:`Dialect` belongs to a :class:`~hacrl.models.tokenizing.TextCodec` (``codec.dialect``). It parses what
the model wrote into a neutral :class:`~hacrl.types.Turn`, and writes neutral turns in the model's own way. An
episode is never written anew: the tokens of an observation are appended to the tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.models.tokenizing import TextCodec
from hacrl.types import FinishReason, Tool, Turn


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """What an action says. A malformed tool call is content, and ``error`` says what is wrong with it."""

    turn: Turn
    error: str = ""


@dataclass(frozen=True, slots=True)
class WrittenTurns:
    """Turns in one model's tokens. ``is_exact``: the tokens decode to the text."""

    text: str
    ids: tuple[int, ...]
    is_exact: bool = True


class Dialect:
    """The chat template and the tool format of one model."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    @property
    def fingerprint(self) -> str:
        """A hash, equal for two agents exactly if they write turns and tool calls alike."""
        raise NotImplementedError

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> ParsedAction:
        """Return the turn that an action stands for.

        ``text``: the action's whole text, a stop string included, without the stop token. Without ``tools``
        everything is content.
        """
        raise NotImplementedError

    def action(self, turn: Turn, tools: Sequence[Tool] = ()) -> str | None:
        """Return an assistant's turn as this model writes it, without its end.

        None if the model's format cannot say it: the text would not be parsed to the same turn.
        """
        raise NotImplementedError

    def observation(self, turns: Sequence[Turn], finish_reason: FinishReason) -> WrittenTurns:
        """Return what follows an action until the next one can be sampled.

        That is the end of the assistant's turn as far as the action lacks it, the turns, and the generation
        prompt. ``turns``: results of tools, or a user's turn. ``finish_reason``: how the action ended.
        """
        raise NotImplementedError
