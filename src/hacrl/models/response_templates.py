"""Tool calls in a format that only the tokenizer's own response template can parse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hacrl.models.tool_formats import ParsedAction, schema
from hacrl.types import Tool, ToolCall, Turn


class ResponseTemplate:
    """The response template of a tokenizer (``tokenizer.response_template`` of transformers).

    It reads tool calls and does not write them: such formats are made of control tokens, which other agents'
    texts must never become. So a learner with such a format learns from its own episodes and from those of
    agents with the same tokenizer and template.
    """

    name = "response_template"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, tokenizer: Any) -> ResponseTemplate | None:
        """Return the format of a tokenizer; None if the tokenizer has no response template."""
        return cls(tokenizer) if getattr(tokenizer, "response_template", None) else None

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedAction:
        """Return the turn that the text stands for."""
        spoken = Turn("assistant", text)
        try:
            message = self._tokenizer.parse_response(text, prefix="", tools=[schema(tool) for tool in tools])
            calls = tuple(
                ToolCall(
                    call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
                )
                for call in message.get("tool_calls") or ()
            )
        except Exception as error:  # a response template is a program, and the text is whatever was sampled
            return ParsedAction(spoken, f"the tool call cannot be parsed: {error}")
        if not calls:
            return ParsedAction(spoken)
        thought, content = message.get("reasoning_content"), message.get("content") or ""
        return ParsedAction(
            Turn("assistant", f"<think>\n{thought}\n</think>\n\n{content}" if thought else content, calls)
        )

    def write(self, turn: Turn) -> str | None:
        """Return the text of a turn without tool calls; None for others."""
        return None if turn.tool_calls else turn.content
