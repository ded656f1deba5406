"""``key=value`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hacrl.config.load import load_config
from hacrl.errors import ConfigError

DEMO = Path("demo")


def test_full_keys_bare_keys_and_agents():
    config = load_config(
        DEMO,
        [
            "lr=2e-6",  # only learning has lr as a section
            "rollout.temperature=0.7",
            "steps=3",
            "agents.small.lr=1e-5",
            "agents.2.rollouts_per_prompt=4",
            "output=elsewhere",
        ],
    )
    assert config.learning.lr == 2e-6
    assert config.rollout.temperature == 0.7
    assert (config.steps, config.output) == (3, "elsewhere")
    assert [agent.lr for agent in config.agents] == [1e-5, None, None]
    assert config.rollouts_per_prompt(config.agents[2]) == 4
    assert config.rollouts_per_prompt(config.agents[0]) == 8


def test_a_method_by_name_replaces_the_section():
    config = load_config(DEMO, ["method=naive"])
    assert (config.method.name, config.method.clip_low) == ("naive", 0.0003)


def test_what_was_named_shortly_can_be_changed_further():
    config = load_config(DEMO, ["method=gspo", "method.clip_low=0.1", "task=gsm8k", "task.options.limit=7"])
    assert (config.method.name, config.method.clip_low) == ("gspo", 0.1)
    assert (config.task.name, config.task.options) == ("gsm8k", {"limit": 7})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lr", ["'lr'", "key=value"]),
        ("=3", ["key=value"]),
        ("temperature=1.0", ["rollout.temperature or evaluation.temperature"]),
        ("stps=3", ["stps", "unknown key", "'steps'"]),
        ("agents.nobody.lr=1", ["nobody", "small, large, llama"]),
        ("steps.more=1", ["steps.more", "plain value"]),
        ("learning.lr.x.y=1", ["learning.lr.x.y"]),
        ("steps=[", ["not valid YAML"]),
    ],
)
def test_bad_overrides_are_named(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, [override])
    for word in words:
        assert word in str(caught.value)
