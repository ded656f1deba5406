"""Processes of an asynchronous run are killed at random moments of all phases: the run ends complete."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.chaos import chaos_config, run_with_kills

STEPS = 10


def test_a_run_that_is_killed_again_and_again_is_complete(tmp_path: Path) -> None:
    agents = [
        {"name": "small", "model": "bundled:qwen-small-a", "replicas": {"count": 1}},
        {"name": "llama", "model": "bundled:llama-pairs", "replicas": {"count": 1}},
    ]
    folder = tmp_path / "run"
    config = chaos_config(folder, STEPS, agents=agents, asynchronous={"max_staleness": 2})
    attempts = run_with_kills(config, kills=5, seed=1)
    assert attempts.starts == 6
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluations] == [0, 3, 6, 9, STEPS]
    notes = (folder / "notes.txt").read_text()
    assert "are sampled again" not in notes
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    for line in lines:
        for name, report in line["agents"].items():
            folder_of_step = folder / "rollouts" / f"step-{line['step']:06d}"
            learnt = (folder_of_step / "learnt" / f"{name}.jsonl").read_text().splitlines()
            keys = {(row["agent"], row["problem"], row["sample"]) for row in map(json.loads, learnt)}
            assert len(keys) == len(learnt) == 32  # 2 agents, 4 prompts, 4 responses each
            own = report["asynchronous"]["staleness"][name]
            assert own["steps_max"] <= 2
