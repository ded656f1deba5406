"""Hostile responses: each has its label, and the pair after it is judged right."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from hacrl.config.schema import VerifierSettings
from hacrl.tasks.math import matching
from hacrl.tasks.math.pool import MathVerifier, judge_by_text

GOLD = r"\sqrt{8}"
HONEST = (GOLD, r"\boxed{2\sqrt{2}}")  # needs a worker

# content of the box; all of these are decided without a worker, in no time
UNPARSABLE = {
    "empty": "",
    "blank": "   ",
    "parentheses": "(" * 10_000 + "1" + ")" * 10_000,
    "few parentheses": "(" * 500 + "1" + ")" * 500,
    "fractions": r"\frac{1}{" * 10_000 + "2" + "}" * 10_000,
    "few fractions": r"\frac{1}{" * 100 + "2" + "}" * 100,
    "roots": r"\sqrt{" * 10_000 + "2" + "}" * 10_000,
    "powers without braces": "^" * 1900 + "2",
    "fractions without braces": r"\frac1" * 300 + "2",
    "roots of indices": r"\sqrt_" * 300 + "2",
    "braces": "{" * 10_000 + "5" + "}" * 10_000,
    "long number": "9" * 1_000_000,
    "long text": "word " * 200_000,
    "null byte": "5\x00",
    "terminal escape": "\x1b[31m5\x1b[0m",
    "lone surrogate": "5\ud800",
    "arabic-indic digit": "٥",
    "full-width digit": "５",
    "superscript": "x²",
    "roman numeral": "Ⅴ",
    "bidirectional override": "\u202e5",
    "private use": "\ue000",
}


@pytest.mark.parametrize("name", UNPARSABLE)
def test_unreadable_answers_are_unparsable(verifier: MathVerifier, name: str):
    response = rf"\boxed{{{UNPARSABLE[name]}}}"
    labels = [v.label for v in verifier.verify([("5", response), HONEST, (response, response)])]
    assert labels == ["unparsable", "correct", "unparsable"]


@pytest.mark.parametrize("answer", ["=", r"\in", "=,", "5,=", "(6,=)", r"\{=\}", "x==5"])
@pytest.mark.parametrize("gold", ["7", "(6,7)"])
def test_a_relation_sign_without_a_side_is_wrong(verifier: MathVerifier, gold: str, answer: str):
    labels = [v.label for v in verifier.verify([(gold, rf"\boxed{{{answer}}}"), HONEST])]
    assert labels == ["wrong", "correct"]


def test_an_error_of_the_text_comparison_is_a_crash(verifier: MathVerifier, monkeypatch: pytest.MonkeyPatch):
    """A bug of ours costs the pairs that meet it, never the run."""

    def fail_on_six(gold: str, answer: str, equal: matching.ValuesEqual) -> bool:
        if answer == "6":
            raise ValueError("a bug")
        return matching.answers_match(gold, answer, equal)

    monkeypatch.setattr("hacrl.tasks.math.pool.answers_match", fail_on_six)
    verdicts = verifier.verify([("5", r"\boxed{5}"), ("6", r"\boxed{6}"), HONEST])
    assert [(v.label, v.reward) for v in verdicts] == [("correct", 1.0), ("crash", 0.0), ("correct", 1.0)]


# pieces that change how their neighbours are read
PIECES = (
    r"\text", r"\mathbf", r"\mbox", r"\operatorname*", r"\boxed", r"\frac", r"\sqrt", r"\over", r"\left",
    r"\pm", "^", "_", "{", "}", "{}", "(", ")", "[", r"\{", r"\}", "5", "12", "x", "e", ",", ";", " ",
    r"\,", r"\!", "=", r"\approx", r"\begin{pmatrix}", r"\end{pmatrix}", r"\begin{array}{cc}",
    r"\end{array}", "&", "\\\\", "<", r"^\circ", "%", r"\$", r"\text{ cm}", "cm", "and", "...", "'", ".",
    "-", "/", "|", "a.m.", "dozen", "per", r"\mu", r"\emptyset", r"\overline",
)  # fmt: skip


def test_no_sequence_of_pieces_raises_in_the_text_comparison():
    draw = random.Random(0)
    for _ in range(4000):
        gold, answer = ("".join(draw.choices(PIECES, k=draw.randint(1, 8))) for _ in range(2))
        for expected in (gold, "5"):
            label, _pair = judge_by_text(expected, rf"\boxed{{{answer}}}")
            assert label != "crash", (expected, answer)


# what stands in the braces of nested commands
_INNER = ("of", "cm", "minus", "a b", "5", " ", "-", r"\%", r"\sin", "x", "")
_AROUND = (
    "text",
    "textbf",
    "mathbf",
    "mathrm",
    "mbox",
    "operatorname",
    "boxed",
    "frac",
    "sqrt",
    "overline",
    "color",
)


def _nested(draw: random.Random, depth: int) -> str:
    """Return commands in the arguments of commands, with text beside them."""
    if depth == 0:
        return draw.choice(_INNER)
    inside = "".join(_nested(draw, draw.randrange(depth)) for _ in range(draw.randint(1, 3)))
    return rf"\{draw.choice(_AROUND)}{{{inside}}}"


def test_nested_commands_are_read_to_their_end():
    """Text that is normalised again must become shorter: the process that trains has no time limit here."""

    def give_up(*_: object) -> None:
        raise TimeoutError  # a response that raises is a crash

    draw = random.Random(0)
    previous = signal.signal(signal.SIGPROF, give_up)
    try:
        for _ in range(4000):
            answer = _nested(draw, 4)
            signal.setitimer(signal.ITIMER_PROF, 10.0)  # CPU seconds; one answer takes a millisecond
            label, _pair = judge_by_text("5", rf"\boxed{{64 {answer}}}")
            assert label in ("wrong", "unparsable", None), answer
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous)


@pytest.mark.parametrize("content", ["", " ", r"\,"])
@pytest.mark.parametrize("command", [r"\text", r"\mbox", r"\mathbf"])
def test_empty_text_commands_have_no_meaning(verifier: MathVerifier, command: str, content: str):
    answers = [f"{command}{{{content}}}5", f"5{command}{{{content}}}", f"{command}{{{content}}}"]
    labels = [v.label for v in verifier.verify([("5", rf"\boxed{{{answer}}}") for answer in answers])]
    assert labels == ["correct", "correct", "unparsable"]


@pytest.mark.parametrize("digits", ["٥", "５", "⁵", "𝟓", "५"])
def test_only_ascii_digits_are_numbers(verifier: MathVerifier, digits: str):
    """int() takes most of these for 5."""
    assert [v.label for v in verifier.verify([("5", rf"\boxed{{{digits}}}")])] == ["unparsable"]


MEGABYTE = 1_000_000
RESPONSES = [
    # no box, or none that counts
    ("5", "unparsable"),
    ("", "unparsable"),
    ("The answer is 5.", "unparsable"),
    ("x" * MEGABYTE, "unparsable"),
    ("{" * MEGABYTE, "unparsable"),
    ("\\" * MEGABYTE, "unparsable"),
    (r"\boxed" * (MEGABYTE // 6), "unparsable"),
    (r"\boxed{" * (MEGABYTE // 7), "unparsable"),
    (r"\boxed{5", "unparsable"),
    (r"\boxed{5} but no: \boxed{6", "unparsable"),  # the last box counts, and it is cut off
    (r"\boxedtext{5}", "unparsable"),
    (r"\boxed", "unparsable"),
    (r"\boxed{}", "unparsable"),
    # a box somewhere
    ("x" * MEGABYTE + r"\boxed{5}" + "y" * MEGABYTE, "correct"),
    ("{" * MEGABYTE + r"\boxed{5}", "correct"),
    (r"\boxed{4}" * 100_000 + r"\boxed{5}", "correct"),
    (r"\boxed{4} then \boxed{5}", "correct"),
    (r"\boxed{5} then \boxed{4}", "wrong"),
    (r"\boxed{\boxed{5}}", "correct"),
    (r"\boxed{x = \boxed{5}}", "correct"),
    (r"\boxed{4} \fbox{5}", "correct"),
    (r"\boxed {5}", "correct"),
    (r"\boxed 5", "correct"),
    (r"\boxed 52", "wrong"),
    (r"\boxed 5,000", "unparsable"),
    (r"\boxed 5\% of them", "unparsable"),
    (r"\boxed 5+1", "unparsable"),
    (r"\boxed 5, as shown", "correct"),
    (r"so $\boxed 5$.", "correct"),
    (r"\\boxed{5}", "correct"),
    (r"\boxed{\{5\}}", "correct"),
    (r"\boxed{5}}}}", "correct"),
    (r"\boxed{\text{5}}", "correct"),
    # looks like something else
    (r"\boxed{\input{/etc/passwd}}", "wrong"),
    (r"\boxed{\write18{rm -rf /}}", "wrong"),
    (r"\boxed{5 \catcode}", "wrong"),
    (r"\boxed{lambda: 5}", "wrong"),
    (r"\boxed{5 or 1}", "wrong"),
    (r"\boxed{*}", "wrong"),
    (r"\boxed{nan}", "wrong"),
    (r"\boxed{\infty}", "wrong"),
    (r"\boxed{%s}", "wrong"),
    (r"\boxed{\frac{5}{0}}", "wrong"),
    (r"\boxed{1e999999999}", "wrong"),
    (r"\boxed{" + "9" * 1900 + "}", "wrong"),
    (r"\boxed{" + "," * 1900 + "}", "unparsable"),
    (r"\boxed{" + "5," * 900 + "}", "wrong"),
    (r"\boxed{" + "+-" * 900 + "5}", "crash"),  # deeper than Python's stack
]


@pytest.mark.parametrize(
    ("response", "label"), RESPONSES, ids=[text[:30].strip("\\") for text, _ in RESPONSES]
)
def test_responses_have_their_label(verifier: MathVerifier, response: str, label: str):
    verdicts = verifier.verify([("5", response), HONEST])
    assert [v.label for v in verdicts] == [label, "correct"]
    assert [v.reward for v in verdicts] == [1.0 if label == "correct" else 0.0, 1.0]


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('touch {path}')",
        "open('{path}','w')",
        "().__class__.__base__.__subclasses__()",
        "exec(\"open('{path}','w')\")",
        r"\text{{__import__('os').system('touch {path}')}}",
        "np.arcsin(__import__('os').system('touch {path}'))",
        "5 + __import__('os').system('touch {path}')",
    ],
)
def test_code_is_never_run(verifier: MathVerifier, code: str, tmp_path: Path):
    target = tmp_path / "created"
    filled = code.format(path=target)
    labels = [
        v.label for v in verifier.verify([(GOLD, rf"\boxed{{{filled}}}"), (filled, r"\boxed{\sqrt{2}}")])
    ]
    assert labels == ["wrong", "wrong"]
    assert not target.exists()


ENDLESS = [
    "9^{9^{9^{9}}}",
    "10^{10^{10}}",
    "((10!)!)!",
    r"\binom{10^{9}}{10^{8}}",
]


def test_endless_expressions_cost_one_verdict_each():
    """Whether one runs out of time or memory or sympy gives up is sympy's affair; it is never right."""
    honest = [rf"\boxed{{\sqrt{{2}}+{n}\sqrt{{2}}}}" for n in range(len(ENDLESS))]  # right for n = 1
    pairs = [
        (GOLD, r) for text, right in zip(ENDLESS, honest, strict=True) for r in (rf"\boxed{{{text}}}", right)
    ]
    with MathVerifier(VerifierSettings(workers=1, time_limit=1.0, memory_limit=1.0)) as verifier:
        labels = [v.label for v in verifier.verify(pairs)]
    assert set(labels[0::2]) <= {"timeout", "crash", "wrong"}
    assert "timeout" in labels[0::2]
    assert labels[1::2] == ["wrong", "correct", "wrong", "wrong"]
