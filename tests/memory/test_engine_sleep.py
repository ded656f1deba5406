"""The share of a GPU that a vLLM engine takes, and when it stays awake during learning; without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hacrl.config.load import load_config
from hacrl.config.schema import RunConfig, VllmSettings
from hacrl.executors import workers
from hacrl.memory import engine_sleep
from hacrl.memory import estimate as memory
from hacrl.memory.engine_sleep import decide_engine_memory
from hacrl.memory.estimate import AgentShapes, choose_micro_batch_tokens, footprints, offload_plans, workload
from hacrl.runs import dry_run as planning
from hacrl.runs.run import build_trainer
from tests.memory.test_estimate import OnGpu
from tests.runs.test_dry_run import shapes
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent, pair_agent, save_agents

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
    """Pretend GPUs of a size in GiB, of which other processes use some, and plenty of host memory."""

    def of(gib: float, others: float = 0.0) -> None:
        def available(device: str) -> int:
            return 2**43 if device == "cpu" else int(gib * GIB)

        for module in (memory, engine_sleep):
            monkeypatch.setattr(module, "device_bytes", available)
        monkeypatch.setattr(engine_sleep, "other_processes_bytes", lambda _: int(others * GIB))

    return of


def decided(
    config: RunConfig, devices: dict[str, str] = ON_ONE
) -> tuple[dict[str, VllmSettings], tuple[str, ...]]:
    found, notes = decide_engine_memory(config, AgentShapes(devices, shapes(), {}))
    return {agent.name: agent.vllm for agent in found.agents}, notes


def test_an_engine_takes_what_the_responses_of_a_step_need(gpu) -> None:
    gpu(139)
    vllm, _ = decided(run())
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
    assert {one.memory for one in decided(run())[0].values()} == {0.3}  # the most without a setting
    gpu(139)
    long = decided(run("rollout.max_new_tokens=4096"))[0]
    assert {one.memory for one in long.values()} == {0.3}
    few = decided(run(max_sequences=32))[0]["small"]
    # an eighth of the responses; logits and prompts of 4 at a time are small
    assert few.memory < 0.129 - 0.8 * 7 / 8 * 256 * 384 * cache / (139 * GIB)


@pytest.mark.parametrize("memory_share", [0.05, 0.6])
def test_user_settings_are_not_changed(gpu, memory_share: float) -> None:
    gpu(1000)
    vllm, notes = decided(run(memory=memory_share, sleep=True))
    assert {(one.memory, one.sleep) for one in vllm.values()} == {(memory_share, True)}
    assert notes == ()
    vllm, notes = decided(run(memory=memory_share, sleep=False))
    assert {(one.memory, one.sleep) for one in vllm.values()} == {(memory_share, False)}
    assert notes == ()


def test_engines_stay_awake_if_that_costs_learning_nothing(gpu) -> None:
    gpu(400)
    vllm, notes = decided(run())
    assert {one.sleep for one in vllm.values()} == {False}
    assert notes == (
        "there is room for the vLLM engines of small, large beside learning: they stay awake. With "
        "vllm.sleep=true they would give their memory back in between",
    )
    gpu(139)
    vllm, notes = decided(run())
    assert {one.sleep for one in vllm.values()} == {None}
    assert notes == ()


def test_the_smallest_gpu_on_which_engines_stay_awake(gpu) -> None:
    """Just above this size no more is offloaded than with sleeping engines; just below, more would be."""
    sized = AgentShapes(ON_ONE, shapes(), {})
    overrides = "learning.offload=optimizer", "learning.micro_batch_tokens=8192"
    gpu(1000)
    config, _ = decide_engine_memory(run(*overrides, memory=0.1), sized)
    assert {agent.vllm.sleep for agent in config.agents} == {False}
    known = footprints(config, sized)
    engines = sum(one.engine for one in known.values())
    assert engines == 2 * int(0.1 * 1000 * GIB)
    rest = offload_plans(config, sized, known)["cuda:0"].needed - engines
    # rest + 2 x 0.1 x size = 0.85 x size
    least = rest / (0.85 - 0.2) / GIB
    gpu(least + 0.1)
    assert {one.sleep for one in decided(run(*overrides, memory=0.1))[0].values()} == {False}
    gpu(least - 0.1)
    assert {one.sleep for one in decided(run(*overrides, memory=0.1))[0].values()} == {None}
    gpu(least + 10, others=0.85 * 10 - 2 - 0.1)  # of 10 more, engines take 2
    assert {one.sleep for one in decided(run(*overrides, memory=0.1))[0].values()} == {False}
    gpu(least + 10, others=0.85 * 10 - 2 + 0.1)
    assert {one.sleep for one in decided(run(*overrides, memory=0.1))[0].values()} == {None}


def test_an_engine_of_an_agent_on_another_gpu_is_counted(gpu) -> None:
    """ "large" learns on one GPU and generates on the other, where "small" learns and might stay awake."""
    apart = {"small": "cuda:1", "large": "cuda:0"}
    config = run("agent_defaults.gradient_checkpointing=false", "learning.micro_batch_tokens=8192")
    small, large = config.agents
    visiting = replace(config, agents=(small, replace(large, vllm=VllmSettings(devices=(1,)))))
    gpu(1000)
    assert decided(visiting, apart)[0]["small"].sleep is False
    sized = AgentShapes(apart, shapes(), {})
    # needed / size = 0.85, and 0.55 with the visitor's 0.3
    found, _ = decide_engine_memory(config, sized)
    alone = offload_plans(found, sized, footprints(found, sized))["cuda:1"].needed / GIB
    gpu(1.3 * alone / 0.85)
    assert decided(config, apart)[0]["small"].sleep is False
    assert decided(visiting, apart)[0]["small"].sleep is None


def test_an_engine_over_two_gpus_is_counted_on_both(gpu) -> None:
    """ "large" learns on the second GPU, which it nearly fills, and has no vLLM engine."""
    apart = {"small": "cuda:0", "large": "cuda:1"}
    config = run("learning.micro_batch_tokens=8192", "learning.offload=never")
    small, large = config.agents
    config = replace(config, agents=(small, replace(large, engine="transformers")))

    def with_share(share: float) -> bool | None:
        spread = replace(small, vllm=VllmSettings(devices=(0, 1), memory=share))
        return decided(replace(config, agents=(spread, config.agents[1])), apart)[0]["small"].sleep

    sized = AgentShapes(apart, shapes(), {})
    gpu(1000)
    needed = offload_plans(config, sized, footprints(config, sized))
    assert needed["cuda:0"].needed < 0.7 * needed["cuda:1"].needed
    gpu(needed["cuda:1"].needed / GIB / 0.8)
    assert with_share(0.04) is False
    assert with_share(0.06) is None


def test_awake_engines_must_not_shrink_micro_batches(gpu) -> None:
    """Awake engines would fit if micro-batches were small."""
    gpu(200)
    large_ones = "agent_defaults.gradient_checkpointing=false", "learning.offload=never"
    fixed = decided(run(*large_ones, "learning.micro_batch_tokens=4096", memory=0.1))[0]
    assert {one.sleep for one in fixed.values()} == {False}
    assert {one.sleep for one in decided(run(*large_ones, memory=0.1))[0].values()} == {None}


def test_awake_engines_change_neither_micro_batches_nor_offloading(gpu) -> None:
    """For every size of GPU."""
    sized = AgentShapes(ON_ONE, shapes(), {})
    found = set()
    for size in range(60, 420, 20):
        gpu(size)
        asleep = run(sleep=True)
        config, _ = decide_engine_memory(run(), sized)
        found.add(config.agents[0].vllm.sleep)
        tokens = choose_micro_batch_tokens(asleep, sized)
        assert choose_micro_batch_tokens(config, sized) == tokens
        levels = [
            offload_plans(one, sized, footprints(one, sized, tokens))["cuda:0"].level
            for one in (config, asleep)
        ]
        assert levels[0] == levels[1]
    assert found == {None, False}


def test_engines_on_other_devices_and_of_other_kinds(gpu) -> None:
    gpu(400)
    elsewhere, notes = decided(run(devices=(1,)))
    assert {(one.memory, one.sleep) for one in elsewhere.values()} == {
        (0.3, None)
    }  # such engines do not sleep
    assert notes == ()
    served, notes = decided(run(url="http://gpu7:8000"))
    assert {one.sleep for one in served.values()} == {None}
    assert notes == ()
    apart, notes = decided(run(), {"small": "cuda:0", "large": "cuda:1"})
    assert {one.sleep for one in apart.values()} == {False}
    plain = load_config(Path("paper_size"))
    assert decide_engine_memory(plain, AgentShapes(ON_ONE, shapes(), {})) == (plain, ())


def test_an_unknown_model_keeps_the_defaults(gpu) -> None:
    gpu(400)
    found, notes = decide_engine_memory(run(), AgentShapes(ON_ONE, {"small": shapes()["small"]}, {}))
    vllm = {agent.name: agent.vllm for agent in found.agents}
    assert vllm["large"].memory == 0.3
    assert vllm["small"].memory < 0.1
    assert {one.sleep for one in vllm.values()} == {None}
    assert notes == ()


def test_a_cache_of_a_fixed_size_is_counted(gpu) -> None:
    gpu(79)
    large = run(engine_args={"kv_cache_memory_bytes": 70 * GIB})
    assert {one.memory for one in decided(large)[0].values()} == {0.3}  # no share above 1
    gpu(400)
    config = run(engine_args={"kv_cache_memory_bytes": 10 * GIB}, sleep=False)
    sized = AgentShapes(ON_ONE, shapes(), {})
    small = footprints(config, sized)["small"]
    weights = 2 * 1_720_574_976
    assert small.engine == 10 * GIB + weights + 3 * GIB + weights // 8
    told = run(engine_args={"gpu_memory_utilization": 0.2}, sleep=False)
    assert footprints(told, sized)["small"].engine == int(0.2 * 400 * GIB)
    told = run(engine_args={"kv_cache_memory_bytes": 7 * GIB}, sleep=False)
    assert footprints(told, sized)["small"].engine == 7 * GIB + weights + 3 * GIB + weights // 8
    on_cpu = AgentShapes({"small": "cpu", "large": "cpu"}, shapes(), {})
    small = footprints(run(), on_cpu)["small"]
    assert small.engine == GIB + small.weights


def test_a_request_of_the_greatest_length_fits(gpu) -> None:
    """One response needs more than 32 of usual length."""
    gpu(139)
    few = decided(run("rollout.prompts_per_step=4"))[0]["small"]
    long = decided(run("rollout.prompts_per_step=4", engine_args={"max_model_len": 32768}))[0]["small"]
    token = 28 * 2 * 8 * 128 * 2
    assert long.memory - few.memory == pytest.approx((32768 - 32 * 384) * token / (139 * GIB), abs=0.002)


def test_concurrent_responses_are_counted_singly(gpu) -> None:
    """Two prompts with 150 responses each: 272 are decoded at a time."""
    gpu(139)
    many = decided(run("rollout.prompts_per_step=2", "rollout.rollouts_per_prompt=150"))[0]["small"]
    assert many.memory > 272 * 384 * 28 * 2 * 8 * 128 * 2 / (139 * GIB)


@pytest.mark.parametrize(("vllm", "most"), [({}, 272), ({"max_sequences": 32}, 48)])
def test_concurrent_responses_of_an_engine_are_counted(vllm, most: int) -> None:
    """Of 512; room for a proof is room for responses once it is over, and so is what fills a CUDA graph."""
    config = run("rollout.prompts_per_step=64", **vllm)
    assert workload(config, config.agents[0], 128, 4096).decodings[0].responses == most


# --- users of the decision ---


def test_a_run_uses_the_decision(gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hacrl.memory.decision.device_bytes", lambda _: 400 * GIB)
    gpu(400)
    agents = [char_agent(), pair_agent()]
    for agent in agents:
        agent.__class__ = OnGpu
    names = "[" + ", ".join(f"{{name: {agent.name}, model: x}}" for agent in agents) + "]"
    config = load_config(
        Path("demo"),
        [f"agents={names}", "rollout.engine=vllm", "rollout.max_new_tokens=4", f"output={tmp_path}"],
    )
    made = []

    def make_engine(_config, settings, agent, _checked, _placement):
        made.append((agent.name, settings.vllm.memory, settings.vllm.sleep))
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "make_engine", make_engine)
    monkeypatch.setattr(workers, "load_agents", lambda *_: agents)
    task = SevensTask()
    checked = SimpleNamespace(task=task, train=task.train, test=task.test)
    with pytest.raises(KeyboardInterrupt):
        build_trainer(config, checked)
    (name, share, sleep) = made[0]
    assert (name, sleep) == ("char", False)
    assert 0 < share < 0.3


def test_a_dry_run_notes_the_decision_and_prints_the_settings(
    gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    models = save_agents(tmp_path / "models")
    names = "[" + ", ".join(f"{{name: {name}, model: {path}}}" for name, path in models.items()) + "]"
    config = load_config(
        Path("demo"), [f"agents={names}", "rollout.engine=vllm", f"output={tmp_path}/run", "device=cpu"]
    )
    monkeypatch.setattr(planning, "check_engines", lambda _: None)
    monkeypatch.setattr(planning, "check_agents", lambda *_: dict.fromkeys(models, "cuda:0"))
    gpu(400)
    plan = planning.dry_run(config)
    assert any("they stay awake" in note for note in plan.notes)
    assert {agent.vllm.memory for agent in plan.config.agents} == {None}
    (device,) = plan.devices
    assert device.needed > 2 * 3 * GIB  # two engines that are awake
