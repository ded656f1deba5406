"""A collapsed agent is reported, and paused if the settings say so; the other agents continue."""

from __future__ import annotations

import json

import pytest

from hacrl.config.load import build_config
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.health import collapse as health
from hacrl.training.health.collapse import CollapseDetector
from hacrl.types import Rollout, Verdict, VerifiedRollout
from tests.support.chaos import chaos_config
from tests.support.rollouts import problem
from tests.support.tiny import with_logit_bias


def said(text: str, reward: float, reason: str = "stop") -> VerifiedRollout:
    rollout = Rollout.single_turn(problem("1:"), "ada", text, (1,), (-0.5,), reason, 0, "")
    return VerifiedRollout(rollout, Verdict(reward, "correct" if reward else "wrong"))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ([said("x", 0.0)], "has had no reward"),
        ([said(" ", 1.0)], "has written no text"),
        ([said("x", 1.0, "length")], "has not ended a single response"),
        ([said("", 0.0, "length")], "has had no reward and has written no text and has not ended a single"),
    ],
)
def test_each_sign_is_named_after_so_many_steps_in_a_row(bad, words):
    detector = CollapseDetector(["ada"], steps=3)
    good = [said("x", 1.0), said("", 0.0, "length")]
    for rollouts in (bad, bad, good, bad, bad):
        assert detector.update({"ada": rollouts}) == []
    (note,) = detector.update({"ada": bad})
    assert note.startswith(f"agent ada {words}")
    assert "for 3 steps" in note
    assert detector.update({"ada": bad}) == []  # reported only once
    assert detector.update({"ada": good}) == []
    assert [len(detector.update({"ada": bad})) for _ in range(3)] == [0, 0, 1]  # and again after it recovered
    assert detector.paused == set()


def test_pausing_and_state():
    detector = CollapseDetector(["ada", "bob"], steps=2, pauses=True)
    detector.update({"ada": [said("", 1.0)], "bob": [said("x", 1.0)]})
    other = CollapseDetector(["ada", "bob"], steps=2, pauses=True)
    other.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    (note,) = other.update({"ada": [said("", 1.0)], "bob": [said("x", 1.0)]})
    assert note.endswith("The agent is paused; the other agents continue")
    assert other.paused == {"ada"}


def mute(config) -> Agent:
    """Return the agent "llama" with a bias to end every response at once."""
    agent = Agent.load(config.agents[1], "cpu")
    return with_logit_bias(agent, {agent.tokenizer.eos_token: 50.0})


def test_a_run_leaves_a_mute_agent_out(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "COLLAPSE_STEPS", 2)
    changes = {"pause_collapsed": True, "evaluation": {"problems": 4}}
    config = chaos_config(tmp_path / "run", 4, **changes)
    with LocalRun(config, agents={"llama": mute(config)}) as run:
        run.train()
        versions = {one.name: one.agent.policy_version for one in run.trainer.executor.workers.values()}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    steps = [json.loads(line)["agents"] for line in lines]
    assert [sorted(agents) for agents in steps] == [["llama", "small"]] * 2 + [["small"]] * 2
    assert "llama" not in steps[2]["small"]["learning"]["sources"]
    assert versions["small"] == 4 * 4  # goes on with as many updates as before
    assert versions["llama"] < versions["small"]
    assert "agent llama has had no reward and has written no text for 2 steps" in (
        tmp_path / "run" / "notes.txt"
    ).read_text(encoding="utf-8")


def test_nobody_left(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "COLLAPSE_STEPS", 1)
    config = chaos_config(tmp_path / "run", 4, pause_collapsed=True)
    one = build_config({**json.loads(json.dumps(_plain(config))), "agents": [_plain(config)["agents"][1]]})
    with pytest.raises(TrainingError, match="no agent left to train: all are paused or lost since step 1"):
        run_locally(one, agents={"llama": mute(config)})


def _plain(config) -> dict:
    import yaml

    from hacrl.config.load import config_to_yaml

    return yaml.safe_load(config_to_yaml(config))


def test_a_paused_agent_stays_paused_when_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "COLLAPSE_STEPS", 2)
    changes = {"pause_collapsed": True, "evaluation": {"problems": 0}}
    whole, parts = (chaos_config(tmp_path / name, 4, **changes) for name in ("whole", "parts"))
    run_locally(whole, agents={"llama": mute(whole)})
    first = chaos_config(tmp_path / "parts", 3, **changes)
    run_locally(first, agents={"llama": mute(parts)})
    found = inspect_run(tmp_path / "parts", ["steps=4"])
    with LocalRun(found.config, agents={"llama": mute(parts)}, resumed=found.point) as run:
        run.train()
    lines = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts")]
    assert lines[0] == lines[1]


def test_twenty_steps_in_a_row_count_as_collapsed():
    detector = CollapseDetector(["ada"])
    notes = [detector.update({"ada": [said("", 1.0)]}) for _ in range(20)]
    assert [len(note) for note in notes] == [0] * 19 + [1]
    assert notes[-1][0].endswith("its policy has collapsed. Set pause_collapsed=true to pause such agents")
    assert detector.paused == set()
