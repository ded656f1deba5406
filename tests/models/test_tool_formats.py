"""Tool calls as models write them, and as they write them wrongly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl.models.tool_formats import BareJson, TaggedJson, TaggedXml, same_turn
from hacrl.types import Tool, ToolCall, Turn
from tests.support.families import ADD

JSON, XML, BARE = TaggedJson(), TaggedXml(), BareJson()
SAY = Tool(
    "say", "Says a text.", '{"type": "object", "properties": {"text": {"type": "string"}, "loud": {}}}'
)
TOOLS = (ADD, SAY)
TWO_AND_THREE = ToolCall("add", '{"a": 2, "b": 3}')


def turn(content: str, *calls: ToolCall) -> Turn:
    return Turn("assistant", content, calls)


def test_tagged_json() -> None:
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    assert JSON.parse(text, TOOLS).turn == turn("I add.", TWO_AND_THREE)
    assert JSON.write(turn("I add.", TWO_AND_THREE)) == text
    assert JSON.write(turn("", TWO_AND_THREE)) == text.removeprefix("I add.\n")
    packed = '\n\n<tool_call>{"arguments":{"a":2,"b":3},"name":"add"}</tool_call>\n'
    assert JSON.parse(packed, TOOLS).turn == turn("", TWO_AND_THREE)


def test_tagged_json_has_several_calls() -> None:
    calls = TWO_AND_THREE, ToolCall("say", '{"text": "</tool_call> é"}')
    text = JSON.write(turn("", *calls))
    assert text == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "say", "arguments": {"text": "</tool_call> é"}}\n</tool_call>'
    )
    assert JSON.parse(text, TOOLS).turn == turn("", *calls)  # a tag inside of a string is no tag


CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "<tool_call>add(2, 3)</tool_call>",
            "tool call 1 is not JSON: Expecting value: line 1 column 12 (char 11)",
        ),
        ('<tool_call>["add"]</tool_call>', "tool call 1 is not a JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'tool call 1 has no text under "name"'),
        ('<tool_call>{"name": "add"}</tool_call>', 'tool call 1 has no JSON object under "arguments"'),
        ('<tool_call>{"name": "add", "arguments": "{}"}</tool_call>', 'has no JSON object under "arguments"'),
        ('<tool_call>{"name": "add", "arguments": {}}', "tool call 1 does not end with </tool_call>"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "is not JSON: NaN is not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "half a character"),
        ("<tool_call>" + "[" * 100_000, "tool call 1 is not JSON"),
        (CALL + "<tool_call>{", "tool call 2 is not JSON"),
        (CALL + " The sum is 5.", "tool call 2 is not the end of the turn"),
        ('{"name": "add", "arguments": {}}</tool_call>', "</tool_call> comes without <tool_call>"),
    ],
)
def test_malformed_calls_are_content(text: str, error: str) -> None:
    parsed = JSON.parse("Well. " + text, TOOLS)
    assert parsed.turn == turn("Well. " + text)
    assert error.replace("(char 11)", "(char 17)").replace("column 12", "column 18") in parsed.error


def test_calls_in_thoughts_are_content() -> None:
    thought = "<think>\nMaybe <tool_call>{}</tool_call>?\n</think>\n\n"
    assert JSON.parse(thought + CALL, TOOLS).turn == turn(thought.rstrip(), ToolCall("add", "{}"))
    assert JSON.parse(thought + "Five.", TOOLS) == JSON.parse(thought + "Five.", ())
    unfinished = JSON.parse("<think>\nI could write " + CALL, TOOLS)
    assert (unfinished.turn.tool_calls, unfinished.error) == ((), "")


def test_bare_json() -> None:
    text = '{"name": "add", "parameters": {"a": 2, "b": 3}}'
    assert BARE.parse(text, TOOLS).turn == turn("", TWO_AND_THREE)
    assert BARE.write(turn("", TWO_AND_THREE)) == text
    assert BARE.parse(f"<|python_tag|>{text}", TOOLS).turn == turn("", TWO_AND_THREE)
    assert BARE.parse(f"I add.\n{text}\n", TOOLS).turn == turn("I add.", TWO_AND_THREE)
    assert BARE.write(turn("I add.", TWO_AND_THREE)) == f"I add.\n{text}"
    functional = '{"type": "function", "name": "add", "parameters": {"a": 2, "b": 3}}'
    assert BARE.parse(functional, TOOLS).turn == turn("", TWO_AND_THREE)


def test_bare_json_has_one_call() -> None:
    text = '{"name": "add", "parameters": {}}'
    for between in ("\n", "; ", ""):
        parsed = BARE.parse(text + between + text, TOOLS)
        assert parsed.turn == turn(text + between + text)
        assert "is not the end of the turn" in parsed.error
    assert BARE.write(turn("", TWO_AND_THREE, TWO_AND_THREE)) is None


def test_json_that_calls_no_tool_is_an_answer() -> None:
    for text in ('{"name": "Ada", "age": 36}', '{"answer": 5}', 'The object {"name": "add"} is a name.'):
        assert BARE.parse(text, TOOLS) == BARE.parse(text, ())
        assert BARE.parse(text, TOOLS).turn == turn(text)
    parsed = BARE.parse('{"name": "add", "args": {}}', TOOLS)  # "add" is a tool
    assert parsed.error == 'the tool call has no JSON object under "parameters"'
    assert "is not JSON" in BARE.parse('{"name": "add", "parameters": {"a": 2', TOOLS).error


def test_tagged_xml() -> None:
    text = (
        "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n"
        "<parameter=b>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    assert XML.parse(text, TOOLS).turn == turn("I add.", TWO_AND_THREE)
    assert XML.write(turn("I add.", TWO_AND_THREE)) == text
    without = "<tool_call>\n<function=add>\n</function>\n</tool_call>"
    assert XML.parse(without, TOOLS).turn == turn("", ToolCall("add", "{}"))
    assert XML.write(turn("", ToolCall("add", "{}"))) == without


def test_only_the_schema_tells_text_from_numbers_in_xml() -> None:
    """75 is text for a parameter of type string, a number for another; other values are JSON."""
    said = ToolCall("say", '{"text": "75", "loud": true}')
    text = XML.write(turn("", said))
    assert "<parameter=text>\n75\n</parameter>\n<parameter=loud>\ntrue\n</parameter>" in text
    assert XML.parse(text, TOOLS).turn == turn("", said)
    assert XML.parse(text, ()).turn == turn("", ToolCall("say", '{"text": 75, "loud": true}'))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{}</tool_call>", "does not start with <function=NAME>"),
        ("<tool_call><function=add>2</function></tool_call>", "does not end with </function>"),
        ("<tool_call><function=add></function>", "does not end with </tool_call>"),
    ],
)
def test_malformed_xml(text: str, error: str) -> None:
    parsed = XML.parse(text, TOOLS)
    assert (parsed.turn, parsed.error) == (turn(text), f"tool call 1 {error}")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.text(), st.lists(st.dictionaries(st.text(), VALUES, max_size=3), min_size=1, max_size=3))
def test_calls_of_any_arguments_come_back(content: str, listed: list[dict[str, object]]) -> None:
    """Whatever JSON the arguments are. Contents that look like calls, and white space at the end, are not."""
    calls = tuple(ToolCall("add", json.dumps(arguments)) for arguments in listed)
    if "<tool_call>" in content or "</think>" in content or content != content.rstrip():
        content = "x"
    said = turn(content, *calls)
    assert same_turn(JSON.parse(JSON.write(said), TOOLS).turn, said)
    assert same_turn(BARE.parse(BARE.write(turn("x", calls[0])) or "", TOOLS).turn, turn("x", calls[0]))
