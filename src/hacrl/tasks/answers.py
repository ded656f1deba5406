"""Final answers inside longer text: GSM8K's ``#### 18``, the last line."""

from __future__ import annotations

import re

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


def after_hashes(text: str) -> str | None:
    """What stands after the last ``####`` on its line, without separators: ``1,200`` is ``1200``."""
    _, mark, rest = text.rpartition("####")
    if not mark:
        return None
    return _THOUSANDS.sub("", rest.strip().partition("\n")[0].strip()) or None


def last_line(text: str) -> str | None:
    """The last line that is not blank."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None
