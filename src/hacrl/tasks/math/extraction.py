r"""Extract the final answer of a response: the content of its last ``\boxed{...}``.

A response without a box has no answer. Only a window around the last box is read, so the time does not
depend on the length of the response.
"""

from __future__ import annotations

import re

MAX_ANSWER = 2000  # characters; the longest gold answer of the usual benchmarks has about 200

# A box command (models also write a doubled backslash), an escaped character, or a brace.
_TOKEN = re.compile(r"\\{1,2}(boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
# The content must end there: \boxed 5,000 and \boxed 5\% are not 5.
_UNBRACED = re.compile(r"\s{0,8}(-?[0-9A-Za-z][0-9A-Za-z./]{0,63})(?=[,;:!?]?(?:\s|$|\$|\\[)\]]|\}))")
_OPENING = re.compile(r"\s{0,8}\{")


def extract_answer(response: str) -> str | None:
    r"""Return the content of the last box; None if there is no box or it is empty, unclosed or too long.

    Of nested boxes the outermost counts. ``\boxed 2`` without braces ends at the next space.
    """
    last = max(response.rfind("\\boxed"), response.rfind("\\fbox"))
    if last < 0:
        return None
    # A box around the last one must begin within MAX_ANSWER characters: otherwise its content is too long.
    window = response[max(0, last - MAX_ANSWER) : last + MAX_ANSWER + 32]
    answer = _last_box(window)
    return answer if answer and len(answer) <= MAX_ANSWER else None


def _last_box(text: str) -> str | None:
    open_braces: list[tuple[int, bool]] = []  # position of the content; whether the brace belongs to a box
    answer: str | None = None
    position = 0
    while token := _TOKEN.search(text, position):
        position = token.end()
        if token.group(1):
            answer = None  # a later box hides earlier ones, even if it is never closed
            if brace := _OPENING.match(text, position):
                position = brace.end()
                open_braces.append((position, True))
            elif unbraced := _UNBRACED.match(text, position):
                position = unbraced.end()
                answer = unbraced.group(1).rstrip(".")
        elif token.group() == "{":
            open_braces.append((position, False))
        elif token.group() == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box:
                answer = text[start : token.start()].strip()
    return answer
