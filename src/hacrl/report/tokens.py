"""The text of single tokens, for agents whose ``tokenizer.json`` is on this machine. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hacrl.errors import ModelError
from hacrl.models.model_sources import resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WINDOW = 6  # tokens that are decoded together to find the text of the last one
_BROKEN = "\ufffd"


class TokenTexts:
    """Cuts a response into the texts of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._single: dict[int, str] = {}

    def pieces(self, ids: Sequence[int], text: str) -> list[str] | None:
        """Return the text of each token; None if they do not make up ``text``.

        Special tokens after the text have texts of their own. A character of several tokens is in the last
        one's text.
        """
        for pieces in ([self._text_of(token) for token in ids], self._in_context(ids)):
            if "".join(pieces).startswith(text) and _BROKEN not in "".join(pieces).removeprefix(text):
                return pieces
        return None

    def _text_of(self, token: int) -> str:
        if token not in self._single:
            self._single[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return self._single[token]

    def _in_context(self, ids: Sequence[int]) -> list[str]:
        """Return pieces for tokenizers in which a token's text depends on the tokens before it."""
        pieces: list[str] = []
        start, shown = 0, ""  # the window begins at token ``start``; its text up to now is ``shown``
        for end in range(1, len(ids) + 1):
            if end - start > _WINDOW and not shown.endswith(_BROKEN):
                start = end - _WINDOW // 2
                shown = self._decode(ids[start : end - 1])
            text = self._decode(ids[start:end])
            if text.endswith(_BROKEN) and end < len(ids):  # the rest of a character is in the next token
                pieces.append("")
                continue
            pieces.append(text[len(shown) :])
            shown = text
        return pieces

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def find_token_texts(run: Path, agent: str, model: str) -> TokenTexts | None:
    """Return the token texts of a run's agent, or None if its tokenizer is not on this machine."""
    path = _find_tokenizer(run, agent, model)
    return None if path is None else _load(path)


def _find_tokenizer(run: Path, agent: str, model: str) -> Path | None:
    saved = run / "agents" / agent / "tokenizer.json"
    if saved.is_file():
        return saved
    try:
        source = Path(resolve_model(model))
    except ModelError:  # the folder was moved or deleted
        return None
    if (source / "tokenizer.json").is_file():
        return source / "tokenizer.json"
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except ValueError:  # not the name of a model of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None


@cache
def _load(path: Path) -> TokenTexts | None:
    from tokenizers import Tokenizer

    try:
        return TokenTexts(Tokenizer.from_file(str(path)))
    except Exception:  # the library raises plain Exception for a damaged file; the text is shown whole then
        return None
