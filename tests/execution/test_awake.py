"""What share of a GPU a vLLM engine takes, and when it may stay awake beside learning. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.agents.engine_settings import VllmSettings
from hacrl.config.loading import load_config
from hacrl.config.schema import RunConfig
from hacrl.execution import awake, memory
from hacrl.execution.awake import settle_engines
from hacrl.execution.memory import Sized, choose_micro_batch_tokens, footprints, offload_plans
from tests.execution.test_dry_run import shapes

GIB = 2**30
ON_ONE = {"small": "cuda", "large": "cuda:0"}
SHORT = [
    "rollout.engine=vllm",
    "rollout.prompts_per_step=32",
    "rollout.max_prompt_tokens=128",
    "rollout.max_new_tokens=256",
    "evaluation.problems=0",
]


def run(*overrides: str, **vllm) -> RunConfig:
    """Qwen3-1.7B and 4B on vLLM, 32 x 8 responses of 256 tokens to prompts of 128."""
    config = load_config(Path("paper_size"), [*SHORT, *overrides])
    agents = tuple(replace(agent, vllm=VllmSettings(**vllm)) for agent in config.agents)
    return replace(config, agents=agents)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A GPU of so many GiB, in a machine with plenty of memory."""

    def of(gib: float) -> None:
        def available(device: str) -> int:
            return 2**43 if device == "cpu" else int(gib * GIB)

        for module in (memory, awake):
            monkeypatch.setattr(module, "available_bytes", available)

    return of


def settled(
    config: RunConfig, devices: dict[str, str] = ON_ONE
) -> tuple[dict[str, VllmSettings], tuple[str, ...]]:
    found, notes = settle_engines(config, Sized(devices, shapes(), {}))
    return {agent.name: agent.vllm for agent in found.agents}, notes


def test_an_engine_takes_what_the_responses_of_a_step_need(gpu) -> None:
    gpu(139)
    vllm, _ = settled(run())
    # 1.7B: weights in 2 bytes, 3 GiB and an eighth of them; 28 layers with 2 x 8 x 128 numbers a token for
    # 256 responses of 384 tokens; a pass over 32 x 128 tokens of prompts: 2 bytes of 3 x 6144 + 2 x 2048 +
    # 2 x 1024 numbers, 10 of 2048, and the cache's, which is more than 256 rows of logits take
    weights = 2 * 1_720_574_976
    cache = 28 * 2 * 8 * 128 * 2
    prompts = 32 * 128 * (2 * (3 * 6144 + 2 * 2048 + 2 * 1024) + 10 * 2048 + cache)
    assert prompts > 256 * 151936 * 18
    needed = weights + 3 * GIB + weights // 8 + 256 * 384 * cache + prompts
    assert vllm["small"].memory == pytest.approx(needed / (139 * GIB), abs=0.001)
    assert vllm["small"].memory >= needed / (139 * GIB)
    assert vllm["small"].memory == 0.129
    gpu(45)
    assert {one.memory for one in settled(run())[0].values()} == {0.3}  # no more, unless it is told to
    gpu(139)
    long = settled(run("rollout.max_new_tokens=4096"))[0]
    assert {one.memory for one in long.values()} == {0.3}
    few = settled(run(max_sequences=32))[0]["small"]
    # an eighth of the responses; logits and prompts of 4 at a time are small
    assert few.memory < 0.129 - 0.8 * 7 / 8 * 256 * 384 * cache / (139 * GIB)


@pytest.mark.parametrize("memory_share", [0.05, 0.6])
def test_what_was_said_is_left_alone(gpu, memory_share: float) -> None:
    gpu(1000)
    vllm, notes = settled(run(memory=memory_share, sleep=True))
    assert {(one.memory, one.sleep) for one in vllm.values()} == {(memory_share, True)}
    assert notes == ()
    vllm, notes = settled(run(memory=memory_share, sleep=False))
    assert {(one.memory, one.sleep) for one in vllm.values()} == {(memory_share, False)}
    assert notes == ()


def test_engines_stay_awake_if_learning_loses_nothing(gpu) -> None:
    gpu(400)
    vllm, notes = settled(run())
    assert {one.sleep for one in vllm.values()} == {False}
    assert notes == (
        "there is room for the vLLM engines of small, large beside learning: they stay awake and answer side "
        "by side. With vllm.sleep=true they would give their memory back",
    )
    gpu(139)
    vllm, notes = settled(run())
    assert {one.sleep for one in vllm.values()} == {None}
    assert notes == ()


def test_the_least_gpu_on_which_they_stay_awake(gpu) -> None:
    """Just above it nothing more leaves than if they slept; just below, more would, or there is no room."""
    sized = Sized(ON_ONE, shapes(), {})
    overrides = "learning.offload=optimizer", "learning.micro_batch_tokens=8192"
    gpu(1000)
    config, _ = settle_engines(run(*overrides, memory=0.1), sized)
    assert {agent.vllm.sleep for agent in config.agents} == {False}
    known = footprints(config, sized)
    engines = sum(one.engine for one in known.values())
    assert engines == 2 * int(0.1 * 1000 * GIB)
    rest = offload_plans(config, sized, known)["cuda:0"].needed - engines
    # rest + 2 x 0.1 x size = 0.85 x size
    least = rest / (0.85 - 0.2) / GIB
    gpu(least + 0.1)
    assert {one.sleep for one in settled(run(*overrides, memory=0.1))[0].values()} == {False}
    gpu(least - 0.1)
    assert {one.sleep for one in settled(run(*overrides, memory=0.1))[0].values()} == {None}


def test_neither_fewer_tokens_nor_more_offloading_is_paid_for_it(gpu) -> None:
    """Whatever the size of the GPU."""
    sized = Sized(ON_ONE, shapes(), {})
    found = set()
    for size in range(60, 420, 20):
        gpu(size)
        asleep = run(sleep=True)
        config, _ = settle_engines(run(), sized)
        found.add(config.agents[0].vllm.sleep)
        tokens = choose_micro_batch_tokens(asleep, sized)
        assert choose_micro_batch_tokens(config, sized) == tokens
        levels = [
            offload_plans(one, sized, footprints(one, sized, tokens))["cuda:0"].level
            for one in (config, asleep)
        ]
        assert levels[0] == levels[1]
    assert found == {None, False}


def test_engines_elsewhere_and_other_engines(gpu) -> None:
    gpu(400)
    elsewhere, notes = settled(run(devices=(1,)))
    assert {(one.memory, one.sleep) for one in elsewhere.values()} == {(0.3, None)}  # they do not sleep
    assert notes == ()
    served, notes = settled(run(url="http://gpu7:8000"))
    assert {one.sleep for one in served.values()} == {None}
    assert notes == ()
    apart, notes = settled(run(), {"small": "cuda:0", "large": "cuda:1"})
    assert {one.sleep for one in apart.values()} == {False}
    plain = load_config(Path("paper_size"))
    assert settle_engines(plain, Sized(ON_ONE, shapes(), {})) == (plain, ())


def test_of_a_model_that_is_not_known_nothing_is_assumed(gpu) -> None:
    gpu(400)
    found, notes = settle_engines(run(), Sized(ON_ONE, {"small": shapes()["small"]}, {}))
    vllm = {agent.name: agent.vllm for agent in found.agents}
    assert vllm["large"].memory == 0.3
    assert vllm["small"].memory < 0.1
    assert {one.sleep for one in vllm.values()} == {None}
    assert notes == ()


def test_a_cache_of_a_fixed_size_is_counted_as_that(gpu) -> None:
    gpu(400)
    config = run(kv_cache_gib=10.0, sleep=False)
    sized = Sized(ON_ONE, shapes(), {})
    small = footprints(config, sized)["small"]
    weights = 2 * 1_720_574_976
    assert small.engine == 10 * GIB + weights + 3 * GIB + weights // 8
    told = run(engine_args={"gpu_memory_utilization": 0.2}, sleep=False)
    assert footprints(told, sized)["small"].engine == int(0.2 * 400 * GIB)
