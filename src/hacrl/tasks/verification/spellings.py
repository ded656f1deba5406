"""Tables of LaTeX spellings that mean the same."""

from __future__ import annotations

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
