"""Agents whose processes are killed are rebuilt, and the run's files are those of a calm run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.config.schema import CheckpointSettings, RaySettings, RunConfig
from hacrl.errors import TrainingError
from hacrl.runs.run import LocalRun, run_locally
from tests.executors.executor_contract import asynchronous
from tests.support.chaos import chaos_config, differing_files
from tests.support.ray_cluster import Killer, Moment, connected
from tests.training.asynchronous.orders import lines, logged


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


def train(config: RunConfig, *moments: Moment) -> Killer:
    killer = Killer(moments)
    with LocalRun(config, [killer]) as run:
        killer.run = run
        run.train()
        run.save()
    assert killer.waiting == []
    return killer


def ray_config(output: Path, steps: int, **settings: object) -> RunConfig:
    return replace(chaos_config(output, steps), executor="ray", ray=RaySettings(**settings))  # type: ignore[arg-type]


def test_killed_agents_are_rebuilt_to_the_last_bit(tmp_path: Path) -> None:
    run_locally(chaos_config(tmp_path / "calm", 4))
    every_second = CheckpointSettings(every=2, background=False)
    config = replace(ray_config(tmp_path / "killed", 4), checkpoint=every_second)
    killer = train(
        config,
        (1, "rollout", "small"),  # nothing learnt yet, no checkpoint: the first weights
        (2, "learn", "llama"),  # step 1 is learnt again from the log
        (3, "verify", "small"),
        (4, "learn", "small"),  # step 3 again, after the checkpoint of step 2
        (4, "save", "llama"),
    )
    rebuilt = [note for note in killer.notes if "is rebuilt from" in note]
    assert rebuilt == [
        "agent 'small' is rebuilt from its first weights",
        "agent 'llama' is rebuilt from its first weights; steps 1 to 1 are learnt again from the rollout log",
        "agent 'small' is rebuilt from the checkpoint of step 2",
        "agent 'small' is rebuilt from the checkpoint of step 2; "
        "steps 3 to 3 are learnt again from the rollout log",
        "agent 'llama' is rebuilt from the checkpoint of step 4",
    ]
    assert differing_files(tmp_path / "calm", tmp_path / "killed") == []


def test_an_agent_is_rebuilt_from_all_rounds_of_a_step(tmp_path: Path) -> None:
    def resampling(config: RunConfig) -> RunConfig:
        return replace(config, rollout=replace(config.rollout, resample=2))

    run_locally(resampling(chaos_config(tmp_path / "calm", 2)))
    rounds = list((tmp_path / "calm" / "rollouts").glob("step-000001/round-*/llama.jsonl"))
    assert rounds  # the first step asked further prompts, which the lost agent has to learn from again
    no_checkpoint = CheckpointSettings(every=0)
    config = replace(resampling(ray_config(tmp_path / "killed", 2)), checkpoint=no_checkpoint)
    killer = train(config, (2, "learn", "llama"))
    assert any("steps 1 to 1 are learnt again from the rollout log" in note for note in killer.notes)
    assert differing_files(tmp_path / "calm", tmp_path / "killed") == []


def test_the_others_go_on_without_a_dropped_agent(tmp_path: Path) -> None:
    killer = train(ray_config(tmp_path / "run", 3, on_loss="drop"), (2, "learn", "llama"))
    assert any("agent 'llama' is dropped" in note for note in killer.notes)
    assert sorted(path.name for path in (tmp_path / "run" / "agents").iterdir()) == ["small"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    agents = [sorted(json.loads(line)["agents"]) for line in lines]
    assert agents == [["llama", "small"], ["small"], ["small"]]


def test_agents_of_an_asynchronous_run_are_rebuilt_while_the_others_go_on(tmp_path: Path) -> None:
    config = replace(
        asynchronous(tmp_path / "run", 1),
        executor="ray",
        steps=6,
        checkpoint=CheckpointSettings(every=2, background=False),
    )
    moments: tuple[Moment, ...] = ((2, "learn", "llama"), (4, "rollout", "small"), (5, "learn", "small"))
    killer = train(config, *moments)
    rebuilt = [note.partition(" from ")[0] for note in killer.notes if "is rebuilt from" in note]
    assert rebuilt == [f"agent '{agent}' is rebuilt" for _, _, agent in moments]
    steps = lines(tmp_path / "run", "metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(1, 7))
    for line in steps:
        for name, report in line["agents"].items():
            assert report["policy_version"] == 4 * line["step"]  # 2 updates for each of 2 sources
            assert report["asynchronous"]["staleness"][name]["steps_max"] <= 1
            rows = logged(config, line["step"], name, learnt=True)
            assert len({(row["agent"], row["problem"], row["sample"]) for row in rows}) == len(rows) == 32


def test_an_asynchronous_run_goes_on_without_a_dropped_agent(tmp_path: Path) -> None:
    config = replace(
        asynchronous(tmp_path / "run", 1), executor="ray", steps=4, ray=RaySettings(on_loss="drop")
    )
    killer = train(config, (2, "learn", "llama"))
    assert any("agent 'llama' is dropped" in note for note in killer.notes)
    assert [sorted(line["agents"]) for line in lines(tmp_path / "run", "metrics.jsonl")] == [
        ["llama", "small"],
        ["small"],
        ["small"],
        ["small"],
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_loss": "stop"}, "hacrl resume goes on from the last checkpoint"),
        ({"max_rebuilds": 0}, "max_rebuilds=0"),
    ],
)
def test_a_loss_that_ends_the_run_can_be_resumed(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        train(ray_config(tmp_path / "run", 3, **settings), (2, "learn", "llama"))
