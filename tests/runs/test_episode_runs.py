"""Whole runs of episodes: what agents teach each other, failed environments, kills, evaluation, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.config.schema import AsynchronousSettings, ReplicaSettings, RunConfig
from hacrl.errors import TaskError
from hacrl.evaluation.plan import EvaluationRequest
from hacrl.evaluation.run import evaluate_targets
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.dry_run import dry_run
from hacrl.runs.run import run_locally
from hacrl.training.asynchronous.schedule import Job
from tests.support.chaos import differing_files, run_with_kills
from tests.support.episode_environments import reference
from tests.support.episode_runs import episode_config, episode_rows
from tests.training.asynchronous.orders import Order, delayed, finish


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["agents"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_episodes_of_both_forms_teach_agents_of_two_tokenizers(tmp_path: Path) -> None:
    run_locally(episode_config(tmp_path, "run", steps=2))
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for name, other in (("whole", "parts"), ("parts", "whole")):
        used = [step[name]["learning"]["sources"].get(other, {}).get("used", 0) for step in steps]
        assert min(used) > 0  # in every step
        for step in steps:
            episodes = step[name]["rollout"]["episodes"]
            assert sum(episodes["ends"].values()) == 12
            assert episodes["failed"] == 0
            assert 1 <= episodes["turns"] <= 3
        assert sum(step[name]["rollout"]["episodes"]["tool_calls"] for step in steps) > 0
    rows = list(RolloutLog(tmp_path / "run" / "rollouts").read(1))
    assert {row["episode"]["end"] for row in rows} >= {"done", "max_turns"}
    learnt = list(RolloutLog(tmp_path / "run" / "rollouts").read_learnt(1))
    others = [row for row in learnt if row["learner"] != row["agent"] and row["fate"] == "used"]
    assert others
    by_key = {(row["agent"], row["problem"], row["sample"]): row for row in rows}
    for row in others:  # the learner's tokens say the same: actions and observations
        source = by_key[row["agent"], row["problem"], row["sample"]]
        assert len(row["token_logprobs"]) == len(row["token_ids"])
        assert len(row["token_ids"]) != 0
        assert source["episode"]["end"] != "failed"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_run_killed_in_the_middle_of_steps_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run_with_kills(episode_config(tmp_path, "calm", steps=2), 0, seed=1)
    lives = run_with_kills(episode_config(tmp_path, "chaos", steps=2), 3, seed=1)
    assert sum(lives.kills.values()) == 3
    assert lives.kills["rollout"] >= 1
    assert differing_files(tmp_path / "calm", tmp_path / "chaos") == []


def test_failed_environments_lose_their_episodes_only(tmp_path: Path) -> None:
    faults = ("", "", "step", "reset")
    rows = [{"prompt": f"Number {n}.", "hidden": n, "fault": faults[n % 4]} for n in range(4)]
    options = {"environment": reference("Fragile"), "train": rows, "test_share": 0.0}
    run_locally(episode_config(tmp_path, "run", 1, options=options, evaluation={"problems": 0}))
    (step,) = steps_of(tmp_path / "run")
    for name in ("whole", "parts"):
        report = step[name]["rollout"]
        assert report["episodes"]["failed"] == report["verdicts"]["crash"] == 6  # 2 of 4 problems, 3 each
        assert report["episodes"]["ends"]["failed"] == 6
        assert report["reward"] > 0.125  # of the others alone: each of their turns earns something
        for source in ("whole", "parts"):
            assert step[name]["learning"]["dropped"][source] == {"environment_failed": 6}
    learnt = list(RolloutLog(tmp_path / "run" / "rollouts").read_learnt(1))
    failed = [row for row in learnt if row["fate"] == "environment_failed"]
    assert len(failed) == 4 * 6  # learners x sources x episodes
    notes = (tmp_path / "run" / "notes.txt").read_text()
    assert "the environments of 6 of 12 episodes of whole failed; most often" in notes
    assert "raised RuntimeError: there is no such level" in notes


def test_evaluation_plays_episodes(tmp_path: Path) -> None:
    config = episode_config(tmp_path, "run", 1)
    run_locally(config)
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    during = json.loads(lines[-1])["agents"]
    request = EvaluationRequest(targets=(str(tmp_path / "run"),), on=("task",), output=tmp_path / "eval")
    results, _ = evaluate_targets(request)
    found = {pair.agent: pair.score for pair in results.pairs}
    assert found.keys() == {"whole", "parts"}
    assert during.keys() == found.keys()


def test_resampling_asks_further_episodes(tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 3, "rollouts_per_prompt": 2, "max_new_tokens": 60, "resample": 1}
    config = episode_config(tmp_path, "run", 1, rollout=rollout, evaluation={"problems": 0})
    run_locally(config)
    (step,) = steps_of(tmp_path / "run")
    assert sum(step["whole"]["rollout"]["episodes"]["ends"].values()) == step["whole"]["rollout"]["rollouts"]


def asynchronous(folder: Path, name: str, staleness: int) -> RunConfig:
    """A run whose agents sample with copies of their weights, in processes of their own."""
    config = episode_config(folder, name, evaluation={"problems": 0})
    agents = tuple(replace(agent, replicas=ReplicaSettings(count=1)) for agent in config.agents)
    return replace(config, agents=agents, asynchronous=AsynchronousSettings(max_staleness=staleness))


def test_an_asynchronous_run_without_overlap_is_the_synchronous_one(tmp_path: Path) -> None:
    run_locally(asynchronous(tmp_path, "synchronous", 0))

    def is_early(job: Job) -> bool:
        return job.kind == "sample" and ("publish", job.agent, job.step - 1) not in order.ran

    order = Order(delayed(is_early))
    finish(asynchronous(tmp_path, "asynchronous", 1), order)
    differing = set(differing_files(tmp_path / "synchronous", tmp_path / "asynchronous"))
    # metrics.jsonl has the staleness; nothing was evaluated
    assert differing == {"metrics.jsonl", "evaluations.jsonl"}
    found = steps_of(tmp_path / "asynchronous")
    for step in found:
        for report in step.values():
            staleness = report.pop("asynchronous")["staleness"]
            assert {one["steps_max"] for one in staleness.values()} == {0}
    assert found == steps_of(tmp_path / "synchronous")


def test_an_asynchronous_run_that_overlaps(tmp_path: Path) -> None:
    run_locally(asynchronous(tmp_path, "run", 1))
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for row in RolloutLog(tmp_path / "run" / "rollouts").read():
        for segment in row["segments"]:  # every turn says which weights sampled it, where they have changed
            covered = sum(tokens for _, tokens in segment.get("versions", []))
            assert covered in (0, len(segment["token_logprobs"]))


def test_a_dry_run_tries_every_environment(tmp_path: Path) -> None:
    plan = dry_run(episode_config(tmp_path, "run"))
    assert plan.train_problems is not None
    assert plan.agents[0].longest_prompt is not None
    assert plan.agents[0].longest_prompt > 300  # of the tool's description
    rows = [{**row, "fault": "reset"} for row in episode_rows()]
    options = {"environment": {"tool": reference("GuessByTool"), "text": reference("Fragile")}, "train": rows}
    with pytest.raises(TaskError, match=r"environment\.text: reset .*RuntimeError: there is no such level"):
        dry_run(episode_config(tmp_path, "run", options=options))
