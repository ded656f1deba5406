"""Invalid agent settings are refused."""

from __future__ import annotations

import pytest

from hacrl.config.schema import AgentSettings


@pytest.mark.parametrize("name", ["ada", "Qwen3-1.7B_base", "7"])
def test_names_that_can_be_folders(name: str) -> None:
    assert AgentSettings(name=name, model="m").name == name


@pytest.mark.parametrize("name", ["", "a/b", "..", ".ada", "-ada", "ada lovelace", "ada\n"])
def test_names_that_cannot(name: str) -> None:
    with pytest.raises(ValueError, match="becomes a folder name"):
        AgentSettings(name=name, model="m")


@pytest.mark.parametrize(("key", "value"), [("rollouts_per_prompt", 0), ("lr", 0.0), ("lr", -1e-6)])
def test_impossible_values(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{key} must .* not {value}"):
        AgentSettings(name="ada", model="m", **{key: value})
