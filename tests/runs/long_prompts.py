"""Two saved agents without weights, a task of prompts with known lengths, and runs that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hacrl.config.load import build_config
from hacrl.config.schema import RunConfig
from hacrl.errors import HacrlError
from hacrl.runs.run import run_locally
from hacrl.tasks.base import Task
from hacrl.types import Problem
from tests.support.sevens import SevensTask, problem
from tests.support.tiny import save_agents


class LongTask(SevensTask):
    """Training prompts of 3 to 10 characters, held-out ones of 11 and 12; each is a token for both agents."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "long"
        self.train: Sequence[Problem] = [problem("+" * length + ":") for length in range(2, 10)]
        self.test: Sequence[Problem] = [problem("+" * length + ":") for length in (10, 11)]


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Two agents with a context of 64 tokens, without weights: loading them fails."""
    saved = save_agents(tmp_path / "models")
    for folder in saved.values():
        (Path(folder) / "model.safetensors").unlink()
    return saved


def config_of(models: dict[str, str], output: Path, **changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "agents": [{"name": name, "model": folder} for name, folder in models.items()],
        "output": str(output / "run"),
        "steps": 1,
        "device": "cpu",
        "threads": 1,
        "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 2, "max_new_tokens": 4},
        "learning": {"lr": 1e-3},
        "evaluation": {"problems": 2, "samples_per_problem": 1},
        **changes,
    }
    return build_config(data)


def with_rollout(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, rollout=replace(config.rollout, **changes))


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refusal(config: RunConfig, task: Task, error: type[HacrlError]) -> str:
    """Return the error of the whole run; check that nothing is written."""
    with pytest.raises(error) as caught:
        run_locally(config, task=task)
    assert not Path(config.output).exists()
    return str(caught.value)
