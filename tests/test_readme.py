"""The README's recipe runs after the README's install line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hacrl.config.load import build_config, parse_yaml
from hacrl.runs.run import run_locally

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


def recipe() -> dict[str, Any]:
    found = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert found is not None
    data = parse_yaml(found[1], "README.md")
    assert isinstance(data, dict)
    return data


def extras_of(extra: str) -> set[str]:
    """The extras of hacrl that an extra contains."""
    inner = re.findall(r"hacrl\[([^]]*)\]", " ".join(EXTRAS[extra]))
    return {name for listed in inner for name in listed.split(",")}


def test_the_install_line_has_all_that_the_recipe_needs() -> None:
    installed = re.search(r"^pip install '\.\[(.*?)\]'", README, re.MULTILINE)
    assert installed is not None
    data = recipe()
    needed = set(data["trackers"])
    if any("lora" in agent for agent in data["agents"]):
        needed.add("lora")
    if data["task"] == "gsm8k":  # from the hub
        needed.add("data")
    assert needed == {"tensorboard", "lora", "data"}
    assert needed <= extras_of(installed[1])


def test_all_has_every_extra_that_needs_no_environment_of_its_own() -> None:
    apart = {"all", "test", "dev", "vllm", "smollm2"}  # vllm pins its own torch; smollm2 compiles llama.cpp
    apart |= {"openenv", "verifiers"}  # they pin different versions of one package
    assert {name for name in EXTRAS if name not in apart and name != "docs"} == extras_of("all")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_the_recipe_trains(tmp_path: Path) -> None:
    """With tiny agents and problems, and shorter; all other keys as printed."""
    data = recipe()
    for agent, model in zip(data["agents"], ("bundled:qwen-small-a", "bundled:llama-pairs"), strict=True):
        agent["model"] = model
    data |= {"steps": 1, "task": "arithmetic", "output": str(tmp_path / "run"), "device": "cpu", "threads": 1}
    data["rollout"] |= {"prompts_per_step": 2, "max_new_tokens": 16}
    data["evaluation"] = {"problems": 2, "samples_per_problem": 1}
    result = run_locally(build_config(data))
    assert set(result.rewards) == {"qwen", "smol"}
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert (tmp_path / "run" / "agents" / "smol" / "adapter").is_dir()
