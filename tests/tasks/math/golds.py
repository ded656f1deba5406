"""Gold answers to test with: those of benchmark files beside the checkout, and a set of all answer forms."""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).parents[4] / "shared" / "data"
FILES = sorted(DATA.glob("*.jsonl"))

OF_ALL_FORMS = (
    # numbers
    "72", "-15", "0", "1", "3600", "15,600", "2.75", "-0.125", "4.5e33", "1.6e-19", r"\frac{7}{12}",
    r"-\frac{9}{4}", r"\dfrac{1}{2}", "13/5", r"2\frac{3}{8}", r"0.\overline{27}", "1011_2", "3:8",
    # quantities
    r"24\%", r"0.4\%", r"\$18.50", r"\$2,400", r"75^\circ", r"64 \text{ cm}^2", r"9\text{ miles}",
    r"36\text{ square inches}", r"14\text{ apples}", r"45\text{ mph}", r"\frac{20}{3}\text{ hours}",
    # expressions
    r"4\sqrt{6}", r"\sqrt[3]{10}", r"\frac{3\sqrt{2}}{5}", r"7-2\sqrt{3}", r"25\pi", r"\frac{5\pi}{6}",
    "3+4i", r"2^{50}", "e^{2}-1", r"\log_{2} 7", r"\cos 40^\circ", "x^2-5x+6", "(y+2)(y-3)",
    r"\frac{a+b}{2c}", r"3\mathbf{i}-2\mathbf{j}", r"\frac{n(n+1)}{2}", "n!",
    # equations and inequalities
    "x=7", "y = 3x - 4", r"x^2+y^2=25", "x > 6", r"k \le -2",
    # lists, sets, points, intervals, matrices
    "2, 5", "-3,1,8", r"\{1,4,9\}", r"5 \pm \sqrt{7}", "(3,-7)", r"\left(2,\frac{\pi}{3}\right)", "(1,0,-2)",
    "[-4,9)", r"(-\infty,6]", r"(-\infty,0)\cup(5,\infty)", r"\begin{pmatrix} 3 \\ -8 \end{pmatrix}",
    r"\begin{pmatrix} 1 & 2 \\ 0 & -5 \end{pmatrix}",
    # words
    r"\text{Saturday}", r"\text{(B)}", "C", r"\text{even}", r"\text{B, D}",
)  # fmt: skip


def golds_of(path: Path) -> list[str]:
    """The file's different gold answers, in order, without the two empty ones of MATH."""
    with path.open(encoding="utf-8") as lines:
        return [gold for gold in dict.fromkeys(json.loads(line)["answer"] for line in lines) if gold]
