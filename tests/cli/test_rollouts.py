from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hacrl.cli.main import app
from hacrl.errors import ConfigError
from hacrl.rollouts.log import RolloutLog
from hacrl.types import Episode, Problem, Rollout, Segment, ToolCall, Turn, Verdict, VerifiedRollout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    log = RolloutLog(tmp_path / "rollouts")
    for step in (1, 2):
        for name, right in (("large", 1), ("small", 0)):
            verified = []
            for number in range(2):
                problem = Problem(f"q{number}", f"ask {number}", f"gold{number}")
                text = f"\x1b[2J{name} says {number} in step {step}"
                rollout = Rollout.single_turn(problem, name, text, (1, 2), (-1.0, -1.0), "length", 0, "t")
                reward = float(number == right)
                verified.append(VerifiedRollout(rollout, Verdict(reward, "correct" if reward else "wrong")))
            log.append(step, name, verified)
    return tmp_path


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["rollouts", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_newest_step_is_shown_grouped_by_prompt(run: Path):
    text = shown(run)
    assert "\x1b[2J" not in text
    order = ["ask 0", "gold0", "large says 0", "small says 0", "ask 1", "large says 1", "small says 1"]
    places = [text.index(one) for one in order]
    assert places == sorted(places)
    assert "step 1" not in text
    assert "cut at max_new_tokens" in text
    assert "4 of 4 rollouts match, 2 prompts" in text


def test_filters(run: Path):
    text = shown(run, "--step", 1, "--agent", "small", "--reward", ">0.5")
    assert "small says 0 in step 1" in text
    assert "small says 1" not in text
    assert "large" not in text
    assert "1 of 4 rollouts match, 1 prompts" in text
    both = shown(run, "--problem", "q1")  # of all steps
    assert "small says 1 in step 1" in both
    assert "small says 1 in step 2" in both
    assert "ask 0" not in both
    assert "1 more with a larger --limit" in shown(run, "--limit", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", 9], "steps 1 to 2"),
        (["--agent", "smal"], "large, small"),
        (["--reward", "good"], "--reward must be a number"),
    ],
)
def test_a_wrong_filter_is_refused_with_the_valid_values(run: Path, arguments: list, message: str):
    with pytest.raises(ConfigError, match=message):
        shown(run, *arguments)


def test_a_folder_without_rollouts(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no rollouts"):
        shown(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        shown(tmp_path / "nowhere")


def test_an_episode_is_a_conversation(tmp_path: Path):
    problem = Problem("q", "Add 2 and 3.", "")
    call = ToolCall("add", '{"a": 2}')
    segments = (
        Segment("action", "raw call", (1,), (-1.0,), turns=(Turn("assistant", "I add.", (call,)),)),
        Segment("observation", "raw result", (2,), turns=(Turn("tool", "\x1b[2Jfive", tool="add"),)),
        Segment("action", "5", (3,), (-1.0,), turns=(Turn("assistant", "5"),), finish_reason="length"),
    )
    episode = Episode("failed", "d", " Use tools.", failure="raised ValueError: x")
    rollout = Rollout(problem, "ada", segments, "length", 0, "t", episode=episode)
    RolloutLog(tmp_path / "rollouts").append(1, "ada", [VerifiedRollout(rollout, Verdict(0.0, "crash"))])
    text = shown(tmp_path)
    assert "\x1b[2J" not in text
    flat = " ".join(text.split())
    assert "ada #0: reward 0, crash, 2 tokens, 2 turns, the environment failed: it raised" in flat
    parts = ["[user: the environment's opening]", "Use tools.", "[assistant]", "I add.", '-> add({"a": 2})']
    parts += ["[tool add]", "five", "[assistant] (cut)", "5"]
    places = [text.index(part) for part in parts[:-2]]
    assert places == sorted(places)
    assert text.index("[assistant] (cut)") > places[-1]
    assert "raw" not in text
