"""Whatever stands in a recipe or an override: a config comes of it, or one message that a user can read."""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hacrl.config.load import apply_override, build_config, config_to_yaml, load_config, parse_yaml
from hacrl.config.reference import describe_settings
from hacrl.config.schema import RunConfig
from hacrl.errors import HacrlError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
TEXTS = [recipe.read_text("utf-8") for recipe in RECIPES]
DATA = [yaml.safe_load(text) for text in TEXTS]
# what belongs to the libraries and not in front of a user
INTERNALS = re.compile(
    r"Traceback|pydantic|https?://\w|validation error|<class|object at 0x|yaml\.org|unicode string"
)

fuzzed = settings(
    derandomize=True, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck), database=None
)


def check_message(message: str, named: str) -> None:
    lines = message.split("\n")
    assert len(lines) <= 13, message
    assert max(map(len, lines)) <= 600, message
    assert len(message) > 10
    assert all(line.isprintable() for line in lines), message
    assert not INTERNALS.search(message), message
    assert named in message


def outcome(make: Callable[[], RunConfig], named: str = "") -> RunConfig | None:
    """The config, or None after a refusal in a few words that name what is refused."""
    try:
        config = make()
    except HacrlError as error:
        check_message(str(error), named)
        return None
    assert isinstance(config, RunConfig)
    return config


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**18, 2**63, -(10**400), 1e308, -0.0, 5e-324]),
    st.floats(),
    st.text(alphabet=st.characters(exclude_categories=()), max_size=12),  # lone surrogates too
    st.sampled_from(
        ["", "\0", "a\nb", "\ud800", "x" * 100_000, "../..", "1e3", "~", "=", "<<", "{", "%", "\u2028"]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container of a recipe with every key or position of it."""
    if isinstance(data, dict | list):
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        return [(data, key) for key in keys] + [place for key in keys for place in places(data[key])]
    return []


@st.composite
def damaged(draw) -> dict[str, Any]:
    """A recipe with one to three keys dropped, renamed, doubled or of another value."""
    data = copy.deepcopy(draw(st.sampled_from(DATA)))
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(data) or [(data, "agents")]))
        kind = draw(st.sampled_from(["drop", "rename", "replace", "nest", "swap"]))
        if kind == "drop":
            container.pop(key)
        elif kind == "rename" and isinstance(container, dict):
            container[draw(st.text(max_size=8)) + str(key)] = container.pop(key)
        elif kind == "nest":
            container[key] = {str(key): container[key]} if draw(st.booleans()) else [container[key]]
        elif kind == "swap":
            other, place = draw(st.sampled_from(places(data)))
            container[key] = copy.deepcopy(other[place])
        else:
            container[key] = draw(values)
    return data


@fuzzed
@given(damaged())
def test_damaged_recipes(data):
    before = repr(data)[:1000]
    config = outcome(lambda: build_config(data, "my recipe"))
    assert repr(data)[:1000] == before
    if config is not None:  # what a run writes down is what it was given
        text = config_to_yaml(config)
        assert build_config(parse_yaml(text, "config.yaml")) == config


@fuzzed
@given(
    st.dictionaries(
        st.sampled_from([*RunConfig.__dataclass_fields__, "agent_defaults", "x"]), values, max_size=5
    )
)
def test_any_mapping(data):
    outcome(lambda: build_config({"output": "x", **data}, "my recipe"))


# every sign and tag that YAML gives a meaning to
FRAGMENTS = r"""
agents: [ ] { } - , : ? ! !x & * &a *a <<: <<: &b {a: | > % @ ` # --- ... %YAML 1.1 = ~ null true '' 'a ' "
!!int !!float !!bool !!binary !!set !!omap !!pairs !!timestamp !!python/object:os.x !!null !!str !!seq !!map
"\ud800" "\x00" 2001-99-99 2001-01-01 0x 0o7 1_0 1:30 .inf .nan -.inf 1e999 name model steps lr: method: hacpo
"""
fragments = st.sampled_from(FRAGMENTS.split())
gaps = st.sampled_from(
    ["", " ", "\n", "\n  ", "\n    ", "\t", ": ", ", ", "\r\n", "\x85", "\u2028", "\ufeff"]
)
yaml_texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.tuples(fragments, gaps), max_size=14).map(lambda parts: "".join(a + b for a, b in parts)),
)


@st.composite
def damaged_texts(draw) -> str:
    """A recipe's text with a piece cut out, doubled, or replaced by something that YAML has a meaning for."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 40)))
        text = text[:start] + draw(yaml_texts | st.just(text[start:end] * 2)) + text[end:]
    return text


@fuzzed
@given(yaml_texts | damaged_texts())
def test_any_text(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(lambda: load_config(path), named="recipe.yaml")


@fuzzed
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_bytes(content)
    assert outcome(lambda: load_config(path), named="recipe.yaml") is None


keys = st.lists(
    st.sampled_from(
        ["agents", "0", "7", "9" * 5000, "small", "learning", "lr", "task", "options", "method", "steps", ""]
    )
    | st.text(alphabet=st.characters(exclude_categories=()), max_size=6),
    min_size=1,
    max_size=5,
).map(".".join)


@fuzzed
@given(
    st.lists(
        st.builds(lambda key, text: f"{key}={text}", keys, yaml_texts) | st.text(max_size=20), max_size=3
    )
)
def test_any_overrides(overrides):
    outcome(lambda: load_config(Path("demo"), overrides))


@fuzzed
@given(values, keys, yaml_texts)
def test_an_override_of_any_mapping(value, key, text):
    def make() -> RunConfig:
        data = {"agents": value, "learning": value, "task": value, "output": "x"}
        apply_override(data, f"{key}={text}")
        return build_config(data)

    outcome(make)


ODD = [0, -1, 2**31, 2**63, 10**30, 1e308, 1e-320, 0.5, "", "\0", "x" * 5000, "\n", "..", "~nobody/x", "%s"]
ODD += ["\u202e", [], {}, ["x"], [0], {"a": 1}, None, True, False]


def test_every_key_takes_or_refuses_odd_values_at_once():
    """Every key there is, defaults included; a value may not set a check of ours to endless work either."""
    config = load_config(Path("demo"), ["agents.small.lora={rank: 2}", "agents.small.vllm.seeded=true"])
    whole = parse_yaml(config_to_yaml(config), "demo")
    whole["agents"][2] = {"name": "far", "endpoint": {"url": "http://gpu7:8000/v1", "model": "m"}}
    assert outcome(lambda: build_config(whole, "my recipe")) is not None
    for setting in describe_settings():  # those that are not set are not in it
        place = setting.key.replace("agents[].endpoint", "agents.2.endpoint").replace("agents[]", "agents.0")
        *sections, key = place.split(".")
        section = whole
        for part in sections:
            section = section[int(part) if part.isdecimal() else part]
        section.setdefault(key, None)
    count = len(places(whole))
    assert count > 100
    signal.alarm(300)  # ends the process, should one of them hang
    for position in range(count):
        for value in ODD:
            data = copy.deepcopy(whole)
            container, key = places(data)[position]
            container[key] = value
            outcome(lambda data=data: build_config(data, "my recipe"), named="my recipe")
    signal.alarm(0)


def test_updates_without_an_end_are_refused():
    with pytest.raises(
        HacrlError, match=r"learning: 6,000,000 updates in one step, from .*=2000000, epochs=1"
    ):
        load_config(Path("demo"), ["updates_per_source=2000000"])
    with pytest.raises(HacrlError, match="learning: 100,001 updates in one step"):
        load_config(Path("demo"), ["updates_per_step=100001", "method=gspo"])
    assert load_config(Path("demo"), ["updates_per_step=100000", "method=gspo"]).learning.epochs == 1
