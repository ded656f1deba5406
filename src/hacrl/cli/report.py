"""``hacrl report`` and ``hacrl watch``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from hacrl.errors import HacrlError
from hacrl.plain_text import printable
from hacrl.report.page import write_report
from hacrl.report.runs import find_runs

PAGE = "report.html"  # in the folder of a run, a study or a demo


def make_report(
    folders: Sequence[Path],
    output: Path | None,
    csv_folder: Path | None,
    latex_folder: Path | None,
    figure_folder: Path | None,
) -> None:
    """Write the page, and tables and figures as files where folders are given; print what was written."""
    runs = find_runs(folders)
    page = output or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    tables = write_report(runs, page)
    typer.echo(f"Report: {printable(str(page))} ({page.stat().st_size / 1e6:.1f} MB)")
    written = []
    if csv_folder is not None or latex_folder is not None:
        from hacrl.report.tables import write_tables

        written += write_tables(tables, csv_folder, latex_folder)
    if figure_folder is not None:
        from hacrl.report.figures import write_figures

        written += write_figures(runs, figure_folder)
    for path in written:
        typer.echo(printable(str(path)))


def report_when_done(folder: Path) -> None:
    """Write the report of a folder and print its path. A failed report does not fail what was trained."""
    page = folder / PAGE
    try:
        write_report(find_runs([folder]), page)
    except HacrlError as error:
        typer.echo(f"note: there is no report: {error}", err=True)
        return
    typer.echo(f"Report: {printable(str(page))}")


def watch_run(folder: Path, port: int) -> None:
    """Serve the live page until Ctrl-C."""
    from hacrl.report.watch import watch

    def announce(link: str) -> None:
        typer.echo(f"watching {printable(str(folder))}; Ctrl-C ends the page, not the run")
        typer.echo(link)

    watch(folder, port, announce)
