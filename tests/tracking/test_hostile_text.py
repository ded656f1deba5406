"""Showing hostile text of models, data sets and files has no effect on the reader's terminal."""

from __future__ import annotations

import html
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hacrl.cli.evaluate import EvaluationProgress, _rich_table
from hacrl.config.load import build_config
from hacrl.evaluation.folder import EvaluationFolder
from hacrl.evaluation.results import ScoredResponse
from hacrl.evaluation.tables import TextTable
from hacrl.plain_text import printable
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.folder import RunFolder
from hacrl.runs.results import RunResult
from hacrl.studies.markdown import study_markdown
from hacrl.studies.study import make_study
from hacrl.studies.tables import compare, comparison_table
from hacrl.tracking.base import Tracker
from hacrl.tracking.console import print_unstyled, unstyled
from hacrl.tracking.progress import RunProgress
from hacrl.tracking.samples import as_text, sample_rows
from hacrl.tracking.tensorboard import preformatted
from hacrl.training.metrics import Accuracy
from tests.support.hostile import EVERYTHING, HOSTILE, controls
from tests.tracking.scenario import report, rollouts

# agents may not be called so, but nothing that shows them relies on that
SHOWN = tuple(printable(text) for text in HOSTILE)


def console(terminal: bool, width: int = 4000) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def printed(on: Console) -> str:
    """What was printed, without what rich itself sends to a terminal: cursor and erasing."""
    text = on.file.getvalue()  # type: ignore[attr-defined]
    for own in ("\x1b[?25l", "\x1b[?25h", "\x1b[1A", "\x1b[2K", "\r"):
        text = text.replace(own, "")
    return text


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("text", HOSTILE)
def test_the_helpers_print_the_text_unchanged(text: str, terminal: bool) -> None:
    on = console(terminal)
    print_unstyled(on, text)
    on.print(unstyled(text))
    assert printed(on) == f"{printable(text, multiline=True)}\n{printable(text)}\n"


def test_plain_rich_would_change_the_text() -> None:
    """What the helpers are for: the usual switches are not enough."""
    on = console(terminal=False)
    on.print("\x1b[2J :smile:", markup=False, highlight=False)
    assert printed(on) == "\x1b[2J 😄\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal: bool) -> None:
    names = list(HOSTILE)
    agent = report(1).agents["qwen"]
    step = replace(report(1), agents={name: replace(agent, capability=1.0) for name in names})
    on = console(terminal)
    with RunProgress(EVERYTHING, names, 2, on) as progress:
        progress.on_phase(1, "rollout", names[0])
        progress.on_step(step, {"whole": 2.0, **{f"rollout/{name}": 1.0 for name in names}})
        progress.on_evaluation(1, {name: Accuracy(0.5, 0.1, 2, 1) for name in names})
        progress.on_note(1, f"a note on {EVERYTHING}")
    assert controls(printed(on)) == []
    for shown in SHOWN:
        assert shown in printed(on) or (shown == r"one\ntwo" and not terminal)  # lines of a log stay lines


def test_evaluation_in_a_terminal_and_in_markdown() -> None:
    table = TextTable(EVERYTHING, ("agent", EVERYTHING), tuple((text, "0.5") for text in HOSTILE))
    on = console(terminal=False)
    on.print(_rich_table(table, on.width))
    assert controls(printed(on)) == []
    for shown in SHOWN:
        assert shown in printed(on)
    written = table.markdown()
    assert controls(written) == []
    title, empty, *lines = written.splitlines()
    assert (empty, title[:2], title[-2:]) == ("", "**", "**")
    assert len(lines) == 2 + len(HOSTILE)  # a row is a line
    assert [line.count("|") for line in lines] == [3] * len(lines)
    assert not set(written) & set("<>`[]\\")
    cells = [html.unescape(line.split("|")[1][1:-1]) for line in lines[2:]]
    assert cells == list(SHOWN)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_of_an_evaluation(terminal: bool) -> None:
    on = console(terminal)
    with EvaluationProgress(on) as progress:
        progress.on_start(Path(EVERYTHING.replace("/", "")), 1)
        progress.on_note(EVERYTHING)
        progress.on_load(EVERYTHING)
        progress.on_progress(EVERYTHING, "task", 1, 2, 0.5)
    assert controls(printed(on)) == []
    assert "note: " in printed(on)


def run_of(agent: str, after: float) -> RunResult:
    """One agent, from 0.25 to ``after`` in two steps."""
    result = RunResult(Path("nowhere"))
    result.accuracies = {step: {agent: Accuracy(mean, 0.1, 4, 1)} for step, mean in ((0, 0.25), (2, after))}
    result.rewards, result.rollouts, result.updates = {agent: [0.5]}, {agent: 8}, {agent: 4}
    return result


def results() -> dict[tuple[str, int], RunResult]:
    """Two variants, one seed; a variant and the agent have hostile names."""
    return {("hacpo", 0): run_of(EVERYTHING, 0.75), (EVERYTHING, 0): run_of(EVERYTHING, 0.5)}


def test_tables_of_finished_runs() -> None:
    runs = {variant: result for (variant, _), result in results().items()}
    on = console(terminal=False)
    on.print(comparison_table(compare(runs), {"hacpo": "HACPO", EVERYTHING: "other"}))
    assert controls(printed(on)) == []
    assert printable(EVERYTHING) in printed(on)
    assert "[bold]0.750" not in printed(on)  # our own mark-up still works
    lines = study_markdown(make_study(results(), reference="hacpo")).splitlines()
    assert len(lines) == 7
    assert {line.count("|") for line in lines[:5]} == {9}
    assert html.unescape(lines[4].split("|")[1].strip()) == printable(EVERYTHING)


def test_plots_are_drawn(tmp_path: Path) -> None:
    from hacrl.studies.plots import plot_comparison, plot_curves, plot_study

    name = "$\\frac{$ <b> [x] \x1b[2J"  # of characters that the font has
    runs = {(variant, 0): run_of(name, 0.5) for variant in ("hacpo", name)}
    plot_study(runs, tmp_path / "study.png")
    plot_curves(runs, tmp_path / "curves.png")
    labels = {"hacpo": "HACPO", name: "other"}
    comparison = compare({variant: run for (variant, _), run in runs.items()})
    plot_comparison(comparison, labels, tmp_path / "comparison.png")
    for picture in ("study.png", "curves.png", "comparison.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_folders_of_runs_and_evaluations(tmp_path: Path) -> None:
    data = {"agents": [{"name": "qwen", "model": "bundled:qwen-large"}], "output": str(tmp_path / "run")}
    folder = RunFolder(build_config(data))
    folder.create()
    first = rollouts("qwen")[0].rollout
    hostile = replace(first, segments=(replace(first.segments[0], text=EVERYTHING),))
    log = RolloutLog(tmp_path / "run" / "rollouts")
    log.append(1, "qwen", [replace(rollouts("qwen")[0], rollout=hostile)])
    folder.on_note(1, EVERYTHING)
    folder.on_note(2, "second")
    folder.unlock()
    kept = (tmp_path / "run" / "rollouts" / "step-000001" / "qwen.jsonl").read_text("utf-8")
    assert controls(kept) == []
    assert [json.loads(line)["text"] for line in kept.splitlines()] == [EVERYTHING]
    notes = (tmp_path / "run" / "notes.txt").read_text("utf-8")
    assert notes == f"step 1: {printable(EVERYTHING)}\nstep 2: second\n"

    evaluation = EvaluationFolder(tmp_path / "run")
    evaluation._responses = {("qwen", "task"): []}
    evaluation.append(
        ("qwen", "task"), [ScoredResponse(EVERYTHING, 0, 1.0, "correct", 3, "stop")], [EVERYTHING]
    )
    evaluation.write_results({"notes": [EVERYTHING]}, "")
    responses = (tmp_path / "run" / "responses.jsonl").read_text("utf-8")
    assert controls(responses) == []
    assert json.loads(responses)["response"] == EVERYTHING
    numbers = (tmp_path / "run" / "results.json").read_text("utf-8")
    assert controls(numbers) == []
    assert json.loads(numbers) == {"notes": [EVERYTHING]}


def test_rollouts_in_trackers(tmp_path: Path, capsys) -> None:
    first = rollouts("qwen")[0].rollout
    hostile = replace(first, segments=(replace(first.segments[0], text=EVERYTHING),))
    (row,) = sample_rows(1, "qwen", [replace(rollouts("qwen")[0], rollout=hostile)], 1)
    text = as_text([row])
    assert controls(text) == []
    assert printable(EVERYTHING, multiline=True) in text
    page = preformatted(EVERYTHING)
    assert controls(page) == []
    assert page.count("<") == 2  # of <pre> and </pre>
    assert html.unescape(page[5:-6]) == printable(EVERYTHING, multiline=True)

    class Failing:
        def start(self, run):
            pass

        def log_scalars(self, step, scalars):
            raise RuntimeError(EVERYTHING)

        def log_rollouts(self, step, rows):
            pass

        def finish(self, succeeded):
            pass

    class Run:
        agents = ("qwen",)
        logged_rollouts = 0
        folder = tmp_path

    Tracker("tool", Failing(), Run()).on_evaluation(0, {})  # type: ignore[arg-type]
    told = capsys.readouterr().err
    assert "tracker tool failed" in told
    assert controls(told) == []
    assert len(told.splitlines()) == 1
