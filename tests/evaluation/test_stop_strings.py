"""``hacrl eval`` ends responses where the model's run does, or where ``--stop`` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hacrl.cli.main import app
from hacrl.config.load import build_config
from hacrl.config.schema import BenchmarkSettings, RunConfig
from hacrl.errors import ConfigError
from hacrl.evaluation.specs import BenchmarkSpecs
from hacrl.evaluation.targets import Target

RUN = build_config(
    {
        "agents": [{"name": "ada", "model": "bundled:qwen-large"}],
        "output": "unused",
        "task": "arithmetic",
        "method": "gspo",
        "rollout": {"stop": ["#", "=="], "max_new_tokens": 24},
    }
)


def strings(run: RunConfig | None, stop: tuple[str, ...] | None, name: str) -> tuple[str, ...]:
    folder = None if run is None else Path("unused")
    target = Target("ada", "ada", RUN.agents[0], run=run, folder=folder)
    return BenchmarkSpecs(BenchmarkSettings(stop=stop)).build(name, target).sampling.stop


@pytest.mark.parametrize("name", ["task", "arithmetic"])
def test_the_run_s_strings_are_the_default(name: str) -> None:
    assert strings(RUN, None, name) == ("#", "==")
    assert strings(RUN, (";",), name) == (";",)


def test_a_model_without_a_run_has_none() -> None:
    assert strings(None, None, "arithmetic") == ()
    assert strings(None, (";",), "arithmetic") == (";",)


def test_responses_of_the_command_end_at_the_string(tmp_path: Path) -> None:
    """The answer to (23+14)*2: is 23+14=37;37*2=74#74, of which the first sum remains."""
    command = ["eval", "bundled:qwen-large", "--on", "arithmetic", "--limit", "3", "--device", "cpu"]
    options = ["--max-new-tokens", "24", "--stop", ";", "--stop", "#", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "out" / "responses.jsonl").read_text().splitlines()]
    assert [row["finish_reason"] for row in rows] == ["stop_string"] * 3
    assert all("=" in row["response"] and not {";", "#"} & set(row["response"]) for row in rows)
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert (found["stop"], found["stopped"]) == ([";", "#"], 1.0)
    again = CliRunner().invoke(app, [*command, *options[:4], "--output", str(tmp_path / "out")])
    assert isinstance(again.exception, ConfigError)  # other stop strings: another evaluation
    assert 'an evaluation with stop [";", "#"], not [";"]' in str(again.exception)
