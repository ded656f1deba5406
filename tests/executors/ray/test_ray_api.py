"""HACRLTrainer under Ray: functions given as Python objects reach the agents, and models are saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from hacrl import HACRLConfig, HACRLTrainer
from hacrl.errors import ConfigError, TrainingError
from tests.support.ray_cluster import connected


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


def test_a_function_of_the_user_rewards_agents_in_other_processes(tmp_path: Path) -> None:
    bonus = 0.25  # a closure: no module of this name can be imported in the agents' processes

    def short(completions: list[str], **_: Any) -> list[float]:
        return [bonus + float(len(text) < 12) for text in completions]

    rows = [{"prompt": f"{number}+1="} for number in range(12)]
    settings = HACRLConfig(
        output=str(tmp_path / "run"),
        executor="ray",
        steps=1,
        rollout={"prompts_per_step": 2, "rollouts_per_prompt": 2, "max_new_tokens": 16},
        evaluation={"problems": 0},
        progress=False,
    )
    models = {"one": "bundled:qwen-small-a", "two": "bundled:llama-pairs"}
    trainer = HACRLTrainer(models, reward_funcs=short, train_dataset=rows, args=settings)
    with trainer:
        saved = trainer.save_model(tmp_path / "saved")
        assert sorted(saved) == ["one", "two"]
        AutoModelForCausalLM.from_pretrained(saved["two"])
        assert trainer.agents == {}
        result = trainer.train()
    rewards = [reward for values in result.rewards.values() for reward in values]
    assert len(rewards) == 2
    assert all(0.25 <= reward <= 1.25 for reward in rewards)
    with pytest.raises(TrainingError, match="the run is closed, and its agents have left the cluster"):
        trainer.save_model(tmp_path / "late")


def test_models_given_as_objects_are_refused(tmp_path: Path) -> None:
    from tests.support.tiny import char_agent

    agent = char_agent()
    settings = HACRLConfig(
        output=str(tmp_path / "run"),
        executor="ray",
        steps=1,
        rollout={"max_new_tokens": 8},
        progress=False,
    )
    with pytest.raises(ConfigError, match=r"agents\.one\.model must be a name or a folder, not an object"):
        HACRLTrainer(
            {"one": (agent.model, agent.tokenizer)},
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=[{"prompt": f"{number}+1="} for number in range(40)],
            args=settings,
        )
    assert not (tmp_path / "run").exists()
