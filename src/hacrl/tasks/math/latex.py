r"""Bring LaTeX into one spelling, so that equal answers mostly become equal text.

``\dfrac 12`` and ``\frac{1}{2}``, ``x^2`` and ``x^{2}``, ``\left( 1,\; 2 \right)`` and ``(1,2)`` come out
alike. Pure text work in time linear in the (capped) length; nothing is evaluated.

Tables of LaTeX spellings that mean the same.
"""

from __future__ import annotations

import re
import unicodedata

from hacrl.tasks.math.boxes import MAX_ANSWER

MAX_DEPTH = 40  # of nested brackets; keeps every later step's recursion small

_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|\s+|.", re.DOTALL)
_CALL = re.compile(
    r"(?<![A-Za-z\\])(?:(?:np|numpy|math)\.)?"
    r"(arcsin|arccos|arctan|sqrt|sinh|cosh|tanh|sin|cos|tan|exp|log|ln|pi)(?![A-Za-z])"
)
_AND = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
SPACE = " "
_ARGUMENTS = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1, "^": 1, "_": 1}
_OPENING = frozenset(("(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil"))
_CLOSING = frozenset((")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil"))


def nesting(token: str) -> int:
    """+1 for what opens a bracket of any kind, -1 for what closes one, else 0."""
    return 1 if token in _OPENING else -1 if token in _CLOSING else 0


def tidy(text: str) -> list[str] | None:
    """The text's tokens in the one spelling; None if it is not readable as an answer.

    Not readable: too long or too deeply nested, braces that do not match, control characters, lone
    surrogates, and digits other than 0-9 (Arabic, full-width, superscript, ...), which are no numbers here.
    """
    if len(text) > MAX_ANSWER:
        return None
    if not text.isascii():
        text = text.translate(UNICODE)
    if not _is_readable(text):
        return None
    text = text.replace("**", "^").replace("\\\\boxed", "\\boxed")
    text = _CALL.sub(r"\\\1 ", _AND.sub(",", text))
    tokens = [SAME.get(token, token) for token in _TOKEN.findall(text)]
    if not _is_balanced(tokens):
        return None
    tidied = _Reader(tokens).read_all()
    while tidied and tidied[-1] in (".", ",", ";", ":", SPACE, "\\\\"):
        tidied.pop()
    return tidied


def untidy(tokens: list[str]) -> str:
    """The tokens as LaTeX again, with spaces only where a command would swallow a letter."""
    parts: list[str] = []
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        parts.append(token)
        if token[0] == "\\" and token[-1].isalpha() and following[:1].isalpha():
            parts.append(SPACE)
    return "".join(parts)


def text_content(token: str) -> str | None:
    r"""What stands in a ``\text{...}`` token; None for any other token."""
    return token[6:-1] if token.startswith("\\text{") else None


def _is_readable(text: str) -> bool:
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
    """Whether braces match and nothing is nested too deeply. Other brackets need not match: ``[0,1)``."""
    braces = depth = 0
    for token in tokens:
        braces += (token == "{") - (token == "}")
        depth = max(0, depth + nesting(token))
        if braces < 0 or depth > MAX_DEPTH:
            return False
    return braces == 0


class _Reader:
    """Walks over the tokens once and writes them out in the one spelling."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def read_all(self) -> list[str]:
        out: list[str] = []
        while self.at < len(self.tokens):
            self.read_into(out)
        return out

    def read_into(self, out: list[str]) -> None:
        """Read one item and append what it becomes."""
        token = self.tokens[self.at]
        self.at += 1
        if token.isspace() or token in SPACES:
            # TeX shows "5 7" as 57, but hardly means it; elsewhere spaces say nothing.
            if out and out[-1].isdigit() and self.peek()[:1].isdigit():
                out.append(SPACE)
        elif token == "," and self.peek() == "\\!" and self.is_thousands(out, self.at + 1):
            pass
        elif token == "," and self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.skip_spaces()  # "81, 256" is a list, "81,256" a number
            out.append(";" if self.is_thousands(out, self.at) else ",")
        elif token in DROPPED:
            if token == "\\!" and self.is_thousands(out, self.at) and out[-1] == SPACE:
                out.pop()
        elif token in TEXT:
            out.extend(_text_tokens(self.read_words()))
        elif token in ("^", "_"):
            self.read_script(token, out)
        elif token in _ARGUMENTS:
            out.append(token)
            if token == "\\sqrt" and self.peek() == "[":
                out.extend(self.read_bracketed("[", "]"))
            for _ in range(_ARGUMENTS[token]):
                out += ["{", *self.read_argument(paren=token == "\\sqrt"), "}"]
        elif token == "{":
            self.at -= 1
            self.read_group(out)
        else:
            out.append(token)

    def peek(self) -> str:
        """The next token that is not a space; empty at the end."""
        at = self.at
        while at < len(self.tokens) and (self.tokens[at].isspace() or self.tokens[at] in SPACES):
            at += 1
        return self.tokens[at] if at < len(self.tokens) else ""

    def is_thousands(self, out: list[str], at: int) -> bool:
        """Whether a separator between digits is followed by exactly three more of them."""
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
            self.tokens[self.at].isspace() or self.tokens[self.at] in SPACES or self.tokens[self.at] == "\\!"
        ):
            self.at += 1

    def read_argument(self, paren: bool = False) -> list[str]:
        """The next argument without its braces: a group, a token, or in parentheses as code has it."""
        self.skip_spaces()
        if self.at >= len(self.tokens):
            return []
        if self.tokens[self.at] == "{":
            return self.read_bracketed("{", "}")[1:-1]
        if paren and self.tokens[self.at] == "(":
            return self.read_bracketed("(", ")")[1:-1]
        out: list[str] = []
        if self.tokens[self.at] != "}":
            self.read_into(out)
        return out

    def read_words(self) -> str:
        """The argument of a text command as it stands, with single spaces."""
        self.skip_spaces()
        start, depth = self.at, 0
        while self.at < len(self.tokens):
            depth += (self.tokens[self.at] == "{") - (self.tokens[self.at] == "}")
            self.at += 1
            if depth <= 0:
                break
        raw = "".join(SPACE if t in SPACES else t for t in self.tokens[start : self.at] if t not in DROPPED)
        return SPACE.join(raw.replace("{", "").replace("}", "").split())

    def read_bracketed(self, opening: str, closing: str) -> list[str]:
        """A bracketed run with its brackets; to the end if it is not closed."""
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
        """A power or an index, always with braces; degrees and primes get tokens of their own."""
        self.skip_spaces()
        code_like: list[str] = []
        if token == "^":  # 10^-3 and 2^10 as code has them
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
        elif argument:
            out += [token, "{", *argument, "}"]

    def read_group(self, out: list[str]) -> None:
        """Braces: kept after a command (its arguments), else dropped, as they show nothing."""
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


def _text_tokens(words: str) -> list[str]:
    r"""What a ``\text{...}`` becomes: a separator, a function, a number, or one text token."""
    stripped = words.strip(" ,;")
    if not stripped:
        return [","] if words.strip() else []
    if stripped in FUNCTIONS:
        return ["\\" + stripped]
    if stripped in ("e", "i") or stripped.replace(".", "").isdigit():
        return list(stripped)  # upright constants, bold numbers
    return [f"\\text{{{stripped}}}"]


# Names that are functions even where they stand as text.
FUNCTIONS = frozenset((
    "arccos", "arcsin", "arctan", "cos", "exp", "gcd", "lcm", "ln", "log", "sin", "sqrt", "tan",
))  # fmt: skip

# What only makes space.
SPACES = frozenset((
    "\\\n", "\\ ", "\\,", "\\:", "\\;", "\\>", "\\qquad", "\\quad", "\\thinspace", "~",
))  # fmt: skip

# What shows nothing that matters, and money signs.
DROPPED = frozenset((
    "$", "\\!", "\\$", "\\(", "\\)", "\\Big", "\\Bigg", "\\Bigl", "\\Bigr", "\\[", "\\]", "\\big",
    "\\bigg", "\\biggl", "\\biggr", "\\bigl", "\\bigr", "\\boxed", "\\displaystyle", "\\fbox", "\\left",
    "\\limits", "\\mleft", "\\mright", "\\nonumber", "\\right", "\\rm", "\\textstyle",
))  # fmt: skip

# What sets its argument as upright or plain text.
TEXT = frozenset((
    "\\hbox", "\\mathbf", "\\mathit", "\\mathrm", "\\mathsf", "\\mbox", "\\operatorname",
    "\\operatorname*", "\\text", "\\textbf", "\\textit", "\\textnormal", "\\textrm", "\\textsf",
    "\\texttt",
))  # fmt: skip

# Several spellings of one thing.
SAME = {
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\dbinom": "\\binom",
    "\\tbinom": "\\binom", "\\leq": "\\le", "\\leqslant": "\\le", "\\geq": "\\ge", "\\geqslant": "\\ge",
    "\\neq": "\\ne", "\\lt": "<", "\\gt": ">", "\\times": "\\cdot", "*": "\\cdot", "\\ast": "\\cdot",
    "\\div": "/", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]", "\\lvert": "|",
    "\\rvert": "|", "\\vert": "|", "\\mid": "|", "\\varnothing": "\\emptyset", "\\infin": "\\infty",
    "\\%": "%", "\\degree": "^\\circ", "\\simeq": "\\approx", "\\land": ",", "\\lor": ",",
    "\\colon": ":",
}  # fmt: skip

# Characters for which LaTeX has a command.
UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "π": "\\pi ",
    "∞": "\\infty ", "√": "\\sqrt ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ",
    "∪": "\\cup ", "∈": "\\in ", "°": "^\\circ ", "±": "\\pm ", "θ": "\\theta ", "∅": "\\emptyset ",
    "’": "'", "′": "'", "\u00a0": " ",
})  # fmt: skip
