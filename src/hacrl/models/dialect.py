"""How one model writes a conversation with an environment: tool calls, results, and the turns between them.

A :class:`Dialect` belongs to a :class:`~hacrl.models.tokenizing.TextCodec` (``codec.dialect``). It parses
what the model wrote into a neutral :class:`~hacrl.types.Turn`, and writes neutral turns in the model's own
way. What was sampled is never written anew: the tokens of an observation are appended to the tokens so far.

The chat template decides how turns look. Short conversations that are rendered through the template show
whether it knows tools, how it writes tool calls, and what it puts between two turns of the assistant. For a
template that knows no tools, and without a template, the prompt's text describes the tools.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from hacrl.errors import ModelError
from hacrl.models.chat_rendering import Piece, joined, rendered_pieces, template_parts
from hacrl.models.response_templates import ResponseTemplate
from hacrl.models.tokenizing import BROKEN_CHARACTER, TextCodec, plain_conversation
from hacrl.models.tool_formats import (
    FORMATS,
    ParsedAction,
    TaggedJson,
    ToolFormat,
    describe_tools,
    same_turn,
    schema,
    written_result,
)
from hacrl.types import FinishReason, Role, Tool, ToolCall, Turn

__all__ = ["Dialect", "ParsedAction", "WrittenTurns"]

# A conversation with a made-up tool, from which the chat template's format is recognised.
_PROBE_TOOL = Tool(
    "probe_tool",
    "Probes the template.",
    '{"type": "object", "properties": {"words": {"type": "string"}, "count": {"type": "integer"}}, '
    '"required": ["words", "count"]}',
)
_PROBE_CALL = ToolCall("probe_tool", '{"words": "two words", "count": 3}')
_SPOKEN = "whatassistantsaid"  # stands for an action when a template is rendered to see what follows one
_HALF_CHARACTERS = re.compile("[\ud800-\udfff]")
_THOUGHT, _END_OF_THOUGHT = "<think>\n", "</think>"  # as Qwen and DeepSeek write thoughts
OBSERVATION_CACHE_SIZE = 16384  # equal observations of a step are written once
FRAME_CACHE_SIZE = 1024  # by roles and tools of the turns


@dataclass(frozen=True, slots=True)
class WrittenTurns:
    """What follows an action, as text and in one model's tokens."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """A short conversation with an action, in which observations are rendered.

    It is the same for all episodes, because some templates write earlier turns anew, e.g. without thoughts.
    """

    action: Turn
    parts: tuple[str, ...]  # what the template writes before, between and behind the contents
    start: int  # where in the first part the action has ended


class Dialect:
    """The chat template and the tool format of one model."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._observation = lru_cache(maxsize=OBSERVATION_CACHE_SIZE)(self._write_observation)
        self._frame = lru_cache(maxsize=FRAME_CACHE_SIZE)(self._find_frame)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of the chat template's tool calls, or tagged JSON if the template knows no tools."""
        return self._template_format or TaggedJson()

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template describes tools, and has a place for their calls and results."""
        return self._template_format is not None

    @cached_property
    def fingerprint(self) -> str:
        """A hash, equal for two agents exactly if they write turns and tool calls alike.

        The stop token does not count: it is the tokenizer's, and a learner writes its own.
        """
        codec = self._codec
        template = codec.tokenizer.chat_template if codec.use_chat_template else None
        parts = [template, self.tool_format.name, self.knows_tools, codec.chat_template_args]
        identity = json.dumps(parts if codec.use_chat_template else parts[:2], sort_keys=True, default=str)
        return hashlib.sha256(identity.encode()).hexdigest()

    # -- the prompt

    def prompt_pieces(self, turns: Sequence[Turn], tools: Sequence[Tool], opening: str = "") -> list[Piece]:
        """Return the text of a prompt that describes the tools; ``opening`` is added to the last turn."""
        if (tools or _has_tool_turns(turns)) and not self.knows_tools:
            turns = merged_turns(_without_tool_turns(_with_described_tools(turns, tools)))

        def render(contents: Sequence[str]) -> str:
            asked = turns[-1]._replace(content=turns[-1].content + contents[0])
            return self._render([*turns[:-1], asked], tools)

        if not opening:
            return [Piece(render([""]))]
        try:
            parts = template_parts(render, 1)
        except LookupError as error:
            raise ModelError(
                f"agent {self._codec.name!r}: its chat template has no place for what an environment adds to "
                f"the question: {error}; set agents.{self._codec.name}.chat_template=false"
            ) from error
        return rendered_pieces(render, [_clean(opening)], parts)

    def _render(self, turns: Sequence[Turn], tools: Sequence[Tool]) -> str:
        if not self._codec.use_chat_template:
            return plain_conversation(turns)
        described = {"tools": [schema(tool) for tool in tools]} if tools and self.knows_tools else {}
        return self._codec.render(_messages(turns), add_generation_prompt=True, **described)

    # -- actions

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> ParsedAction:
        """Return the turn that an action stands for.

        ``text``: the action's whole text, a stop string included, without the stop token. Without ``tools``
        everything is content. A thought that the generation prompt opened is content, too.
        """
        if self._opens_thought:
            thought, end, rest = text.partition(_END_OF_THOUGHT)
            text = rest.lstrip() if end and not thought.strip() else f"{_THOUGHT}{text}"
        return self.tool_format.parse(text, tools) if tools else ParsedAction(Turn("assistant", text))

    def action(self, turn: Turn, tools: Sequence[Tool] = ()) -> str | None:
        """Return an assistant's turn as this model writes it, without the stop token.

        None if the model's format cannot say it: the text would not be parsed to the same turn.
        """
        text = self.tool_format.write(turn)
        if text is not None and self._opens_thought:
            has_thought = text.startswith(_THOUGHT)
            text = text.removeprefix(_THOUGHT) if has_thought else f"\n{_END_OF_THOUGHT}\n\n{text}"
        return text if text is not None and same_turn(self.parse(text, tools).turn, turn) else None

    @cached_property
    def _opens_thought(self) -> bool:
        """Whether the generation prompt ends with the start of a thought."""
        return self._codec.use_chat_template and self._render([Turn("user", "x")], ()).endswith(_THOUGHT)

    # -- observations

    def observation(self, turns: Sequence[Turn], finish_reason: FinishReason) -> WrittenTurns:
        """Return what follows an action until the next one can be sampled.

        That is the end of the assistant's turn as far as the action lacks it, the turns, and the generation
        prompt. ``turns``: results of tools, or a user's turn. ``finish_reason``: how the action ended.
        Without a chat template, a user's turn is its text and nothing else.
        """
        return self._observation(tuple(turns), finish_reason)

    def _write_observation(self, turns: tuple[Turn, ...], finish_reason: FinishReason) -> WrittenTurns:
        turns = tuple(turn._replace(content=_clean(turn.content)) for turn in turns)
        if not self._codec.use_chat_template:
            pieces = _plain_observation(turns)
            return WrittenTurns(joined(pieces), self._codec.encode_continuation(pieces))
        pieces = self._after_action(turns if self.knows_tools else merged_turns(_without_tool_turns(turns)))
        # The stop token is in the action already. It is encoded with what follows, and then left out, because
        # some tokenizers treat the start of a text in their own way.
        text, ids = joined(pieces), self._codec.encode_continuation(pieces)
        end = self._codec.turn_end
        if finish_reason == "stop" and end is not None and end.text in pieces[0].text and end.id in ids:
            return WrittenTurns(text.partition(end.text)[2], ids[ids.index(end.id) + 1 :])
        if finish_reason == "stop" and ids and ids[0] in self._codec.stop_ids:
            # Some models stop with the token that starts the next turn, e.g. <|user|>.
            start = str(self._codec.tokenizer.convert_ids_to_tokens(ids[0]))
            return WrittenTurns(text.removeprefix(start), ids[1:])
        return WrittenTurns(text, ids)

    def _after_action(self, turns: Sequence[Turn]) -> list[Piece]:
        """Return what the template writes behind an action, from the end of the assistant's turn on."""
        frame = self._frame(tuple((turn.role, turn.tool) for turn in turns))

        def render(contents: Sequence[str]) -> str:
            return self._render_answer(frame.action, turns, contents)

        pieces = rendered_pieces(render, [turn.content for turn in turns], frame.parts)
        return [Piece(pieces[0].text[frame.start :]), *pieces[1:]]

    def _find_frame(self, answers: tuple[tuple[Role, str], ...]) -> _Frame:
        """Return the conversation in which turns of these roles and tools are rendered."""
        turns = [Turn(role, "", tool=tool) for role, tool in answers]
        name = next((turn.tool for turn in turns if turn.tool), _PROBE_TOOL.name)
        call = ToolCall(name, json.dumps({"x": _SPOKEN}))
        end = self._codec.turn_end
        reason: Exception = LookupError("no turns follow")
        for action in (Turn("assistant", _SPOKEN), Turn("assistant", "", (call,))):
            try:
                parts = template_parts(partial(self._render_answer, action, turns), len(turns))
            except (ModelError, LookupError) as error:  # some templates want results to follow a call
                reason = error
                continue
            start = parts[0].rfind(_SPOKEN) + len(_SPOKEN)
            if action.tool_calls:  # what comes before the end of the turn belongs to the call
                start = parts[0].find(end.text, start) if end is not None else -1
            if start >= len(_SPOKEN):
                return _Frame(action, parts, start)
        raise ModelError(
            f"agent {self._codec.name!r}: its chat template cannot write turns of "
            f"{' and '.join(role for role, _ in answers)} behind an assistant's: {reason}; "
            f"set agents.{self._codec.name}.chat_template=false to play in plain text"
        )

    def _render_answer(self, action: Turn, turns: Sequence[Turn], contents: Sequence[str]) -> str:
        answered = [turn._replace(content=text) for turn, text in zip(turns, contents, strict=True)]
        messages = _messages([Turn("user", "x"), action, *answered])
        # A tokenizer with several templates has one for conversations with tools.
        has_several = isinstance(self._codec.tokenizer.chat_template, dict) and _has_tool_turns(turns)
        described = {"tools": [schema(_PROBE_TOOL)]} if has_several else {}
        return self._codec.render(messages, add_generation_prompt=True, **described)

    # -- what the template knows

    @cached_property
    def _template_format(self) -> ToolFormat | None:
        """The format of the template's tool calls; None if it lacks a place for tools, calls or results."""
        if not self._codec.use_chat_template:
            return None
        asked, tools = Turn("user", "x"), [schema(_PROBE_TOOL)]
        call, result = Turn("assistant", "", (_PROBE_CALL,)), Turn("tool", "42 degrees", tool="probe_tool")
        try:
            described = self._codec.render(_messages([asked]), tools=tools)
            called = self._codec.render(_messages([asked, call, result]), tools=tools)
            answered = joined(self._after_action([result]))
        except ModelError:
            return None
        if _PROBE_TOOL.description not in described or result.content not in answered:
            return None
        for known in FORMATS:
            if (known.write(call) or "") in called:
                return known
        return ResponseTemplate.of(self._codec.tokenizer)


def merged_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with neighbouring turns of the user as one: some templates want alternating roles."""
    merged: list[Turn] = []
    for turn in turns:
        if merged and turn.role == merged[-1].role == "user":
            merged[-1] = turn._replace(content=merged[-1].content + "\n" + turn.content)
        else:
            merged.append(turn)
    return merged


def _has_tool_turns(turns: Sequence[Turn]) -> bool:
    return any(turn.tool_calls or turn.role == "tool" for turn in turns)


def _without_tool_turns(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with tool calls and results as text, for templates that know neither."""
    written = []
    for turn in turns:
        if turn.role == "tool":
            turn = Turn("user", "".join(written_result(turn.content)))
        elif turn.tool_calls:
            turn = Turn(turn.role, TaggedJson().write(turn))
        written.append(turn)
    return written


def _with_described_tools(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Turn]:
    """Return the turns with the tools described in the system's turn, or else in the user's first one."""
    if not tools:
        return list(turns)
    described = describe_tools(tools)
    place = 0 if turns[0].role == "system" else [turn.role for turn in turns].index("user")
    turn = turns[place]
    parts = (turn.content, described) if turn.role == "system" else (described, turn.content)
    return [*turns[:place], turn._replace(content="\n\n".join(parts)), *turns[place + 1 :]]


def _plain_observation(turns: Sequence[Turn]) -> list[Piece]:
    pieces = []
    for turn in turns:
        if turn.role == "tool":
            before, content, after = written_result(turn.content)
            pieces += [Piece("\n" + before), Piece(content, True), Piece(after + "\n")]
        else:
            pieces.append(Piece(turn.content, True))
    return pieces


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the turns as chat templates read them; results name the calls before them by number."""
    messages = []
    calls = results = 0
    for turn in turns:
        message = turn.as_message()
        for call in message.get("tool_calls", ()):
            call["id"] = f"call{calls:05d}"  # nine letters and digits, as Mistral's template demands
            calls += 1
        if turn.role == "tool":
            message["tool_call_id"] = f"call{results:05d}"
            results += 1
        messages.append(message)
    return messages


def _clean(text: str) -> str:
    """Return the text with lone surrogates replaced, which no tokenizer can read."""
    return _HALF_CHARACTERS.sub(BROKEN_CHARACTER, text)
