"""Tables of a report, and their text as CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hacrl.files import write_text
from hacrl.plain_text import printable


class Spread(NamedTuple):
    """A mean and its standard deviation, in one cell; in CSV, two columns."""

    mean: float
    deviation: float | None  # None: of a single value


Cell = str | int | float | Spread | None
_INTERVAL = ("difference", "low", "high")  # columns with the same number of decimals
_DIGITS = 3  # of a column's largest number; a column's numbers have equally many decimals
_ROUNDING = 1e-12  # smaller numbers are shown as 0
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "×": r"$\times$",
    "–": "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


@dataclass(frozen=True)
class Table:
    """A table with a heading per column. ``name`` is the name of its file."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    kind: str = ""  # what it is about, the same for all runs
    run: int | None = None  # the number of the run that it is about, if it is about one

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.name}: {len(row)} cells in {len(self.columns)} columns")


def texts(table: Table) -> list[list[str]]:
    """Return what a reader sees in each row."""
    columns = []
    together = [row[i] for i, name in enumerate(table.columns) if name in _INTERVAL for row in table.rows]
    for i, name in enumerate(table.columns):
        cells = [row[i] for row in table.rows]
        decimals = _decimals(together if name in _INTERVAL else cells)
        columns.append([cell_text(cell, decimals) for cell in cells])
    return [list(row) for row in zip(*columns, strict=True)]


def cell_text(cell: Cell, decimals: int = _DIGITS) -> str:
    """Return a cell as a reader sees it: floats with so many decimals, and a dash for nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, Spread):
        mean = cell_text(cell.mean, decimals)
        return mean if cell.deviation is None else f"{mean} ± {cell_text(cell.deviation, decimals)}"
    if isinstance(cell, float):
        text = f"{cell:.{decimals}f}"
        if cell != 0 and float(text) == 0 and abs(cell) > _ROUNDING:
            text = f"{cell:.1e}"
        return text.replace("-", "−", 1) if text.startswith("-") and float(text) != 0 else text.lstrip("-")
    return f"{cell:,}" if isinstance(cell, int) else printable(cell)


def _decimals(cells: Sequence[Cell]) -> int:
    """Return how many decimals give the largest number ``_DIGITS`` significant digits."""
    values = [cell.mean if isinstance(cell, Spread) else cell for cell in cells]
    largest = max((abs(v) for v in values if isinstance(v, float) and math.isfinite(v)), default=0.0)
    if largest == 0:
        return _DIGITS
    return min(9, max(0, _DIGITS - 1 - math.floor(math.log10(largest))))


def _is_number(cell: Cell) -> bool:
    return cell is None or isinstance(cell, int | float | Spread)


def _has_spread(table: Table) -> list[bool]:
    """Return for each column whether it has cells with a spread."""
    return [any(isinstance(row[i], Spread) for row in table.rows) for i in range(len(table.columns))]


def as_csv(table: Table) -> str:
    """Return the table as CSV with all digits. No cell can become a formula in a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spreads = _has_spread(table)
    headings = zip(table.columns, spreads, strict=True)
    writer.writerow([name for column, two in headings for name in ([column, f"{column}, ±"][: 1 + two])])
    for row in table.rows:
        cells = zip(row, spreads, strict=True)
        writer.writerow([value for cell, two in cells for value in _csv_cells(cell)[: 1 + two]])
    return text.getvalue()


def _csv_cells(cell: Cell) -> tuple[str | int | float, str | int | float]:
    """Return the cell's value, and its spread."""
    if isinstance(cell, Spread):
        return cell.mean, "" if cell.deviation is None else cell.deviation
    return "" if cell is None else _csv_text(cell) if isinstance(cell, str) else cell, ""


def _csv_text(cell: str) -> str:
    text = printable(cell)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def as_latex(table: Table) -> str:
    """Return the table as a LaTeX tabular with booktabs rules."""
    is_number = [all(_is_number(row[i]) for row in table.rows) for i in range(len(table.columns))]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{tabular}{" + "".join("r" if number else "l" for number in is_number) + "}",
        "\\toprule",
        _latex_row(table.columns),
        "\\midrule",
        *(_latex_row(row) for row in texts(table)),
        "\\bottomrule",
        "\\end{tabular}",
        f"% {printable(table.title)}. {printable(table.note)}".rstrip(),
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join("".join(_LATEX.get(c, c) for c in printable(cell)) for cell in cells) + r" \\"


def write_tables(tables: Sequence[Table], csv_folder: Path | None, latex_folder: Path | None) -> list[Path]:
    """Write each table as NAME.csv and NAME.tex into the folders that are given; return the files."""
    written = []
    for folder, suffix, content in ((csv_folder, "csv", as_csv), (latex_folder, "tex", as_latex)):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for table in tables:
                path = folder / f"{file_name(table.name)}.{suffix}"
                write_text(path, content(table))
                written.append(path)
    return written


def file_name(name: str) -> str:
    """Return a name for a file made of letters, digits, dots and dashes only."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "table"
