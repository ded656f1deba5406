"""What agents ask of a cluster, worked out by hand; and what is refused before anything is placed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hacrl.config.load import build_config
from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.executors.ray.cluster import cores_asked
from hacrl.executors.ray.kind import RayKind
from hacrl.executors.ray.placement import described, free_resources, parties_of

HOSTS = {"gpu7": "10.0.0.7", "10.0.0.7": "10.0.0.7"}


def config(*agents: dict[str, Any], **changes: Any) -> RunConfig:
    named = [
        {"name": f"a{number}", "model": "bundled:qwen-small-a", **agent}
        for number, agent in enumerate(agents)
    ]
    return build_config({"output": "runs/x", "executor": "ray", "agents": named, **changes})


def bundles(of: RunConfig, device: str = "cuda") -> dict[str, list[dict[str, float]]]:
    devices = {agent.name: device for agent in of.agents}
    return {party.name: party.bundles for party in parties_of(of, devices, HOSTS)}


def test_an_agent_asks_for_one_gpu_per_rank() -> None:
    found = bundles(config({"ranks": 2}, {"place": {"cpus": 4}}))
    assert found == {
        "agent a0": [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}],
        "agent a1": [{"CPU": 4.0, "GPU": 1.0}],
    }


def test_a_cluster_of_hacrls_own_has_a_core_for_every_process() -> None:
    """2 ranks and 3 copies with 1.5 cores each, and one process with half a core: 5 x 1.5 + 0.5 = 8."""
    asked = config({"ranks": 2, "replicas": {"count": 3}, "place": {"cpus": 1.5}}, {"place": {"cpus": 0.5}})
    assert sum(bundle["CPU"] for party in bundles(asked, "cpu").values() for bundle in party) == 8
    assert cores_asked(asked) == 8


def test_on_a_cpu_an_agent_asks_for_no_gpu() -> None:
    assert bundles(config({}), "cpu") == {"agent a0": [{"CPU": 1.0}]}


def test_types_hosts_and_resources_are_asked_for() -> None:
    place = {"gpus": 0.5, "accelerator": "H100", "host": "gpu7", "resources": {"fast_disk": 2}}
    assert bundles(config({"place": place})) == {
        "agent a0": [
            {"CPU": 1.0, "GPU": 0.5, "fast_disk": 2.0, "accelerator_type:H100": 0.001, "node:10.0.0.7": 0.001}
        ]
    }


def test_engines_apart_are_asked_for_beside_the_learner() -> None:
    found = bundles(config({"ranks": 2, "place": {"engine_gpus": 2}}, {"replicas": {"count": 2}}))
    assert found == {
        "agent a0": [{"CPU": 1.0, "GPU": 3.0}, {"CPU": 1.0, "GPU": 1.0}],  # only rank 0 has engines
        "agent a1": [{"CPU": 1.0, "GPU": 1.0}] * 3,  # the learner and two replicas
    }
    with pytest.raises(ConfigError, match=r"engine_gpus=1 needs gpus=1, not 0\.5"):
        config({"place": {"engine_gpus": 1, "gpus": 0.5}})
    with pytest.raises(ConfigError, match=r"agents\.a0\.replicas\.devices: with executor: ray the cluster"):
        bundles(config({"replicas": {"count": 1, "devices": ["cuda:1"]}}))


def test_a_dry_run_says_that_memory_elsewhere_is_not_checked(tmp_path: Path) -> None:
    from hacrl.runs.dry_run import dry_run

    asked = config({}, device="cuda")
    planned = dry_run(replace(asked, output=str(tmp_path / "run")))
    assert planned.devices == ()
    assert planned.not_checked == (
        "memory of agents on GPUs: executor 'ray' places them on other machines; a dry run there with "
        "executor: local estimates it",
    )


def test_agents_that_share_a_process_ask_once() -> None:
    shared = {"place": {"share": "pair"}}
    found = bundles(config(shared, {}, shared))
    assert found == {"pair": [{"CPU": 1.0, "GPU": 1.0}], "agent a1": [{"CPU": 1.0, "GPU": 1.0}]}


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        (
            [{"place": {"host": "gpu9"}}],
            r"agents.a0.place.host: the cluster has no machine 'gpu9'; it has 10.0.0.7",
        ),
        ([{"place": {"gpus": 0}}], "agents.a0.place.gpus=0, but the agent is trained on a GPU"),
        (
            [{"place": {"share": "p"}}, {"place": {"share": "p"}, "ranks": 2}],
            r"agents.a1.place.share='p': an agent with ranks=2 needs processes of its own",
        ),
        (
            [{"place": {"share": "p"}}, {"place": {"share": "p", "cpus": 2}}],
            "agents.a1.place differs from agents.a0.place",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(agents: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bundles(config(*agents))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("gpus", 2, "a process computes on one GPU"),
        ("gpus", -1, "gpus must not be negative"),
        ("resources", {"disk": 0}, "resources.disk must be positive"),
        ("gpu", 1, "did you mean 'gpus'"),
    ],
)
def test_wrong_values_name_their_key(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config({"place": {key: value}})


def test_the_cluster_chooses_the_gpu() -> None:
    with pytest.raises(
        ConfigError, match=r"agents.a0.device='cuda:1': with executor: ray the cluster chooses"
    ):
        RayKind().devices(config({"device": "cuda:1"}))
    asked = config({"device": "cuda"}, {"place": {"gpus": 0.5}}, {"place": {"gpus": 0}}, {"device": "cpu"})
    assert RayKind().devices(asked) == {"a0": "cuda", "a1": "cuda", "a2": "cpu", "a3": "cpu"}


def test_models_must_have_names() -> None:
    with pytest.raises(ConfigError, match=r"agents.a0.model must be a name or a folder, not an object"):
        RayKind()(config({}), None, {"a0": None})  # type: ignore[arg-type, dict-item]


def test_bundles_and_resources_in_words() -> None:
    assert described([{"GPU": 1.0, "CPU": 2.0}, {"GPU": 1.0, "CPU": 2.0}, {"CPU": 1.0}]) == (
        "2 x (1 GPU, 2 CPU) and 1 x (1 CPU)"
    )
    assert free_resources({"CPU": 3.0, "GPU": 0.5, "node:10.0.0.7": 1.0, "memory": 5.0}) == "3 CPU, 0.5 GPU"
    assert free_resources({"memory": 5.0}) == "nothing"


def test_ray_keys_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    from hacrl.runs.resume import changes, changes_rounding_only

    one = config({})
    other = replace(one, ray=replace(one.ray, patience=5.0))
    assert list(changes(one, other)) == ["ray.patience"]
    assert not changes_rounding_only("ray.patience")
