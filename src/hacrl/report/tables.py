"""Tables of a report, and their text as CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.files import write_text
from hacrl.plain_text import printable

Cell = str | int | float | None
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

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.name}: {len(row)} cells in {len(self.columns)} columns")


def cell_text(cell: Cell) -> str:
    """Return what a reader sees: four significant digits, and a dash for nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else printable(cell)


def as_csv(table: Table) -> str:
    """Return the table as CSV with all digits. No cell can become a formula in a spreadsheet."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([["" if cell is None else _csv_cell(cell) for cell in row] for row in table.rows])
    return text.getvalue()


def _csv_cell(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def as_latex(table: Table) -> str:
    """Return the table as a LaTeX tabular with booktabs rules."""
    is_number = [
        all(isinstance(row[i], int | float | None) for row in table.rows) for i in range(len(table.columns))
    ]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{tabular}{" + "".join("r" if number else "l" for number in is_number) + "}",
        "\\toprule",
        _latex_row(table.columns),
        "\\midrule",
        *(_latex_row([cell_text(cell) for cell in row]) for row in table.rows),
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
