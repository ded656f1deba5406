"""Settings of copies: what they mean, what memory they take, and what is refused before models load."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hacrl.config.load import build_config
from hacrl.config.schema import AgentSettings, ReplicaSettings
from hacrl.engines.hf.kind import ReplicaKind, TransformersKind, replica_devices
from hacrl.engines.registry import check_engines, kind_of
from hacrl.errors import ConfigError
from hacrl.models.footprint import Footprint, ParameterCounts
from hacrl.runs.preflight import check_agents


def config_of(**agent: Any):
    described = {"name": "ada", "model": "bundled:qwen-small-a", **agent}
    return build_config({"agents": [described], "output": "run", "device": "cpu"})


def settings_of(**replicas: Any) -> AgentSettings:
    return AgentSettings(name="ada", model="-", replicas=ReplicaSettings(**replicas))


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ({"count": -1}, r"agents\.0\.replicas: count must not be negative, not -1"),
        ({"count": 2, "devices": ["cpu"]}, r"devices must name one device for each of the 2 copies"),
        ({"devices": ["cpu"]}, r"devices must name one device for each of the 0 copies"),
        ({"count": 1, "timeout": 0}, r"timeout must be a positive number of seconds, not 0"),
        ({"count": 1, "device": "cpu"}, r"unknown key; did you mean 'devices'"),
    ],
)
def test_values_that_make_no_sense(replicas: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(replicas=replicas)


def test_only_agents_with_copies_have_weights_to_send() -> None:
    for count, kind in ((0, TransformersKind), (1, ReplicaKind), (2, ReplicaKind)):
        config = config_of(replicas={"count": count})
        found = kind_of(config, config.agents[0])
        assert type(found) is kind
        assert found.shares_weights == (count == 0)
        assert found.samples_beside_learning == (count > 0)


def test_devices_are_the_agents_unless_they_are_named() -> None:
    gpu = torch.device("cuda")
    assert replica_devices(settings_of(count=2), gpu) == [torch.device("cuda:0")] * 2
    named = settings_of(count=2, devices=("cuda", "cpu"))
    assert replica_devices(named, gpu) == [torch.device("cuda:0"), torch.device("cpu")]


def test_copies_on_the_agents_device_take_weights_cache_and_decoding() -> None:
    counts = ParameterCounts(base=1, adapters=0, trainable=1, largest=1)
    zero = dict.fromkeys(
        ["masters", "gradients", "moments", "reference", "activations", "logits", "backward", "update"], 0
    )
    footprint = Footprint(
        agent="ada", counts=counts, precision="bfloat16", weights=1000, cache=200, decoding=30, **zero
    )
    for replicas, expected in (
        ({"count": 1}, 1230),
        ({"count": 2}, 2460),
        ({"count": 2, "devices": ("cuda:1", "cuda")}, 1230),  # cuda is cuda:0
        ({"count": 1, "devices": ("cuda:1",)}, 0),
    ):
        taken = ReplicaKind().memory(footprint, settings_of(**replicas), torch.device("cuda:0"), 10**9)
        assert taken == expected


def test_devices_that_do_not_exist_are_named() -> None:
    config = config_of(replicas={"count": 2, "devices": ["cpu", "cuda:77"]})
    with pytest.raises(ConfigError, match=r"agents\.ada\.replicas\.devices\[1\]: there is no 'cuda:77'"):
        check_agents(config, ())
    assert check_agents(config_of(replicas={"count": 2, "devices": ["cpu", "cpu"]}), ()) == {"ada": "cpu"}


def test_processes_cannot_build_a_model_that_is_an_object() -> None:
    message = r"agents\.ada\.replicas\.count=2: .* the agent's model must be a name or a folder"
    with pytest.raises(ConfigError, match=message):
        check_agents(config_of(replicas={"count": 2}), ("ada",))
    check_agents(config_of(replicas={"count": 1}), ("ada",))


def test_vllms_own_data_parallel_engines_are_refused() -> None:
    config = config_of(engine="vllm", vllm={"engine_args": {"data_parallel_size": 2}})
    message = r"agents\.ada\.vllm\.engine_args\.data_parallel_size=2: .* set agents\.ada\.vllm\.engines=2"
    with pytest.raises(ConfigError, match=message):
        check_engines(config)
