"""What docs/start_cpu.md says a newcomer types works, and so do the pages that read the run's folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hacrl.cli.main import app
from tests.test_docs import blocks

DOCS = Path(__file__).parent.parent / "docs"
FEWER = {
    "steps: 12": "steps: 2",
    "steps=24": "steps=3",
    "steps=12": "steps=2",
    "accuracies[12]": "accuracies[2]",
}


def page(name: str) -> str:
    text = (DOCS / name).read_text("utf-8")
    for written, fewer in FEWER.items():
        text = text.replace(written, fewer)
    return text


def hacrl(line: str) -> None:
    result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:], catch_exceptions=False)
    assert result.exit_code == 0, f"{line}: {result.output}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """The working folder after all of the page's commands but the demo and the installation."""
    text = page("start_cpu.md")
    folder = tmp_path_factory.mktemp("start")
    for block in blocks(text, "python") + blocks(text, "yaml"):
        if name := re.match(r"# (\S+)\n", block):
            (folder / name[1]).write_text(block, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec((folder / "make_problems.py").read_text(), {"__name__": "__main__"})
        commands = [line for block in blocks(text, "") for line in block.splitlines()]
        typed = [line for line in commands if line.startswith("hacrl ") and line != "hacrl demo"]
        assert len(typed) >= 7
        for line in typed:
            hacrl(line)
    return folder


def test_the_commands_leave_what_the_page_says(folder: Path):
    assert (folder / "runs/my/agents/llama/model.safetensors").is_file()
    assert len((folder / "runs/my/metrics.jsonl").read_text().splitlines()) == 3  # resumed
    assert (folder / "runs/my/evaluations/task/results.json").is_file()
    assert (folder / "runs/alpha-0/metrics.jsonl").is_file()


def test_python_makes_the_same_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    [script] = [block for block in blocks(page("start_cpu.md"), "python") if "HACRLTrainer" in block]
    exec(script, {"__name__": "__main__"})
    ours, theirs = ((folder / "runs" / name / "metrics.jsonl").read_text() for name in ("python", "my"))
    assert ours.splitlines() == theirs.splitlines()[:2]


def test_the_run_folder_reads_as_its_pages_say(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    scope: dict[str, list[float]] = {}
    [read_metrics] = blocks(page("run_folder.md"), "python")
    exec(read_metrics, scope)
    assert len(scope["rewards"]) == len(scope["shared"]) == 3
    assert all(0 <= value <= 1 for value in scope["rewards"] + scope["shared"])
    [read_rollouts] = blocks(page("rollout_log.md"), "python")
    exec(read_rollouts, scope)
    assert len(scope["step"]) == 16 * 8  # of one agent: 16 prompts, 8 responses to each
    assert len(scope["run"]) == 3 * 2 * 16 * 8  # 3 steps, 2 agents


def test_every_file_of_the_run_is_in_the_table(folder: Path):
    table = page("run_folder.md").partition("## ")[0]
    listed = {name.partition("/")[0] for name in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)}
    assert {path.name for path in (folder / "runs" / "my").iterdir()} <= listed
