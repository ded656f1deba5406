"""Tools' schemas equal those of transformers; what has none is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from hacrl.environments.schemas import tool_of


def no_arguments():
    """Look around.

    Twice, if need be.
    """


def plain(a: int, b: float = 1.0, c: str = "x", d: bool = False, e: Any = None, f: list = (), g: dict = {}):  # noqa: B006
    """Take plain types.

    Args:
        a: An integer.
        b: A number,
            on two lines: with a colon.
        c: A text.
        d: Yes or no.
        e: Anything.
        f: A list.

        g: A mapping.

    Returns:
        Nothing.

    Raises:
        ValueError: never
    """


def nested(a: list[int], b: dict[str, list[float]], c: tuple[int, str], d: list[dict[str, Any]]) -> int:
    """Take nested types.

    Args:
        a: Integers
        b: Lists by name
        c: A pair
        d: Records
    """
    return 0


def unions(
    a: int | None,
    b: Optional[str],  # noqa: UP045
    c: int | str,
    d: Union[int, list[int]],  # noqa: UP007
    e: Literal["x", "y"],
    f: Literal[1, "z"] = 1,
):
    """Take one of several types.

    Args:
        a: An integer or nothing
        b: A text or nothing
        c: An integer or a text
        d: One or many
        e: x or y
        f: One or z
    """


def choices(drink: str, size: int = 1):
    """Order.

    Args:
        drink: What to drink (choices: ["tea", "coffee"])
        size: How much
    """


class Environment:
    async def method(self, text: str) -> str:
        """Say something.

        Args:
            text: What to say
        """
        return text


@pytest.mark.parametrize(
    "function", [no_arguments, plain, nested, unions, choices, Environment().method, Environment.method]
)
def test_schemas_are_those_of_transformers(function: Callable[..., Any]):
    expected = get_json_schema(function)["function"]
    tool = tool_of(function, function.__name__)
    assert (tool.name, tool.description) == (expected["name"], expected["description"])
    assert json.loads(tool.parameters) == expected["parameters"]


def test_a_schema_by_hand():
    assert json.loads(tool_of(choices, "order").parameters) == {
        "type": "object",
        "properties": {
            "drink": {"type": "string", "enum": ["tea", "coffee"], "description": "What to drink"},
            "size": {"type": "integer", "description": "How much"},
        },
        "required": ["drink"],
    }


def no_docstring(a: int): ...


def no_hint(a):
    """Do.

    Args:
        a: x
    """


def no_line(a: int):
    """Do.

    Args:
        b: x
    """


def any_number(*a: int):
    """Do.

    Args:
        a: x
    """


def positional(a: int, /):
    """Do.

    Args:
        a: x
    """


def strange(a: tuple[int, ...]):
    """Do.

    Args:
        a: x
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "the tool 'f' has no docstring"),
        (no_hint, "the tool 'f': the argument 'a' has no type hint"),
        (no_line, "the argument 'a' has no line in the docstring's section 'Args:'"),
        (any_number, "the argument 'a' stands for any number of arguments"),
        (positional, "the argument 'a' has no name for the agent to give"),
        (strange, r"has no JSON schema; use list\[...\]"),
    ],
)
def test_what_has_no_schema(function: Callable[..., Any], message: str):
    with pytest.raises(ValueError, match=message):
        tool_of(function, "f")
