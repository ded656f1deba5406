"""``hacrl eval``, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from hacrl.cli.evaluate import EvaluationProgress, _fitting, _rich_table
from hacrl.cli.main import main
from hacrl.evaluation.tables import TextTable

ARITHMETIC = ("--on", "arithmetic", "--limit", "4", "--max-new-tokens", "24")


def hacrl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hacrl.cli.main", "eval", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_a_table_files_and_json_that_agree(tmp_path):
    done = hacrl("bundled:qwen-worked", *ARITHMETIC, "--samples", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "evaluations" / "qwen-worked" / "arithmetic"
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed.pop("folder") == "evaluations/qwen-worked/arithmetic"
    assert printed == json.loads((folder / "results.json").read_text())
    (result,) = printed["results"]
    assert (result["label"], result["problems"], result["samples"]) == ("qwen-worked", 4, 2)
    kept = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    assert result["average"]["mean"] == sum(line["reward"] for line in kept) / 8
    mean = f"{result['average']['mean']:.3f} ± "
    assert f"1/1  qwen-worked on arithmetic: avg@2 {mean}" in done.stdout
    assert mean in (folder / "results.md").read_text()
    assert "arithmetic: 4 problems, 2 responses each, temperature 1, at most 24 new tokens" in done.stdout
    assert "\n\n\n" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bundled:qwen-worked", "--on", "mth500"], "did you mean 'math500'?"),
        (["bundled:qwen-worked", "--on", "gsm8k"], "--data FOLDER takes local files instead"),
        (["bundled:qwen-worked", "--on", "gsm8k", "--data", "."], "gsm8k.test.jsonl, which does not exist"),
        (["bundled:qwen-worked"], "has no task of its own; say e.g. --on math500,gsm8k"),
        (["bundled:qwen-wroked", *ARITHMETIC], "there is no bundled agent 'qwen-wroked'"),
        (["bundled:qwen-worked", "--on", "gone.jsonl"], "there is no file gone.jsonl"),
        (["bundled:qwen-worked", *ARITHMETIC, "--pass-at", "2;3"], "--pass-at 2;3: must be whole numbers"),
        (["bundled:qwen-worked", *ARITHMETIC, "--columns", "problem"], "--columns problem: must be PURPOSE"),
        (
            ["bundled:qwen-worked", *ARITHMETIC, "--columns", "answer=a"],
            "--columns names the columns of a file",
        ),
        (["bundled:qwen-worked", *ARITHMETIC, "--samples", "2", "--pass-at", "3"], "--pass-at 3 draws more"),
        (["bundled:qwen-worked", *ARITHMETIC, "--top-p", "0"], "--top-p must be in (0, 1], not 0.0"),
        (["bundled:qwen-worked", *ARITHMETIC, "--device", "tpu"], "--device: 'tpu'"),
        (["bundled:qwen-worked", *ARITHMETIC, "--prompt", "Go"], "--prompt 'Go' must contain {problem}"),
        (["gone", *ARITHMETIC], "gone is not a local folder, and as a hub model: 'gone' is not in"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_written(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hacrl", "eval", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_benchmark(tmp_path):
    from hacrl.evaluation.benchmarks import BENCHMARKS

    shown = hacrl("--help", cwd=tmp_path).stdout
    for name in BENCHMARKS:
        assert name in shown


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("hacrl.cli.evaluate.time.monotonic", lambda: now[0])
    with EvaluationProgress(Console(width=120)) as progress:
        progress.on_start(Path("e"), 1)
        for seconds, done in ((0, 0), (10, 64), (25, 128), (5, 192), (40, 256)):
            now[0] += seconds
            progress.on_progress("ada", "math500", done, 256, 0.25)
    # begun at 100; a line when 30 s have passed, which is so at 135, and none for the end: the score says it
    assert capsys.readouterr().out.splitlines() == [
        "Evaluation folder: e",
        "ada on math500: 128/256 responses · mean reward 0.250",
    ]


def test_a_narrow_terminal_loses_the_least_important_columns_first():
    table = TextTable("t", ("agent", "avg@1", "stopped", "tokens", "correct", "wrong"), (("a",) * 6,))
    # widths 5+5+7+6+7+5 and two between: 47; without wrong 40; without correct 31
    for width, left in ((48, 6), (47, 5), (41, 5), (40, 4)):
        assert len(_fitting(table, width).headings) == left


def test_in_a_narrow_terminal_headings_take_two_lines_and_are_not_cut():
    table = TextTable("t", ("agent", "math500 avg@2", "gsm8k pass@2"), (("a", "0.100", "0.200"),))
    # widths 5+13+12 and two between: 36
    whole = [["agent", "math500", "avg@2", "gsm8k", "pass@2"]]
    for width, headings in ((37, whole), (36, [["math500", "gsm8k"], ["agent", "avg@2", "pass@2"]])):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(_rich_table(table, width))
        shown = captured.get()
        assert "…" not in shown
        assert [line.split() for line in shown.splitlines()[1 : len(headings) + 1]] == headings


def test_an_unreachable_hub_is_probed_once(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    for arguments in (["nobody/nothing", *ARITHMETIC], ["bundled:qwen-worked", "--on", "math500"]):
        command = [sys.executable, "-m", "hacrl.cli.main", "eval", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 2
        assert "Retrying" not in done.stderr  # the libraries' own way: half a minute a file
        assert len(done.stderr.splitlines()) == 1
        assert "cannot be reached" in done.stderr
