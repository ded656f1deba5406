"""What all agents have in common is said once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hacrl.config.load import build_config, config_to_yaml, load_config
from hacrl.config.schema import AgentSettings, LoraSettings
from hacrl.errors import ConfigError


def agents_of(defaults: Any, *agents: dict[str, Any]) -> tuple[AgentSettings, ...]:
    listed = [{"name": f"a{index}", "model": "m", **agent} for index, agent in enumerate(agents)]
    return build_config({"agents": listed, "agent_defaults": defaults, "output": "x"}).agents


def refusal(defaults: Any, *agents: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        agents_of(defaults, *agents)
    return str(caught.value)


def test_every_agent_gets_them_and_its_own_keys_win() -> None:
    one, other = agents_of({"lr": 1e-4, "precision": "bfloat16"}, {}, {"lr": 2e-4})
    assert (one.lr, one.precision) == (1e-4, "bfloat16")
    assert (other.lr, other.precision) == (2e-4, "bfloat16")


def test_even_the_model_can_be_common() -> None:
    config = build_config(
        {
            "agents": [{"name": "a"}, {"name": "b", "model": "n"}],
            "agent_defaults": {"model": "m"},
            "output": "x",
        }
    )
    assert [agent.model for agent in config.agents] == ["m", "n"]


def test_nested_keys_are_merged_one_by_one() -> None:
    defaults = {
        "lora": {"rank": 8, "targets": ["q_proj", "k_proj"]},
        "chat_template_args": {"enable_thinking": False, "date": "x"},
    }
    plain, changed = agents_of(
        defaults,
        {},
        {"lora": {"rank": 4, "alpha": 1.0}, "chat_template_args": {"date": "y"}},
    )
    assert plain.lora == LoraSettings(rank=8, alpha=32.0, targets=("q_proj", "k_proj"))
    assert changed.lora == LoraSettings(rank=4, alpha=1.0, targets=("q_proj", "k_proj"))
    assert changed.chat_template_args == {"enable_thinking": False, "date": "y"}
    (narrowed,) = agents_of(defaults, {"lora": {"targets": ["v_proj"]}})
    assert narrowed.lora == LoraSettings(rank=8, targets=("v_proj",))  # lists are replaced, not joined


def test_null_switches_off() -> None:
    on, off = agents_of({"lora": {"rank": 8}, "lr": 1e-4}, {}, {"lora": None, "lr": None})
    assert on.lora == LoraSettings(rank=8)
    assert (off.lora, off.lr) == (None, None)
    (again,) = agents_of({"lora": None}, {"lora": {"rank": 2}})
    assert again.lora == LoraSettings(rank=2)


@pytest.mark.parametrize("defaults", [None, {}])
def test_an_empty_section_says_nothing(defaults: dict[str, Any] | None) -> None:
    assert agents_of(defaults, {}) == (AgentSettings(name="a0", model="m"),)


@pytest.mark.parametrize(
    ("defaults", "agent", "words"),
    [
        ({"lorra": {}}, {}, ["agents.0.lorra: unknown key", "'lora'"]),
        ({"lora": {"rnk": 8}}, {}, ["agents.0.lora.rnk: unknown key"]),
        ({"lora": {"rank": 0}}, {}, ["agents.0.lora", "rank must be between 1 and 65536, not 0"]),
        ({"lora": {"rank": 2.5}}, {}, ["agents.0.lora.rank", "2.5"]),
        ({"precision": "float8"}, {}, ["agents.0.precision", "'float8'"]),
        ({"lora": {"rank": 8}}, {"lora": 3}, ["agents.0.lora", "3"]),
        ({"lr": -1.0}, {}, ["agents.0", "lr must be positive"]),
        ("lora", {}, ["agent_defaults", "mapping of keys to values", "'lora'"]),
        ([{"lr": 1e-4}], {}, ["agent_defaults", "mapping of keys to values"]),
    ],
)
def test_errors_name_the_agent_s_key(defaults: Any, agent: dict[str, Any], words: list[str]) -> None:
    message = refusal(defaults, agent)
    for word in words:
        assert word in message


@pytest.mark.parametrize("agents", [3, None, {"a": {}}])
def test_agents_that_are_no_list_are_what_is_wrong(agents: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"agents": agents, "agent_defaults": {"lr": 1e-4}, "output": "x"})
    assert "agents" in str(caught.value)
    assert "agent_defaults" not in str(caught.value)


RECIPE = """\
agent_defaults: {precision: bfloat16, lora: {rank: 4, targets: [q_proj]}}
agents:
  - {name: ada, model: m}
  - {name: ben, model: n, lora: null}
  - {name: cyd, model: o, lora: {alpha: 4}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def test_from_a_file(recipe: Path) -> None:
    ada, ben, cyd = load_config(recipe).agents
    assert ada.lora == LoraSettings(rank=4, targets=("q_proj",))
    assert ben.lora is None
    assert cyd.lora == LoraSettings(rank=4, alpha=4.0, targets=("q_proj",))
    assert {ada.precision, ben.precision, cyd.precision} == {"bfloat16"}


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (["agent_defaults.lora.rank=8"], [8, None, 8]),
        (["agents.ada.lora.rank=2"], [2, None, 4]),
        (["agent_defaults.lora.rank=8", "agents.cyd.lora.rank=1"], [8, None, 1]),
        (["agent_defaults.lora=null"], [None, None, 16]),
        (["agents.ben.lora={}"], [4, 4, 4]),
        (["agents.0.lora=null"], [None, None, 4]),
    ],
)
def test_overrides(recipe: Path, overrides: list[str], ranks: list[int | None]) -> None:
    config = load_config(recipe, overrides)
    assert [agent.lora.rank if agent.lora else None for agent in config.agents] == ranks


def test_an_override_can_begin_the_section(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("agents: [{name: ada, model: m}]\n")
    (ada,) = load_config(path, ["agent_defaults.lora.rank=8", "agent_defaults.lr=1e-4"]).agents
    assert (ada.lora, ada.lr) == (LoraSettings(rank=8), 1e-4)


def test_the_resolved_config_reads_back_as_itself(recipe: Path, tmp_path: Path) -> None:
    overrides = ["agent_defaults.chat_template_args.enable_thinking=false", "agents.ada.attention=eager"]
    config = load_config(recipe, overrides)
    written = tmp_path / "config.yaml"
    written.write_text(config_to_yaml(config))
    assert "agent_defaults" not in written.read_text()  # it is written into every agent
    assert load_config(written) == config
    assert config.agents[0].chat_template_args == {"enable_thinking": False}


def test_the_recipe_given_is_left_as_it_was() -> None:
    data = {"agents": [{"name": "a", "model": "m"}], "agent_defaults": {"lora": {"rank": 8}}, "output": "x"}
    build_config(data)
    assert data == {
        "agents": [{"name": "a", "model": "m"}],
        "agent_defaults": {"lora": {"rank": 8}},
        "output": "x",
    }
