"""Read an endpoint's reply: text, why it ended, and log-probabilities that provably belong to the text.

Nothing in a reply is trusted. Log-probabilities are used only if their tokens spell the text. Endpoints that
count the stop token list it last, behind the text; others leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl.config.endpoint import EndpointInterface
from hacrl.plain_text import half_character
from hacrl.types import FinishReason

IMPOSSIBLE = -9999.0  # what servers write for a log-probability of minus infinity, which cannot be sampled
ROUNDING = 1e-3  # nats: by so much a log-probability may be above 0


class UnusableReplyError(Exception):
    """A reply that holds no response; the message says why."""


@dataclass(frozen=True)
class Reply:
    """One response."""

    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...] = ()  # one per token; empty: none that belong to the text
    tokens: int = 0  # that the endpoint counts; 0: it does not say
    # Whether the response ended with a stop token which a learner may write as its own. False also if the
    # log-probabilities leave the stop token out, or if it may have been a stop string.
    has_stop_token: bool = False
    stop_text: str = ""  # the stop string that ended the response


def read_reply(body: Any, interface: EndpointInterface, has_stop_strings: bool) -> Reply:
    """Return the response in the JSON of a reply. Raise UnusableReplyError if there is none."""
    choices = body.get("choices") if isinstance(body, Mapping) else None
    choice = choices[0] if isinstance(choices, Sequence) and choices else None
    if not isinstance(choice, Mapping):
        raise UnusableReplyError("the reply has no choices")
    text = _text(choice, interface)
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise UnusableReplyError(f"finish_reason is {reason!r:.40}")
    stop_string = choice.get("stop_reason")
    stop_string = stop_string if isinstance(stop_string, str) and reason == "stop" else None
    parts = _token_parts(choice.get("logprobs"), interface)
    tokens = len(parts) or _counted(body.get("usage"))
    spelt = _spelt(parts, text, stop_string)
    finish: FinishReason = "stop_string" if stop_string is not None else reason
    if spelt is None:
        # a server that does not name the stop string may mean it when it says "stop"
        is_sure = "stop_reason" in choice or not has_stop_strings
        return Reply(text, finish, (), tokens, finish == "stop" and is_sure, stop_string or "")
    rest = spelt
    if finish == "stop_string":
        return Reply(text, finish, tuple(value for _, value in parts), len(parts), False, rest)
    has_stop_token = finish == "stop" and (bool(rest) or not parts[-1][0])
    return Reply(text, finish, tuple(value for _, value in parts), len(parts), has_stop_token)


def _text(choice: Mapping[str, Any], interface: EndpointInterface) -> str:
    holder: Any = choice
    if interface == "chat":
        holder = choice.get("message")
        holder = holder if isinstance(holder, Mapping) else {}
    text = holder.get("content" if interface == "chat" else "text")
    if not isinstance(text, str):
        raise UnusableReplyError("the reply has no text" + (" (a refusal)" if holder.get("refusal") else ""))
    if half_character(text) is not None:
        raise UnusableReplyError("the reply's text contains half a character")
    return text


def _token_parts(logprobs: Any, interface: EndpointInterface) -> list[tuple[bytes, float]]:
    """Return each token's bytes and log-probability; nothing if any of them is missing or impossible."""
    if not isinstance(logprobs, Mapping):
        return []
    if interface == "chat":
        entries = logprobs.get("content")
        found = [_chat_part(entry) for entry in entries] if isinstance(entries, Sequence) else []
    else:
        texts, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
        if not isinstance(texts, Sequence) or not isinstance(values, Sequence) or len(texts) != len(values):
            return []
        found = [_part(text, None, value) for text, value in zip(texts, values, strict=True)]
    parts = [part for part in found if part is not None]
    return parts if len(parts) == len(found) else []


def _chat_part(entry: Any) -> tuple[bytes, float] | None:
    if not isinstance(entry, Mapping):
        return None
    return _part(entry.get("token"), entry.get("bytes"), entry.get("logprob"))


def _part(text: Any, raw: Any, logprob: Any) -> tuple[bytes, float] | None:
    """``raw``: the token's bytes as numbers; a part of a character has no text of its own."""
    if not isinstance(logprob, int | float) or isinstance(logprob, bool):
        return None
    if not (math.isfinite(logprob) and IMPOSSIBLE < logprob <= ROUNDING):
        return None
    try:
        content = bytes(raw) if isinstance(raw, list) else str(text).encode()
    except (ValueError, TypeError):  # no bytes, or half a character
        return None
    return content, min(0.0, float(logprob))


def _spelt(parts: Sequence[tuple[bytes, float]], text: str, stop_string: str | None) -> str | None:
    """Return what the tokens spell behind the text: nothing, a stop token, or the stop string.

    None: they do not spell the text.
    """
    if not parts:
        return None
    whole, target = b"".join(content for content, _ in parts), text.encode()
    if not whole.startswith(target):
        return None
    rest = whole[len(target) :]
    if stop_string is not None:
        is_expected = not rest or rest.startswith(stop_string.encode())
    else:  # at most one token
        is_expected = not rest or rest == parts[-1][0]
    if not is_expected:
        return None
    try:
        return rest.decode()
    except UnicodeDecodeError:
        return None


def _counted(usage: Any) -> int:
    count = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    return count if type(count) is int and count > 0 else 0
