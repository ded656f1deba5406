"""Stop strings: texts that end a response, wherever the boundaries of its tokens are.

A response ends with the first token after which its text contains a stop string. Every engine may generate
more: :meth:`StopStrings.endings` decides where a response ends, so that it is the same for all of them. An
engine ends a response early to save time. It needs no more than :meth:`StopStrings.are_in` for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.models.tokenizing import TextCodec

# A token that is no text of its own, such as a part of a character, makes a stop string longer in tokens
# than in bytes. The engines look a little further back for that.
SPARE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Ending:
    """Where a stop string ended a response: its number of tokens, and its text before and from the string."""

    tokens: int
    text: str
    stop_text: str


class StopStrings:
    """The stop strings of a run, and the tokenizer of the agent that responds."""

    def __init__(self, codec: TextCodec, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self._codec = codec
        longest = max((len(string.encode()) for string in strings), default=0)
        self.window = longest + SPARE_TOKENS  # tokens at the end of a response that hold a new stop string

    def are_in(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """Return for each response, or for the end of each, whether its text contains a stop string."""
        if not responses:
            return []
        texts = self._codec.decode_responses(responses, [()] * len(responses))
        return [self._first(text) is not None for text in texts]

    def endings(
        self, responses: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> list[Ending | None]:
        """Return where each response ends because of a stop string; None for one without a stop string.

        ``texts`` are the texts of the whole responses, as ``decode_responses`` returns them.
        """
        found: list[Ending | None] = [None] * len(responses)
        # Bisection: the tokens up to ``high`` contain a string, those up to ``low`` do not.
        low = {i: 0 for i, text in enumerate(texts) if self._first(text) is not None}
        high = {i: len(responses[i]) for i in low}
        text_at = {i: texts[i] for i in low}
        while searched := [i for i in low if high[i] - low[i] > 1]:
            middle = {i: (low[i] + high[i]) // 2 for i in searched}
            heads = self._codec.decode_responses(
                [responses[i][: middle[i]] for i in searched], [prompts[i] for i in searched]
            )
            for i, text in zip(searched, heads, strict=True):
                if self._first(text) is None:
                    low[i] = middle[i]
                else:
                    high[i], text_at[i] = middle[i], text
        for i, text in text_at.items():
            start = self._first(text)
            assert start is not None
            found[i] = Ending(high[i], text[:start], text[start:])
        return found

    def _first(self, text: str) -> int | None:
        """Return where the first stop string in the text begins."""
        return min((at for string in self.strings if (at := text.find(string)) >= 0), default=None)
