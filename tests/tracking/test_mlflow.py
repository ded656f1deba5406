"""A real MLflow store, read back with MLflow's client."""

from __future__ import annotations

import pytest

from hacrl.config.load import config_to_yaml
from hacrl.plain_text import printable
from hacrl.tracking.mlflow import flat_params
from hacrl.tracking.registry import make_trackers
from tests.tracking.scenario import EXPECTED, NOTES, SHOWN, config, play

needs_mlflow = pytest.mark.filterwarnings("ignore")  # its own imports warn


def test_params_are_named_as_in_an_override():
    nested = {
        "lr": 0.5,
        "agents": [{"name": "ada", "model": "m"}],
        "task": {"options": {"a@b": 1}},
        "x": [1, 2],
    }
    assert dict(flat_params(nested)) == {
        "lr": "0.5",
        "agents.ada.name": "ada",
        "agents.ada.model": "m",
        "task.options.a_b": "1",
        "x": "[1, 2]",
    }


@needs_mlflow
@pytest.mark.parametrize("succeeded", [True, False])
def test_a_run_in_a_database(tmp_path, monkeypatch, succeeded):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run = config(tmp_path, "mlflow", project="papers")
    [tracker] = make_trackers(run, tmp_path / "first")
    play(tracker, saved=succeeded)

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("papers")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "first"
    assert found.info.status == ("FINISHED" if succeeded else "FAILED")
    for name, values in EXPECTED.items():
        history = client.get_metric_history(found.info.run_id, name)
        assert {one.step: one.value for one in history} == values, name
    assert found.data.params["learning.lr"] == "0.125"
    assert found.data.params["agents.llama.model"] == "bundled:qwen-large"
    read = mlflow.artifacts.load_text
    assert read(f"{found.info.artifact_uri}/config.yaml") == config_to_yaml(run)
    for step in (1, 2):
        text = read(f"{found.info.artifact_uri}/rollouts/step_{step:06d}.txt")
        assert all(response in text for _, response in SHOWN)
    notes = "".join(f"step {step}: {printable(note)}\n" for step, note in NOTES.items())
    assert read(f"{found.info.artifact_uri}/notes.txt") == notes
    assert mlflow.active_run() is None  # the process's own run is left alone
