"""``HACRLTrainer(environment_factory=...)``: classes as TRL takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hacrl import HACRLConfig, HACRLTrainer
from hacrl.errors import ConfigError, TaskError
from hacrl.rollouts.log import RolloutLog
from tests.support.episode_agents import save_agents
from tests.support.episode_environments import GuessByTool, GuessInText, Judged

ROWS = [{"prompt": f"Number {n}.", "hidden": n % 9} for n in range(6)]


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Agents that call tools: name -> folder."""
    saved = save_agents(tmp_path_factory.mktemp("callers"))
    return {name: str(path) for name, path in saved.items()}


def make(callers: dict[str, str], output: Path, **changes: Any) -> HACRLTrainer:
    settings = {
        "steps": 1,
        "device": "cpu",
        "threads": 1,
        "episodes": {"max_turns": 3, "max_turn_tokens": 12},
        "rollout": {"prompts_per_step": 3, "rollouts_per_prompt": 2, "max_new_tokens": 220},
        "progress": False,
        **changes.pop("settings", {}),
    }
    given = {"environment_factory": GuessByTool, "train_dataset": ROWS, **changes}
    return HACRLTrainer(callers, args=HACRLConfig(output=output, **settings), **given)


def lengths(completions: list[Any], **_: Any) -> list[float]:
    """The number of messages."""
    return [float(len(messages)) for messages in completions]


def test_several_classes_and_a_reward_function(callers: dict[str, str], tmp_path: Path) -> None:
    rows = [{**row, "environment": ("tool", "text")[n % 2]} for n, row in enumerate(ROWS)]
    factories = {"tool": GuessByTool, "text": GuessInText}
    trainer = make(
        callers, tmp_path / "run", environment_factory=factories, train_dataset=rows, reward_funcs=lengths
    )
    trainer.train()
    verdicts = list(RolloutLog(tmp_path / "run" / "rollouts").read(1))
    assert len(verdicts) == 2 * 3 * 2
    for row in verdicts:
        messages = sum(len(segment["turns"]) for segment in row["segments"])
        assert row["rewards"]["lengths"] == messages
        assert row["reward"] == pytest.approx(messages + row["rewards"]["environment"])
        assert row["episode"]["reward"] == row["rewards"]["environment"]
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    options = config["task"]["options"]
    assert options["environment"] == {
        "tool": "tests.support.episode_environments:GuessByTool",
        "text": "tests.support.episode_environments:GuessInText",
    }
    assert options["functions"] == ["tests.api.test_environment_factory:lengths"]
    assert (options["max_turns"], options["train"]) == (3, "object:list of 6 rows")


def test_a_class_of_a_function_runs_in_threads(callers: dict[str, str], tmp_path: Path) -> None:
    """It cannot be imported elsewhere; a note says that it cannot be ended."""

    class Local(GuessByTool):
        pass

    make(callers, tmp_path / "run", environment_factory=lambda: Local()).train()
    notes = (tmp_path / "run" / "notes.txt").read_text()
    assert "run in threads" in notes


def test_what_is_refused(callers: dict[str, str], tmp_path: Path) -> None:
    def refused(words: str, kind: type[Exception] = ConfigError, **changes: Any) -> None:
        with pytest.raises(kind, match=words):
            make(callers, tmp_path / "run", **changes)

    refused("train_dataset: missing; environment_factory needs rows", train_dataset=None)
    refused(
        r"environment_factory: a task has its own data and rewards", task="arithmetic", train_dataset=None
    )
    refused("episodes: a task has its own", task="arithmetic", train_dataset=None, environment_factory=None)
    words = r"episodes\.max_turn: unknown key; did you mean 'max_turns'\?"
    refused(words, settings={"episodes": {"max_turn": 1}})
    refused(
        "episodes: there are no episodes without environment_factory",
        environment_factory=None,
        reward_funcs=lengths,
    )
    refused("environment_factory: has no get_reward", TaskError, environment_factory=Judged)
    refused("max_turns=0: must be a whole number", TaskError, settings={"episodes": {"max_turns": 0}})
    assert not (tmp_path / "run").exists()
