r"""Normalise LaTeX, so that most equal answers become equal text.

``\dfrac 12`` becomes ``\frac{1}{2}``, ``x^2`` becomes ``x^{2}`` and ``\left( 1,\; 2 \right)`` becomes
``(1,2)``. This is text processing in time linear in the length, which is capped; nothing is evaluated.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import zip_longest

from hacrl.tasks.math.extraction import MAX_ANSWER
from hacrl.tasks.math.vocabulary import is_bare_word

MAX_DEPTH = 40  # of nested brackets; bounds the recursion of every later step

_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|\s+|.", re.DOTALL)
_CALL = re.compile(
    r"(?<![A-Za-z\\])(?:(?:np|numpy|math)\.)?"
    r"(arcsin|arccos|arctan|sqrt|sinh|cosh|tanh|sin|cos|tan|exp|log|ln|pi)(?![A-Za-z])"
)
_AND = re.compile(r"(?<![A-Za-z\\])(and|or)(?![A-Za-z])")
_AND_COMMANDS = {"and": "\\land ", "or": "\\lor "}
_BARE_PHRASE = re.compile(r"(?<=[0-9}]) +([A-Za-z]+(?:[ /]+[A-Za-z]+)+)(?![A-Za-z{(])")
_ELLIPSIS = re.compile(r"\.{3,}|…")
_ROOT_OF_NUMBER = re.compile(r"√ ?([0-9]+(?:\.[0-9]+)?)")  # \sqrt 16 would be the root of 1, times 6
_DOLLAR = re.compile(r"(?<!\\)\$")
# A piece of \text: a command, words with dots, hyphens and spaces between them, or any other token.
_TEXT_PIECE = re.compile(r"\\[A-Za-z]+\*?|\\.|[^\W\d_]+\.?(?:[ '’-]*[^\W\d_]+\.?)*|\s+|.", re.DOTALL)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
SPACE = " "
_ARGUMENT_COUNT = {
    "\\frac": 2, "\\binom": 2, "\\sqrt": 1, "\\overline": 1, "\\bar": 1, "\\dot": 1, "^": 1, "_": 1
}  # fmt: skip
_OPENING = frozenset(("(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"))
_CLOSING = frozenset((")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"))


def depth_change(token: str) -> int:
    """Return +1 for a token that opens a bracket of any kind, -1 for one that closes one, else 0."""
    return 1 if token in _OPENING else -1 if token in _CLOSING else 0


def normalise(text: str) -> list[str] | None:
    """Return the normalised tokens of a text; None if the text cannot be an answer.

    A text cannot be an answer if it is too long or too deeply nested, if its braces do not match, or if it
    contains control characters, lone surrogates or digits other than 0-9 (Arabic, full-width, superscript).
    """
    if len(text) > MAX_ANSWER:
        return None
    if not text.isascii():
        text = _ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", text).translate(UNICODE_TO_LATEX)
    if not _is_readable(text):
        return None
    text = text.replace("**", "^").replace("\\\\boxed", "\\boxed")
    if len(_DOLLAR.findall(text)) % 2:  # money; an even number delimits mathematics
        text = _DOLLAR.sub(r"\\$", text)
    text = _BARE_PHRASE.sub(_set_as_text, text)
    text = _AND.sub(lambda found: _AND_COMMANDS[found.group(1)], _ELLIPSIS.sub(r"\\ldots ", text))
    text = _CALL.sub(r"\\\1 ", text)
    tokens = [SYNONYMS.get(token, token) for token in _TOKEN.findall(text)]
    if not _is_balanced(tokens):
        return None
    try:
        normalised = _Normaliser(tokens).read_all()
    except _TooDeep:
        return None
    while normalised and normalised[-1] in (".", ",", ";", ":", SPACE, "\\\\"):
        normalised.pop()
    return normalised


def to_latex(tokens: list[str]) -> str:
    """Join tokens to LaTeX, with a space only where a letter would become part of a command."""
    parts: list[str] = []
    for token, following in zip_longest(tokens, tokens[1:], fillvalue=""):
        parts.append(token)
        if token[0] == "\\" and token[-1].isalpha() and following[:1].isalpha():
            parts.append(SPACE)
    return "".join(parts)


def text_content(token: str) -> str | None:
    r"""Return the words of a ``\text{...}`` token; None for any other token."""
    return token[6:-1] if token.startswith("\\text{") else None


def unwrap(text: str) -> str:
    r"""Return normalised LaTeX without the ``\text{}`` around words, and without spaces in them."""
    return _TEXT.sub(lambda found: found.group(1).replace(SPACE, ""), text) if "\\text{" in text else text


def _set_as_text(phrase: re.Match[str]) -> str:
    r"""Return ``34 square units`` as ``34\text{ square units}`` if all words are units or counted things."""
    words = phrase.group(1).replace("/", " ").split()
    known = all(is_bare_word(word) or word in ("of", "a", "each") for word in words)
    return f"\\text{{{phrase.group()}}}" if known else phrase.group()


def _is_readable(text: str) -> bool:
    """Return whether all characters are printable and all digits are ASCII."""
    if text.isascii():
        return text.isprintable() or all(c.isprintable() or c in "\t\n\r" for c in text)
    for character in text:
        if character in "\t\n\r":
            continue
        category = unicodedata.category(character)
        if category in ("Cc", "Cf", "Cs", "Co", "Cn") or (category[0] == "N" and not character.isascii()):
            return False
    return True


def _is_balanced(tokens: list[str]) -> bool:
    """Return whether braces match and the depth is bounded. Other brackets need not match: ``[0,1)``."""
    braces = depth = 0
    for token in tokens:
        braces += (token == "{") - (token == "}")
        depth = max(0, depth + depth_change(token))
        if braces < 0 or depth > MAX_DEPTH:
            return False
    return braces == 0


class _TooDeep(Exception):  # noqa: N818 - control flow, not an error
    """Commands without braces are nested more deeply than brackets may be."""


class _Normaliser:
    """Walks over the tokens once and writes the normalised ones."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0  # of commands in the arguments of commands

    def read_all(self) -> list[str]:
        out: list[str] = []
        while self.at < len(self.tokens):
            self.read_into(out)
        return out

    def read_into(self, out: list[str]) -> None:
        """Read one item and append its normalised tokens."""
        token = self.tokens[self.at]
        self.at += 1
        if token.isspace() or token in SPACING:
            # TeX typesets "5 7" as 57, which authors hardly mean. Elsewhere spaces have no meaning.
            if out and out[-1].isdigit() and self.peek()[:1].isdigit():
                out.append(SPACE)
        elif token == "," and self.peek() == "\\!" and self.is_thousands(out, self.at + 1):
            pass
        elif token == "," and self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.skip_spaces()  # "81, 256" is a list, "81,256" a number
            out.append(";" if self.is_thousands(out, self.at) else ",")
        elif token in IGNORED:
            if token == "\\!" and self.is_thousands(out, self.at) and out[-1] == SPACE:
                out.pop()
        elif token in TEXT_COMMANDS:
            self.tokens[self.at : self.at] = _text_tokens(self.read_raw_argument(), token in BOLD_COMMANDS)
        elif token in BOXES:
            self.read_box(out)
        elif token in COLOURS and self.peek() == "{":
            self.read_raw_argument()
        elif token in ("^", "_"):
            self.read_script(token, out)
        elif token in _ARGUMENT_COUNT:
            out.append(token)
            if token == "\\sqrt" and self.peek() == "[":
                out.extend(self.read_bracketed("[", "]"))
            for _ in range(_ARGUMENT_COUNT[token]):
                out += ["{", *self.read_argument(paren=token == "\\sqrt"), "}"]
        elif token == "{":
            self.at -= 1
            self.read_group(out)
        else:
            out.append(token)

    def peek(self) -> str:
        """The next token that is not a space; empty at the end."""
        at = self.at
        while at < len(self.tokens) and (self.tokens[at].isspace() or self.tokens[at] in SPACING):
            at += 1
        return self.tokens[at] if at < len(self.tokens) else ""

    def is_thousands(self, out: list[str], at: int) -> bool:
        """Return whether exactly three digits follow a separator that comes after a digit."""
        following = self.tokens[at : at + 4]
        return (
            bool(out)
            and out[-1].isdigit()
            and len(following) >= 3
            and all(t.isdigit() for t in following[:3])
            and not (len(following) == 4 and following[3].isdigit())
        )

    def skip_spaces(self) -> None:
        while self.at < len(self.tokens) and (
            self.tokens[self.at].isspace() or self.tokens[self.at] in SPACING or self.tokens[self.at] == "\\!"
        ):
            self.at += 1

    def read_argument(self, paren: bool = False) -> list[str]:
        """Read the next argument: a braced group without its braces, a token, or ``(...)`` as in code."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _TooDeep
        argument = self._read_argument(paren)
        self.depth -= 1
        return argument

    def _read_argument(self, paren: bool) -> list[str]:
        self.skip_spaces()
        if self.at >= len(self.tokens):
            return []
        if self.tokens[self.at] == "{":
            return self.read_bracketed("{", "}")[1:-1]
        if paren and self.tokens[self.at] == "(":
            return self.read_bracketed("(", ")")[1:-1]
        if (command := self.tokens[self.at]) in TEXT_COMMANDS:
            self.at += 1
            return _Normaliser(_text_tokens(self.read_raw_argument(), command in BOLD_COMMANDS)).read_all()
        out: list[str] = []
        if self.tokens[self.at] != "}":
            self.read_into(out)
        return out

    def read_raw_argument(self) -> str:
        r"""Take the argument of a text command out of the tokens; return it verbatim, without its braces.

        Words that are ``\text{...}`` tokens already, because commands are nested, are returned as words:
        otherwise ``\text{\text{of} cm}`` would be read for ever.
        """
        start = self.at
        self.skip_spaces()
        first, depth = self.at, 0
        while self.at < len(self.tokens):
            depth += (self.tokens[self.at] == "{") - (self.tokens[self.at] == "}")
            self.at += 1
            if depth <= 0:
                break
        argument = self.tokens[first : self.at]
        self.at = start
        del self.tokens[start : first + len(argument)]
        if argument[:1] == ["{"]:
            argument = argument[1:-1]
        words = [SPACE if token in SPACING else text_content(token) or token for token in argument]
        return to_latex(words)

    def read_box(self, out: list[str]) -> None:
        r"""Drop a box around all that is left or around one side; keep the command inside a value.

        In ``4\boxed{5}`` the box is not decoration: without its command, the digits would make 45.
        """
        if out and out[-1] not in _BEFORE_A_BOX:
            out.append("\\boxed")
            return
        if self.peek() == "{":
            self.skip_spaces()
            out += self.read_bracketed("{", "}")[1:-1]
            if self.peek()[:1].isdigit() or self.peek() == "{":
                out.append("\\boxed")

    def read_bracketed(self, opening: str, closing: str) -> list[str]:
        """Read a bracketed run with its brackets; to the end if it is not closed."""
        self.skip_spaces()
        self.at += 1
        out: list[str] = []
        depth = 0
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token == closing and depth == 0:
                self.at += 1
                break
            if opening != "{":
                depth += (token == opening) - (token == closing)
            self.read_into(out)
        return [opening, *out, closing]

    def read_script(self, token: str, out: list[str]) -> None:
        """Read a power or an index and write it with braces; degrees and primes become single tokens."""
        self.skip_spaces()
        code_like: list[str] = []
        if token == "^":  # 10^-3 and 2^10 as in code
            if self.peek() == "-":
                self.at += 1
                code_like.append("-")
            while self.at < len(self.tokens) and self.tokens[self.at].isdigit():
                code_like.append(self.tokens[self.at])
                self.at += 1
        argument = (
            code_like if code_like and code_like != ["-"] else code_like + self.read_argument(paren=True)
        )
        if token == "^" and argument in (["\\circ"], ["^\\circ"]):
            out.append("^\\circ")
        elif token == "^" and argument and all(t in ("\\prime", "'") for t in argument):
            out.extend("'" for _ in argument)
        else:
            out += [token, "{", *argument, "}"] if argument else [token]

    def read_group(self, out: list[str]) -> None:
        """Read braces: keep them after a command, whose argument they are; else drop them."""
        group = self.read_bracketed("{", "}")
        inner = group[1:-1]
        if inner == [","] and self.is_thousands(out, self.at):
            return
        if "\\over" in inner:
            split = inner.index("\\over")
            out += ["\\frac", "{", *inner[:split], "}", "{", *inner[split + 1 :], "}"]
        elif out and (out[-1] in ("}", "]") or (out[-1][0] == "\\" and out[-1][-1].isalpha())):
            out.extend(group)
        else:
            out.extend(inner)


def _text_tokens(content: str, bold: bool) -> list[str]:
    r"""Return the tokens for the content of ``\text{...}`` and of font commands.

    Words become ``\text{...}`` tokens. All else, such as digits, signs and brackets, is read as mathematics:
    a font changes no value. A single bold letter is a symbol of its own, such as the vector ``\mathbf{i}``.
    """
    alone = content.strip(" ,;.$")
    if bold and len(alone) == 1 and alone.isalpha():
        return [f"\\mathbf{{{alone}}}"]
    if alone in ("e", "i"):
        return [alone]
    tokens: list[str] = []
    pieces = _TEXT_PIECE.findall(content)
    for before, piece in zip(["", *pieces], pieces, strict=False):
        if not piece[0].isalpha():
            tokens.append(piece)
        elif piece in FUNCTION_NAMES:
            tokens.append("\\" + piece)
        elif len(piece) == 1 and piece != alone and before not in ("", "/") and not before.isspace():
            tokens.append(piece)  # the B of \text{A,B}, the x of \text{5x}
        else:
            tokens.append(f"\\text{{{SPACE.join(piece.rstrip('.').split())}}}")
    return [SYNONYMS.get(token, token) for token in tokens]


# Names of functions, also when written as text.
FUNCTION_NAMES = frozenset((
    "arccos", "arcsin", "arctan", "cos", "exp", "gcd", "lcm", "ln", "log", "sin", "sqrt", "tan",
))  # fmt: skip

# Commands that only add space.
SPACING = frozenset((
    "\\\n", "\\ ", "\\,", "\\:", "\\;", "\\>", "\\qquad", "\\quad", "\\thinspace", "~",
))  # fmt: skip

# Commands without meaning for an answer.
IGNORED = frozenset((
    "\\Huge", "\\LARGE", "\\Large", "\\huge", "\\large", "\\normalsize", "\\small",
    "$", "\\!", "\\(", "\\)", "\\Big", "\\Bigg", "\\Bigl", "\\Bigr", "\\[", "\\]", "\\big",
    "\\bigg", "\\biggl", "\\biggr", "\\bigl", "\\bigr", "\\displaystyle", "\\left",
    "\\limits", "\\mleft", "\\mright", "\\nonumber", "\\right", "\\rm", "\\textstyle",
))  # fmt: skip

# Commands whose first argument is a colour.
COLOURS = frozenset(("\\color", "\\textcolor"))

BOXES = frozenset(("\\boxed", "\\fbox"))
_BEFORE_A_BOX = frozenset(("=", "\\approx", "\\in", ",", ";", ":", "\\land", "\\lor", "(", "[", "\\{"))

BOLD_COMMANDS = frozenset(("\\mathbf", "\\boldsymbol", "\\bm"))

# Commands that set their argument as text or in a font.
TEXT_COMMANDS = BOLD_COMMANDS | frozenset((
    "\\hbox", "\\mathit", "\\mathrm", "\\mathsf", "\\mbox", "\\operatorname",
    "\\operatorname*", "\\text", "\\textbf", "\\textit", "\\textnormal", "\\textrm", "\\textsf",
    "\\texttt",
))  # fmt: skip

# Commands with equal meaning.
SYNONYMS = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom",
    "\\tbinom": "\\binom", "\\leq": "\\le", "\\leqslant": "\\le", "\\geq": "\\ge", "\\geqslant": "\\ge",
    "\\neq": "\\ne", "\\lt": "<", "\\gt": ">", "\\times": "\\cdot", "*": "\\cdot", "\\ast": "\\cdot",
    "\\div": "/", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]", "\\lvert": "|",
    "\\rvert": "|", "\\vert": "|", "\\mid": "|", "\\varnothing": "\\emptyset", "\\infin": "\\infty",
    "\\%": "%", "\\degree": "^\\circ", "\\simeq": "\\approx", "\\wedge": "\\land", "\\vee": "\\lor",
    "\\colon": ":", "\\dots": "\\ldots", "\\cdots": "\\ldots", "\\dotsc": "\\ldots", "\\dotsb": "\\ldots",
    "\\dotsm": "\\ldots", "\\dotso": "\\ldots",
}  # fmt: skip

# Characters that LaTeX has a command for.
UNICODE_TO_LATEX = str.maketrans({
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "π": "\\pi ",
    "∞": "\\infty ", "√": "\\sqrt ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ",
    "∪": "\\cup ", "∈": "\\in ", "°": "^\\circ ", "±": "\\pm ", "θ": "\\theta ", "∅": "\\emptyset ",
    "’": "'", "′": "'", "\u00a0": " ", "∑": "\\sum ", "∏": "\\prod ", "∫": "\\int ",
})  # fmt: skip
