"""Recipes in, checked records or helpful errors out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hacrl.config.checks import updates_per_step
from hacrl.config.load import build_config, config_to_yaml, load_config, parse_yaml, shipped_recipes
from hacrl.config.schema import GspoSettings, HacpoSettings
from hacrl.errors import ConfigError

AGENTS = [{"name": "ada", "model": "bundled:qwen-small-a"}, {"name": "ben", "model": "bundled:llama-pairs"}]


def recipe(**changes):
    return {"agents": AGENTS, "output": "runs/x", **changes}


def refusal(data) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config(data, "recipe.yaml")
    return str(caught.value)


def test_defaults_follow_the_paper():
    config = build_config(recipe())
    assert isinstance(config.method, HacpoSettings)
    assert (config.method.delta, config.method.clip_low, config.method.clip_high) == (0.2, 0.0003, 0.0004)
    assert (config.method.reading, config.method.capability_window) == ("paper", 5)
    assert (config.rollout.rollouts_per_prompt, config.learning.lr) == (8, 1e-6)
    assert config.method.choices.kl_coefficient == 0


def test_a_method_may_be_named_shortly_and_is_hacpo_unless_named():
    assert build_config(recipe(method="naive")).method.name == "naive"
    config = build_config(recipe(method={"alpha": 2.0}))
    assert (config.method.name, config.method.alpha) == ("hacpo", 2.0)
    message = refusal(recipe(method={"alfa": 2.0}))
    assert "method.alfa: unknown key; did you mean 'alpha'?" in message


def test_a_task_may_be_named_shortly():
    assert build_config(recipe(task="gsm8k")) == build_config(recipe(task={"name": "gsm8k"}))


def test_one_agent_alone_may_make_any_number_of_updates():
    config = build_config(recipe(agents=AGENTS[:1], learning={"updates_per_step": 10}))
    assert updates_per_step(config) == 10


def test_a_folder_does_not_hide_a_recipe_of_that_name(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert [agent.name for agent in load_config(Path("demo")).agents] == ["small", "large", "llama"]


def test_yaml_merge_keys_work(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "agents:\n  - &base {name: a, model: 'bundled:qwen-large', lr: 1e-4}\n  - {<<: *base, name: b}\n"
    )
    assert [(agent.name, agent.lr) for agent in load_config(path).agents] == [("a", 1e-4), ("b", 1e-4)]


def test_a_method_brings_its_own_defaults():
    config = build_config(recipe(method={"name": "grpo"}))
    assert (config.method.clip_low, config.method.clip_high) == (0.2, 0.28)
    assert isinstance(build_config(recipe(method={"name": "gspo"})).method, GspoSettings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stepz": 3}, ["stepz", "unknown key", "'steps'"]),
        ({"rollout": {"temprature": 1.0}}, ["rollout.temprature", "'temperature'"]),
        ({"method": {"name": "hacpo", "alfa": 1.0}}, ["method.alfa", "'alpha'"]),
        ({"method": {"name": "gspo", "alpha": 1.0}}, ["method.alpha", "unknown key"]),
        ({"agents": [{"name": "a", "model": "m", "lora": {"rnk": 3}}]}, ["agents.0.lora.rnk", "'rank'"]),
        (
            {"method": {"name": "ppo"}},
            [
                "method.name",
                "grpo, gspo, naive, hacpo, success_gated, xgrpo, ftis, sapo, s2l_po, aligned, not 'ppo'",
            ],
        ),
        ({"method": "hacp"}, ["method.name", "not 'hacp'; did you mean 'hacpo'?"]),
        ({"method": 3}, ["method: must be a mapping of keys to values, not 3"]),
        ({"task": 3}, ["task: must be a mapping of keys to values, not 3"]),
        ({"task": {"name": 3}}, ["task.name: must be text, not 3"]),
        ({"trackers": "wandb"}, ["trackers: must be a list, not 'wandb'"]),
        ({"agents": [{"name": "a", "model": "m", "lrr": 1.0}]}, ["agents.0.lrr", "'lr'"]),
        ({"agents": [{"name": "a"}]}, ["agents.0: model is missing", "endpoint"]),
        ({"agents": []}, ["at least one agent"]),
        ({"steps": "many"}, ["steps: must be a whole number, not 'many'"]),
        ({"steps": 2.5}, ["steps: must be a whole number, not 2.5"]),
        ({"steps": True}, ["steps", "True"]),
        ({"steps": -1}, ["steps", "-1"]),
        ({"learning": {"lr": "1"}}, ["learning.lr: must be a number, not '1'"]),
        ({"learning": {"lr": 0.0}}, ["lr", "positive"]),
        ({"learning": {"lr": float("nan")}}, ["recipe.yaml: learning.lr: only plain, finite values"]),
        ({"agents": [{"name": "a", "model": Path("m")}]}, ["agents.0.model: only plain, finite values"]),
        ({"rollout": {"temperature": 0.0}}, ["temperature", "learning needs sampling"]),
        ({"rollout": {"top_p": 1.5}}, ["top_p", "1.5"]),
        ({"method": {"name": "hacpo", "delta": 0.8, "delta_step": -1.0}}, ["delta_step"]),
        ({"method": {"name": "hacpo", "delta": 1.0}}, ["delta", "table 5"]),
        (
            {"method": {"name": "hacpo", "cross_baseline": "mine"}},
            ["cross_baseline: must be 'source'", "'mine'"],
        ),
        ({"agents": [{"name": "a/b", "model": "m"}]}, ["'a/b'", "folder name"]),
        ({"agents": 3}, ["agents", "3"]),
        ({"learning": None}, ["learning", "None"]),
    ],
)
def test_bad_keys_and_values_are_named(changes, words):
    message = refusal(recipe(**changes))
    for word in words:
        assert word in message


def test_duplicate_agent_names_are_refused():
    message = refusal(recipe(agents=[{"name": "ada", "model": "x"}, {"name": "Ada", "model": "y"}]))
    assert "2 agents are called 'ada'" in message


def test_one_rollout_per_agent_is_refused_where_there_is_nothing_to_compare():
    alone = recipe(method={"name": "gspo"}, rollout={"rollouts_per_prompt": 1})
    assert "single response" in refusal(alone)
    assert "'ada'" in refusal(alone)
    # two agents that share have two responses to compare
    assert build_config(recipe(rollout={"rollouts_per_prompt": 1})).rollout.rollouts_per_prompt == 1
    lone = recipe(agents=AGENTS[:1], rollout={"rollouts_per_prompt": 1})
    assert "single response" in refusal(lone)


def test_a_clip_schedule_that_closes_is_refused_with_its_numbers():
    # 2 agents x 4 updates = 8: the last bound is 0.8 + 7 * 0.025 = 0.975; one more per source gives 10
    fine = build_config(recipe(learning={"updates_per_source": 4}))
    assert updates_per_step(fine) == 8
    message = refusal(recipe(learning={"updates_per_source": 5}))
    assert "empty from update 9 of 10" in message
    assert "updates_per_source=5" in message
    # without clipping there is no schedule; GSPO has none
    build_config(recipe(learning={"updates_per_source": 5}, method={"name": "hacpo", "cross_clip": False}))
    assert updates_per_step(build_config(recipe(method={"name": "gspo"}, learning={"epochs": 3}))) == 6


def test_updates_per_step_can_be_given():
    assert updates_per_step(build_config(recipe(learning={"updates_per_step": 3}))) == 3
    assert "updates_per_step=1" in refusal(recipe(learning={"updates_per_step": 1, "epochs": 2}))


def test_yaml_floats_duplicates_and_syntax(tmp_path: Path):
    path = tmp_path / "r.yaml"
    base = "agents: [{name: a, model: 'bundled:qwen-large'}]\n"
    path.write_text(base + "learning: {lr: 2e-6}\n")
    config = load_config(path)
    assert config.learning.lr == 2e-6
    assert config.output == "runs/r"
    path.write_text(base + "steps: 1\nsteps: 2\n")
    with pytest.raises(ConfigError, match="'steps' stands twice"):
        load_config(path)
    path.write_text("agents: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(path)
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_config(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)
    path.write_text(base + "1: 2\n")
    with pytest.raises(ConfigError, match="key 1 must be text"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path):
    config = load_config(Path("demo"), ["method.capability_window=3", "agents.large.lr=1e-4"])
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(path) == config
    assert config.agents[1].lr == 1e-4


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_reads_back_as_itself(name: str, tmp_path: Path):
    config = load_config(Path(name))
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def resolved(**changes) -> dict:
    config = build_config(recipe(**changes))
    text = config_to_yaml(config)
    assert "null" not in text
    found = parse_yaml(text, "config.yaml")
    assert build_config(found) == config
    return found


def test_the_resolved_config_has_no_keys_that_are_not_set():
    plain = resolved()
    assert plain["learning"]["lr"] == 1e-6
    assert "updates_per_step" not in plain["learning"]
    assert resolved(learning={"updates_per_step": 3})["learning"]["updates_per_step"] == 3
    # an empty value is not an unset one, and what is inside options is the user's
    options = {"train": "a.jsonl", "columns": None}
    agent = {"name": "a", "model": "m", "trust_remote_code": False}
    config = build_config(recipe(task={"name": "boxed", "options": options}, agents=[agent]))
    written = parse_yaml(config_to_yaml(config), "config.yaml")
    assert written["task"]["options"] == options
    assert (written["agents"][0]["trust_remote_code"], written["trackers"]) == (False, [])


def test_the_resolved_config_has_the_choices_that_override_the_reading():
    assert resolved()["method"]["reading"] == "paper"
    assert not resolved()["method"].keys() & {"ratio_length", "kl_coefficient", "minibatch_order"}
    method = resolved(method={"reading": "public", "ratio_length": "source", "kl_coefficient": 0.0})["method"]
    assert (method["reading"], method["ratio_length"], method["kl_coefficient"]) == ("public", "source", 0.0)
    assert "cross_baseline" not in method
    assert next(iter(method)) == "name"


def test_the_resolved_config_has_a_vllm_section_where_it_means_something():
    def sections(**agent) -> dict:
        return resolved(agents=[{"name": "a", "model": "m", **agent}])["agents"][0]

    assert "vllm" not in sections()
    assert sections(engine="vllm")["vllm"]["max_sequences"] == 256
    assert sections(vllm={"memory": 0.25})["vllm"]["memory"] == 0.25  # has no effect, but is not lost
    assert "vllm" in resolved(rollout={"engine": "vllm"})["agents"][0]


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"stop": 3}, "rollout.stop: must be text or a list, not 3"),
        ({"stop": ["a", 3]}, "rollout.stop.1: must be text, not 3"),
    ],
)
def test_a_value_that_may_be_of_several_kinds_is_one_problem(rollout, said):
    data = {"agents": [{"name": "ada", "model": "m"}], "output": "unused", "rollout": rollout}
    with pytest.raises(ConfigError) as caught:
        build_config(data)
    assert str(caught.value).splitlines()[1:] == [f"  {said}"]


def test_an_unknown_key_is_named_even_if_it_is_the_name_of_a_kind():
    with pytest.raises(ConfigError, match=r"rollout\.int: unknown key"):
        build_config({"agents": [{"name": "ada", "model": "m"}], "output": "x", "rollout": {"int": 3}})


def test_gradients_that_are_compared_are_not_offloaded():
    message = refusal(recipe(method="aligned", learning={"offload": "all"}))
    assert "learning.offload=all" in message
    assert "use offload: weights" in message
    assert (
        build_config(recipe(method="aligned", learning={"offload": "weights"})).learning.offload == "weights"
    )
