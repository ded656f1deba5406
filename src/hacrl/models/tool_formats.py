"""Texts in which models write tool calls, e.g. ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``.

A format parses the text of one assistant's turn into a neutral turn, and writes a neutral turn. It is strict:
a call that is not written right is content, and a sentence says what is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hacrl.plain_text import half_character
from hacrl.types import Tool, ToolCall, Turn

_SPACE = re.compile(r"\s*")
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """What an action says. A malformed tool call is content, and ``error`` says what is wrong with it."""

    turn: Turn
    error: str = ""


class ToolFormat(Protocol):
    """How an assistant's turn with tool calls is written."""

    name: str

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedAction:
        """Return the turn that the text stands for."""
        ...

    def write(self, turn: Turn) -> str | None:
        """Return the text of an assistant's turn; None if the format has no place for one of its parts."""
        ...


class _MalformedError(Exception):
    """A tool call is not written as its format asks for; the message says why."""


class TaggedJson:
    """JSON between tags, as Qwen2.5 and Qwen3 write it; several calls a turn, text before them.

    It is also the format of models whose chat template knows no tools.
    """

    name = "tagged_json"
    opening, closing = "<tool_call>", "</tool_call>"

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedAction:
        """Return the turn that the text stands for."""
        spoken = _after_thought(text)
        start = -1 if spoken is None else text.find(self.opening, spoken)
        if spoken is None or start < 0:
            is_unopened = spoken is not None and self.closing in text[spoken:]
            error = f"{self.closing} comes without {self.opening}" if is_unopened else ""
            return ParsedAction(Turn("assistant", text), error)
        calls: list[ToolCall] = []
        at = start
        try:
            while at < len(text):
                call, at = self._read(text, at, tools)
                calls.append(call)
                at = _skip(text, at)
        except _MalformedError as error:
            return ParsedAction(Turn("assistant", text), f"tool call {len(calls) + 1} {error}")
        return ParsedAction(Turn("assistant", text[:start].rstrip(), tuple(calls)))

    def _read(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[ToolCall, int]:
        """Return the call that starts here and where it ends."""
        if not text.startswith(self.opening, at):
            raise _MalformedError("is not the end of the turn: nothing but further tool calls may follow one")
        call, at = self._body(text, _skip(text, at + len(self.opening)), tools)
        at = _skip(text, at)
        if not text.startswith(self.closing, at):
            raise _MalformedError(f"does not end with {self.closing}")
        return call, at + len(self.closing)

    def _body(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[ToolCall, int]:
        content, end = _decode(text, at)
        return _call(content, "arguments"), end

    def write(self, turn: Turn) -> str:
        """Return the text of an assistant's turn."""
        calls = [f"{self.opening}\n{self._written(call)}\n{self.closing}" for call in turn.tool_calls]
        return "\n".join(([turn.content] if turn.content or not calls else []) + calls)

    def _written(self, call: ToolCall) -> str:
        return f'{{"name": {_dump(call.name)}, "arguments": {_dump(json.loads(call.arguments))}}}'


class TaggedXml(TaggedJson):
    """A tag for the function and one for each argument, as Qwen3.5 and Nemotron 3 write them.

    A value is text for an argument of type string, and JSON otherwise; only the tool's schema tells.
    """

    name = "tagged_xml"
    _function = re.compile(r"<function=([^\n>]+)>\s*")
    _parameter = re.compile(r"<parameter=([^\n>]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def _body(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[ToolCall, int]:
        function = self._function.match(text, at)
        if function is None:
            raise _MalformedError("does not start with <function=NAME>")
        arguments: dict[str, Any] = {}
        types = _argument_types(function[1], tools)
        at = function.end()
        while parameter := self._parameter.match(text, at):
            arguments[parameter[1]] = _value(parameter[2], types.get(parameter[1]))
            at = parameter.end()
        if not text.startswith("</function>", at):
            raise _MalformedError("does not end with </function>")
        return _call({"name": function[1], "arguments": arguments}, "arguments"), at + len("</function>")

    def _written(self, call: ToolCall) -> str:
        parts = [
            f"<parameter={name}>\n{value if isinstance(value, str) else _dump(value)}\n</parameter>\n"
            for name, value in json.loads(call.arguments).items()
        ]
        return f"<function={call.name}>\n{''.join(parts)}</function>"


class BareJson:
    """One JSON object without tags at the end of a turn, as Llama 3 writes it.

    Llama's chat template has room for one call a turn, and leaves out text before it. Models write text all
    the same, so text on lines before the call is content.
    """

    name = "bare_json"
    # "<|python_tag|>" is a control token that some models write before a call
    _start = re.compile(r'^[ \t]*(?:<\|python_tag\|>)?(?=\{\s*"(?:type|name)"\s*:)', re.MULTILINE)

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedAction:
        """Return the turn that the text stands for."""
        spoken = _after_thought(text)
        found = None if spoken is None else self._start.search(text, spoken)
        if found is None:
            return ParsedAction(Turn("assistant", text))
        try:
            content, end = _decode(text, found.end())
            if "parameters" not in content and content.get("name") not in {tool.name for tool in tools}:
                return ParsedAction(Turn("assistant", text))  # some other JSON, for example the answer
            call = _call(content, "parameters")
            if _skip(text, end) < len(text):
                raise _MalformedError(
                    "is not the end of the turn: nothing may follow it, not even a second one"
                )
        except _MalformedError as error:
            return ParsedAction(Turn("assistant", text), f"the tool call {error}")
        return ParsedAction(Turn("assistant", text[: found.start()].rstrip(), (call,)))

    def write(self, turn: Turn) -> str | None:
        """Return the text of an assistant's turn; None for a turn with several calls."""
        if not turn.tool_calls:
            return turn.content
        if len(turn.tool_calls) > 1:
            return None
        (call,) = turn.tool_calls
        written = f'{{"name": {_dump(call.name)}, "parameters": {_dump(json.loads(call.arguments))}}}'
        return f"{turn.content}\n{written}" if turn.content else written


FORMATS: tuple[ToolFormat, ...] = (TaggedJson(), TaggedXml(), BareJson())


def schema(tool: Tool) -> dict[str, Any]:
    """Return a tool as chat templates know it."""
    function = {"name": tool.name, "description": tool.description, "parameters": json.loads(tool.parameters)}
    return {"type": "function", "function": function}


def describe_tools(tools: Sequence[Tool]) -> str:
    """Return what a model is told about tools if its chat template cannot tell it."""
    listed = "\n".join(_dump(schema(tool)["function"]) for tool in tools)
    return (
        f"You can call these tools:\n{listed}\n\nTo call a tool, end your turn with the call:\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>\n'
        "The result comes back between <tool_response> and </tool_response>."
    )


def written_result(content: str) -> tuple[str, str, str]:
    """Return a tool's result between tags, in three parts of which the content is the second."""
    return "<tool_response>\n", content, "\n</tool_response>"


def same_turn(one: Turn, other: Turn) -> bool:
    """Return whether two turns of an assistant say the same, however their arguments are spaced."""
    return (one.content, _plain_calls(one)) == (other.content, _plain_calls(other))


def _plain_calls(turn: Turn) -> list[tuple[str, str]]:
    return [(call.name, _dump(json.loads(call.arguments))) for call in turn.tool_calls]


def _after_thought(text: str) -> int | None:
    """Return where the text behind a thought starts; None if the thought has no end."""
    end = text.rfind(_END_OF_THOUGHT)
    if end >= 0:
        return end + len(_END_OF_THOUGHT)
    return None if text.lstrip().startswith("<think>") else 0


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _decode(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return the JSON object that starts here and where it ends."""
    try:
        content, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise _MalformedError(f"is not JSON: {str(error) or 'nested too deeply'}") from error
    if not isinstance(content, dict):
        raise _MalformedError("is not a JSON object")
    return content, end


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _call(content: dict[str, Any], key: str) -> ToolCall:
    """Return the call that a JSON object stands for; ``key``: where its arguments are."""
    name, arguments = content.get("name"), content.get(key)
    if not isinstance(name, str) or not name:
        raise _MalformedError('has no text under "name"')
    if not isinstance(arguments, dict):
        raise _MalformedError(f'has no JSON object under "{key}"')
    written = _dump(arguments)
    if half_character(name + written) is not None:
        raise _MalformedError("contains half a character")
    return ToolCall(name, written)


def _dump(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False)


def _argument_types(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON types of a tool's arguments as its schema states them."""
    for tool in tools:
        if tool.name == name:
            properties = json.loads(tool.parameters).get("properties", {})
            return {key: schema.get("type") for key, schema in properties.items()}
    return {}


def _value(text: str, kind: Any) -> Any:
    """Return an argument's value: text if the schema says so, else JSON if the text is JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
