r"""Find the final answer in a response: what stands in its last ``\boxed{...}``.

Strict on purpose: a response without a box has no answer. Only a window around the last box is read, so the
time does not depend on the length of the response.
"""

from __future__ import annotations

import re

MAX_ANSWER = 2000  # characters; the longest gold answer of the usual benchmarks has about 200

# A box command (a doubled backslash is a common slip), an escaped character, or a brace.
_MARK = re.compile(r"\\{1,2}(boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"\s{0,8}(-?[0-9A-Za-z][0-9A-Za-z./]{0,63})")
_OPENING = re.compile(r"\s{0,8}\{")


def extract_answer(response: str) -> str | None:
    r"""The content of the last box; None if there is none, or it is empty, not closed or too long.

    Of nested boxes the outermost counts. ``\boxed 2`` without braces is read up to the next space.
    """
    last = max(response.rfind("\\boxed"), response.rfind("\\fbox"))
    if last < 0:
        return None
    # A box around the last one has to begin within MAX_ANSWER characters, else it is too long anyway.
    window = response[max(0, last - MAX_ANSWER) : last + MAX_ANSWER + 32]
    answer = _last_box(window)
    return answer if answer and len(answer) <= MAX_ANSWER else None


def _last_box(text: str) -> str | None:
    open_braces: list[tuple[int, bool]] = []  # where its content begins; whether it belongs to a box
    answer: str | None = None
    position = 0
    while mark := _MARK.search(text, position):
        position = mark.end()
        if mark.group(1):
            answer = None  # a later box that is never closed is no answer, and hides the earlier ones
            if brace := _OPENING.match(text, position):
                position = brace.end()
                open_braces.append((position, True))
            elif bare := _BARE.match(text, position):
                position = bare.end()
                answer = bare.group(1).rstrip(".")
        elif mark.group() == "{":
            open_braces.append((position, False))
        elif mark.group() == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box:
                answer = text[start : mark.start()].strip()
    return answer
