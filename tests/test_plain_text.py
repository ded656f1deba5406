"""Printing hostile text: it stays readable and has no effect."""

from __future__ import annotations

import html
import json
import re

import pytest

from hacrl.errors import ConfigError, TrainingError
from hacrl.plain_text import json_text, markdown_text, plot_text, printable
from tests.support.hostile import EVERYTHING, HOSTILE, controls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;pwned\x07", r"\x1b]0;pwned\x07"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\u200b\ufeff\u00ad", r"\u200b\ufeff\xad"),
        ("\u2028\u2029\u0085", r"\u2028\u2029\x85"),
        ("\U000e0041", r"\U000e0041"),
        ("\ud83d", r"\ud83d"),
        ("[bold]x[/bold] <b> a|b", "[bold]x[/bold] <b> a|b"),  # harmless in a terminal
        ("naïve 数学 ∑ ± 😀 é\u0301 a\u00a0b\u3000c", "naïve 数学 ∑ ± 😀 é\u0301 a\u00a0b\u3000c"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("", ""),
    ],
)
def test_invisible_characters_become_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_multiline_keeps_newlines_and_tabs_only() -> None:
    assert printable("a\r\nb\tc\x1b", multiline=True) == "a\\r\nb\tc\\x1b"


def test_every_unicode_control_is_escaped_and_nothing_else() -> None:
    everything = "".join(map(chr, range(0x110000)))
    shown = printable(everything)
    assert controls(shown, allowed="") == []
    assert set(everything) - set(shown) == set(controls(everything, allowed=""))
    shown.encode("utf-8")  # surrogates could not be encoded


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_the_text_without_markup(text: str) -> None:
    written = markdown_text(text)
    assert not set(written) & set("|<>`*[]\\\n")
    assert re.fullmatch(r"(?:[^&]|&#\d+;)*", written)  # only our own entities
    assert html.unescape(written) == printable(text)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_parses_to_the_same_and_is_printable(text: str, indent: int | None) -> None:
    record = {"response": text, text: [1.5, None, "数学"]}
    written = json_text(record, indent)
    assert json.loads(written) == record
    assert controls(written, allowed="\n" if indent else "") == []
    assert "数学" in written
    assert len(written.splitlines()) == (8 if indent else 1)  # to every reader


def test_ordinary_json_equals_the_standard_librarys() -> None:
    record = {"a": 'naïve\n\t"x\\', "b": {"c": [1, 2.5, True]}}
    assert json_text(record) == json.dumps(record, ensure_ascii=False)
    assert json_text(record, 2) == json.dumps(record, ensure_ascii=False, indent=2)


def test_errors_that_quote_text_are_safe_to_print() -> None:
    error = ConfigError(f"data.jsonl, line 3: {EVERYTHING}\nsecond line")
    assert controls(str(error)) == []
    assert r"\x1b[2J" in str(error)
    assert str(error).endswith("\nsecond line")
    assert isinstance(error, ValueError)
    assert error.args == (f"data.jsonl, line 3: {EVERYTHING}\nsecond line",)
    assert controls(f"error: {TrainingError(EVERYTHING)}") == []
    assert str(TrainingError("plain")) == "plain"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_plot_shows_any_text_literally(text: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cbook import is_math_text
    from matplotlib.figure import Figure

    assert not is_math_text(plot_text(f"$x$ {text}"))
    if text.isascii():  # the font has nothing else
        figure = Figure()
        figure.suptitle(plot_text(f"$x$ {text}"))
        FigureCanvasAgg(figure).draw()
