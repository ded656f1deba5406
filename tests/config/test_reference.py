"""Every key has a description, and docs/configuration.md is what the settings records say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Literal

import pytest

from hacrl.config import agent, engine, evaluation, learning, method, method_base, rules, schema, task
from hacrl.config.load import build_config, config_to_yaml, parse_yaml
from hacrl.config.reference import configuration_page, describe_settings, field_descriptions
from hacrl.config.settings import Settings

MODULES = (agent, engine, evaluation, learning, method, method_base, rules, schema, task)
RECORDS = {
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Settings) and value is not Settings
}


@pytest.mark.parametrize("record", sorted(RECORDS, key=lambda record: record.__name__))
def test_every_field_says_what_it_means(record: type) -> None:
    assert is_dataclass(record)
    described = field_descriptions(record)
    assert [field.name for field in fields(record) if not described.get(field.name, "").endswith(".")] == []


def test_descriptions_are_the_texts_under_the_fields() -> None:
    assert field_descriptions(Small) == {"low": "The lower bound, in metres.", "kind": "Which of two lines."}
    assert field_descriptions(Larger) == {"low": "Another text.", "kind": "Which of two lines."}


class Small(Settings):
    low: float = 0.5
    """The lower bound,
    in metres."""
    bare: int = 3
    kind: Literal["a", "b"] = "a"
    """Which of two lines."""


class Larger(Small):
    low: float = 1.5
    """Another text."""


def test_every_key_of_a_resolved_config_is_described_with_its_default() -> None:
    described = {setting.key: setting for setting in describe_settings()}
    agents = [{"name": "a", "model": "m", "lora": {}, "vllm": {"seeded": True}}]
    config = parse_yaml(config_to_yaml(build_config({"agents": agents, "output": "x"})), "config")
    leaves = dict(keys_of(config))
    assert {
        "agents[].lora.rank",
        "agents[].vllm.mode",
        "method.delta_step",
        "learning.betas",
    } <= leaves.keys()
    assert leaves.keys() <= described.keys()
    given = {"agents[].name", "agents[].model", "agents[].vllm.seeded", "output"}
    for key in leaves.keys() - given:
        assert parse_yaml(described[key].default, key) == leaves[key], key


def keys_of(value: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, part in value.items():
        if isinstance(part, dict) and part:
            yield from keys_of(part, f"{prefix}{key}.")
        elif key == "agents":
            yield from keys_of(part[0], "agents[].")
        else:
            yield f"{prefix}{key}", part


def test_some_descriptions() -> None:
    described = {setting.key: setting for setting in describe_settings()}
    lr = described["learning.lr"]
    assert (lr.type, lr.default, lr.description) == ("number", "1e-06", "Learning rate of AdamW.")
    assert (described["output"].type, described["output"].default) == ("text", "")
    assert described["learning.betas"].type == "list of 2: number, number"
    assert described["learning.betas"].default == "[0.9, 0.999]"
    assert described["agents[].vllm.devices"].type == "list of whole number"
    assert described["method.name"].type == (
        "grpo or gspo or naive or hacpo or success_gated or xgrpo or ftis or sapo or s2l_po or aligned "
        "or module:attribute"
    )
    assert described["method.options"].type == "mapping"
    assert described["method.options"].description.endswith("Only methods of your own.")
    assert described["method.clip_low"].default == "0.0003"
    assert described["method.clip_low"].description.endswith("Default of grpo: 0.2.")
    assert described["method.ratio_length"].type == "source or own"
    assert described["method.ratio_length"].description.endswith(
        "Only aligned and ftis and hacpo and naive and s2l_po and success_gated."
    )
    assert described["method.alpha"].description.endswith("Only hacpo.")
    assert not described["method.reading"].description.endswith("hacpo.")


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_page(), (
        "run python scripts/write_configuration_reference.py"
    )
