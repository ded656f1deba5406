"""A limit on a GPU's processors, under which vLLM was seen to compute wrongly, is told of before it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hacrl.cli.dry_run import dry_run_lines
from hacrl.cli.main import app
from hacrl.config.schema import AgentSettings, RolloutSettings, RunConfig, VllmSettings
from hacrl.engines.registry import engine_notes
from hacrl.engines.vllm import serve
from hacrl.runs import dry_run as planning
from hacrl.runs import run as local
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent

LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ON_GPU, ON_CPU = {"ada": "cuda:0", "bob": "cuda"}, {"ada": "cpu", "bob": "cpu"}


def run_of(*settings: VllmSettings, model: str = "x", output: str = "run", **options) -> RunConfig:
    agents = (
        AgentSettings(name=name, model=model, engine="vllm", vllm=vllm)
        for name, vllm in zip(("ada", "bob"), settings, strict=False)
    )
    return RunConfig(agents=tuple(agents), output=output, **options)


def test_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "60")
    assert engine_notes(run_of(VllmSettings(), VllmSettings(mode="server")), ON_GPU) == (
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60 would limit the vLLM engines of ada, bob. On an H200, vLLM's "
        "log-probabilities were wrong by nats under such a limit, and responses that disagree with the "
        "learner are refused: unset it",
    )


@pytest.mark.parametrize(
    ("value", "is_limit"),
    [
        (None, False),
        ("", False),
        ("99.5", True),
        (" 1 ", True),
        ("100", False),
        ("100.0", False),
        ("250", False),
        ("half", False),
        ("nan", False),
    ],
)
def test_which_values_are_a_limit(monkeypatch: pytest.MonkeyPatch, value: str | None, is_limit: bool) -> None:
    monkeypatch.delenv(LIMIT, raising=False)
    if value is not None:
        monkeypatch.setenv(LIMIT, value)
    assert len(engine_notes(run_of(VllmSettings()), ON_GPU)) == is_limit


def test_which_engines_it_would_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that hacrl starts, on a GPU."""
    monkeypatch.setenv(LIMIT, "60")
    served, started = VllmSettings(url="http://127.0.0.1:8000"), VllmSettings()
    assert engine_notes(run_of(started, started), ON_CPU) == ()
    assert engine_notes(run_of(served, served), ON_GPU) == ()
    both = run_of(started, started)
    others = tuple(replace(agent, engine="transformers") for agent in both.agents)
    assert engine_notes(replace(both, agents=others), ON_GPU) == ()
    (note,) = engine_notes(run_of(served, started), ON_GPU)
    assert "engines of bob." in note
    (note,) = engine_notes(run_of(VllmSettings(devices=(1,)), started), ON_CPU)
    assert "engines of ada." in note


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """An agent on the CPU that has its engine on a GPU, with a limit."""
    for module in (local, planning):
        monkeypatch.setattr(module, "check_engines", lambda _: None)
    monkeypatch.setenv(LIMIT, "60")
    char_agent("ada").save(tmp_path / "ada")
    return run_of(
        VllmSettings(devices=(0,), engine_args={"max_model_len": 60}),
        model=str(tmp_path / "ada"),
        output=str(tmp_path / "run"),
        device="cpu",
        rollout=RolloutSettings(prompts_per_step=2, max_new_tokens=2),
    )


def test_a_run_notes_it_once_before_its_first_step(config: RunConfig) -> None:
    with local.LocalRun(config, task=SevensTask()) as run:
        notes = (run.result.folder / "notes.txt").read_text().splitlines()
    assert [LIMIT in note for note in notes].count(True) == 1


def test_a_dry_run_notes_it(config: RunConfig) -> None:
    plan = planning.dry_run(config)
    assert [LIMIT in note for note in plan.notes].count(True) == 1
    assert any(line.startswith(f"note: {LIMIT}=60") for line in dry_run_lines(plan))


def test_serving_notes_it(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever engine the recipe's own runs have."""
    monkeypatch.setattr(serve, "check_vllm", lambda *_: None)
    (agent,) = config.agents
    recipe = replace(config, agents=(replace(agent, engine="transformers"),))
    monkeypatch.setattr("hacrl.config.load.load_config", lambda *_: recipe)
    started = []
    monkeypatch.setattr(serve, "serve", started.append)
    said = CliRunner().invoke(app, ["serve", "recipe.yaml", "ada"]).output
    assert said.startswith(f"note: {LIMIT}=60 would limit the vLLM engines of ada.")
    assert len(started) == 1
    monkeypatch.delenv(LIMIT)
    assert serve.plan_server(recipe, "ada", "127.0.0.1", 8000).notes == ()
