r"""Prepare normalised LaTeX for latex2sympy, which skips or misreads some notation in silence.

A text with notation that the parser does not know is refused: ``\phantom{5}`` would be read as 5. Decimals
become fractions, so that values are compared exactly, and products of numbers get a multiplication sign,
because the parser reads ``2(\frac{1}{3})`` as a mixed number.
"""

from __future__ import annotations

import re

_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\^\\circ")
_TRIG = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc")
# The parser adds adjacent numbers, drops primes, transposes, ignores bases and calculates with infinity.
_MISREAD = re.compile(
    r"[0-9.] [0-9]|'|(?<![A-Za-z])(?<!\\mathbf\{[A-Za-z]\})_|\\circ ?_|\^\{T\}|\^(?!\{|\\circ)"
    r"|(?<!\\sqrt)\[|\\infty"
)
# Degrees are a unit at the end of a value only: 30^\circ15 is not 3015, nor \cos x^\circ the cosine of x.
_DEGREES_INSIDE = re.compile(r"\^\\circ(?! ?(?:[-+/)}=<>|]|\\cdot|\\le|\\ge|$))")
_COMMANDS = frozenset(
    [
        r"frac",
        r"binom",
        r"sqrt",
        r"cdot",
        r"pi",
        r"sin",
        r"cos",
        r"tan",
        r"cot",
        r"sec",
        r"csc",
        r"arcsin",
        r"arccos",
        r"arctan",
        r"sinh",
        r"cosh",
        r"tanh",
        r"log",
        r"ln",
        r"exp",
        r"lfloor",
        r"rfloor",
        r"lceil",
        r"rceil",
        r"le",
        r"ge",
        r"circ",
        r"mathbf",
        r"alpha",
        r"beta",
        r"gamma",
        r"delta",
        r"epsilon",
        r"varepsilon",
        r"zeta",
        r"eta",
        r"theta",
        r"vartheta",
        r"iota",
        r"kappa",
        r"lambda",
        r"mu",
        r"nu",
        r"xi",
        r"rho",
        r"sigma",
        r"tau",
        r"upsilon",
        r"phi",
        r"varphi",
        r"chi",
        r"psi",
        r"omega",
        r"Gamma",
        r"Delta",
        r"Theta",
        r"Lambda",
        r"Xi",
        r"Pi",
        r"Sigma",
        r"Upsilon",
        r"Phi",
        r"Psi",
        r"Omega",
        r"hbar",
        r"ell",
        r"odot",
        r"sum",
        r"prod",
        r"int",
        r"lim",
        r"infty",
        r"to",
        r"max",
        r"min",
    ]
)
_FUNCTIONS = frozenset((
    "\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc", "\\sinh", "\\cosh", "\\tanh", "\\log", "\\ln",
    "\\exp", "\\arcsin", "\\arccos", "\\arctan", "\\sum", "\\prod", "\\int", "\\lim", "\\max", "\\min",
))  # fmt: skip
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "^": 1, "_": 1, "\\mathbf": 1}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_PLAIN = re.compile(r"[A-Za-z0-9+\-/^_{}()|!.<>=\[\], ]*")
_TOKEN = re.compile(r"\\[A-Za-z]+ ?|[0-9]+|.")
_GAMMA = re.compile(r"\\([gG]amma)(?![A-Za-z])")  # a symbol here; the parser applies Euler's function
_CAPITAL_I = re.compile(r"(?<!\\mathbf\{)(?<!_\{)I")  # not the imaginary unit
_POINT_AT_THE_END = re.compile(r"(?<=[0-9])\.(?![0-9])")  # 3./2
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)(?=(\s*[\^!_])?)")
_ODD_ROOT = re.compile(  # the real one, where the parser takes a complex one
    r"\\sqrt\[([3579])\]\{-([0-9]+(?:\.[0-9]+)?|\\frac\{[0-9]+\}\{[0-9]+\})\}"
)
_MIXED = re.compile(r"(?<![_0-9.])([0-9]+)\\frac\{([0-9]+)\}\{([0-9]+)\}")


def parser_input(text: str) -> str | None:
    """Return what to parse; None if the parser would skip or misread a part of the text."""
    if _MISREAD.search(text) or not set(_COMMAND.findall(text)) <= _COMMANDS:
        return None
    if not _PLAIN.fullmatch(_COMMAND.sub("", text)):
        return None
    if any(function in text for function in _TRIG):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
        if "^\\circ" in text:
            return None
    if _DEGREES_INSIDE.search(text):
        return None
    text = _ODD_ROOT.sub(r"(-\\sqrt[\1]{\2})", _POINT_AT_THE_END.sub("", text))
    text = text.replace("^\\circ", "")  # outside trigonometry, degrees are a unit
    text = _CAPITAL_I.sub(r"\\mathbf{capitalI}", _GAMMA.sub(r"\\mathbf{\1}", text))
    return _multiply_numbers(_DECIMAL.sub(_exact, _MIXED.sub(_improper, text)))


def _exact(decimal: re.Match[str]) -> str:
    """Return a decimal as a fraction: floating-point numbers would be compared with a tolerance."""
    whole, part, power = decimal.groups()
    fraction = f"\\frac{{{int(whole + part)}}}{{{10 ** len(part)}}}"
    return f"({fraction})" if power else fraction


def _improper(mixed: re.Match[str]) -> str:
    """Return a mixed number as one fraction."""
    whole, above, below = (int(group) for group in mixed.groups())
    return f"\\frac{{{whole * below + above}}}{{{below}}}"


def _multiply_numbers(text: str) -> str | None:
    r"""Write a multiplication sign between a number, fraction, power or bracket and a following one.

    Return None for a power of a power without brackets: 2^3^2 is 512 in code and no LaTeX.
    """
    out: list[str] = []
    owners: list[tuple[str, int]] = []  # of open braces: the command, and how many more arguments it takes
    owner, arguments = "", 0  # of the next opening brace
    base = ""  # of an index and a power
    closed = ""  # the command whose last argument ended last
    complete = False  # whether the tokens so far end in an operand
    for token in _TOKEN.findall(text):
        name = token.strip()
        if name == "^" and closed == "^" and out[-1] == "}":
            return None
        if complete and (name in ("(", "\\frac", "\\binom") or name.isdigit()):
            out.append("\\cdot ")
        out.append(token)
        complete = name.isdigit() or name in (")", "!")
        if name == "{":
            owners.append((owner, arguments))
        elif name == "}":
            owner, arguments = owners.pop() if owners else ("", 0)
            if arguments > 1:
                arguments -= 1
                continue
            closed = owner
            complete = owner in ("\\frac", "\\binom", "\\sqrt") or (owner == "^" and base not in _FUNCTIONS)
        elif name in ("^", "_") and not (len(out) > 1 and out[-2] == "}" and closed == "_"):
            base = out[-2].strip() if len(out) > 1 else ""
        if name != "{":
            owner, arguments = name, _ARGUMENTS.get(name, 0)
    return "".join(out)
