"""Arguments, command lines and files that vLLM is started with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from hacrl.config.schema import AgentSettings, LoraSettings, RolloutSettings, RunConfig, VllmSettings
from hacrl.engines.registry import make_engine
from hacrl.engines.vllm.launch import (
    WORKER_FOLDER,
    decoding_slots,
    engine_arguments,
    engine_environment,
    make_vllm_engine,
    server_command,
    sleeps,
    write_model,
)
from hacrl.engines.vllm.serve import plan_server
from hacrl.errors import ConfigError
from hacrl.models.lora import add_adapters
from hacrl.runs.preflight import preflight
from hacrl.tasks.base import CheckedTask
from tests.support.engines import PROBLEMS, engine_agent, probe_prompts
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def options_of(command: list[str]) -> dict[str, str | bool]:
    """What argparse would make of the flags."""
    options: dict[str, str | bool] = {}
    for i, part in enumerate(command):
        if part.startswith("--"):
            alone = i + 1 == len(command) or command[i + 1].startswith("--")
            options[part[2:]] = True if alone else command[i + 1]
    return options


def test_the_command_line_of_a_server() -> None:
    arguments = {"model": "/m", "enforce_eager": True, "enable_prefix_caching": False, "seed": 0}
    arguments |= {"hf_overrides": {"a": [1, None]}, "max_model_len": 64}
    command = server_command("/x/python", arguments, "0.0.0.0", 8123)
    assert command[:3] == ["/x/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert options_of(command) == {
        "disable-uvicorn-access-log": True,
        "model": "/m",
        "enforce-eager": True,
        "no-enable-prefix-caching": True,
        "seed": "0",
        "hf-overrides": '{"a": [1, null]}',
        "max-model-len": "64",
        "worker-extension-cls": "hacrl_vllm_worker.WeightReceiver",
        "host": "0.0.0.0",
        "port": "8123",
        "generation-config": "vllm",
    }


def test_arguments_on_a_cpu_and_on_a_gpu() -> None:
    settings = VllmSettings(max_sequences=7, engine_args={"block_size": 32, "seed": 5})
    cpu = engine_arguments("/m", "float32", settings, 99, on_cpu=True, can_sleep=False)
    assert cpu == {
        "model": "/m",
        "dtype": "float32",
        "max_num_seqs": 16,  # 7, and 4 that prove its weights
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": False,
        "seed": 5,  # a user's own word goes last
        "max_model_len": 99,
        "kv_cache_memory_bytes": 2**30,
        "enforce_eager": True,
        "block_size": 32,
    }
    args = {"max_model_len": 50, "kv_cache_memory_bytes": 2**29}
    settings = VllmSettings(devices=(2, 3), memory=0.4, engine_args=args)
    gpu = engine_arguments("/m", "bfloat16", settings, 99, on_cpu=False, can_sleep=True)
    assert gpu["gpu_memory_utilization"] == 0.4
    plain = engine_arguments("/m", "bfloat16", VllmSettings(), 99, on_cpu=False, can_sleep=True)
    assert plain["gpu_memory_utilization"] == 0.3  # as long as nobody has decided, e.g. in hacrl serve
    assert gpu["tensor_parallel_size"] == 2
    assert gpu["max_model_len"] == 50
    assert gpu["kv_cache_memory_bytes"] == 2**29
    assert gpu["enable_sleep_mode"] is True
    assert "enforce_eager" not in gpu


@pytest.mark.parametrize(
    ("asked", "given"), [(1, 16), (7, 16), (12, 16), (13, 32), (252, 256), (253, 272), (256, 272)]
)
def test_a_proof_fits_beside_the_responses_into_a_graph_that_vllm_records(asked: int, given: int) -> None:
    """4 more than are asked for, rounded up to a multiple of 16."""
    settings = VllmSettings(max_sequences=asked)
    assert decoding_slots(settings) == given
    arguments = engine_arguments("/m", "bfloat16", settings, 99, on_cpu=False, can_sleep=True)
    assert arguments["max_num_seqs"] == given


@pytest.mark.parametrize("engine_args", [{}, {"kv_cache_memory_bytes": 2**30}])
@pytest.mark.parametrize("mode", ["child", "server"])
def test_one_that_knows_the_size_of_its_cache_need_not_start_alone(tmp_path, mode, engine_args) -> None:
    """Others measure how much memory is free. On a CPU it is always known."""
    told = VllmSettings(mode=mode, engine_args=engine_args, devices=(1,))
    measures = not engine_args
    assert (
        make_vllm_engine(engine_agent(), told, probe_prompts(engine_agent()), 99, tmp_path).starts_alone
        is measures
    )
    on_cpu = replace(told, devices=None)
    assert not make_vllm_engine(
        engine_agent(), on_cpu, probe_prompts(engine_agent()), 99, tmp_path
    ).starts_alone


def test_a_cache_of_no_size_is_measured(tmp_path: Path) -> None:
    told = VllmSettings(engine_args={"kv_cache_memory_bytes": None}, devices=(1,))
    assert make_vllm_engine(engine_agent(), told, probe_prompts(engine_agent()), 99, tmp_path).starts_alone


def test_engines_that_start_together_look_for_ports_in_different_places(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_PORT", raising=False)
    assert len({engine_environment(GPU, VllmSettings())["VLLM_PORT"] for _ in range(20)}) > 1
    monkeypatch.setenv("VLLM_PORT", "23456")  # the user's is inherited
    assert "VLLM_PORT" not in engine_environment(GPU, VllmSettings())


def test_every_engine_draws_its_own_responses(tmp_path: Path) -> None:
    """Unless each response has a seed, an engine's decides; vLLM's own would be the same for all, always."""
    agents = tuple(AgentSettings(name=name, model=name) for name in ("small", "large"))

    def seeds(run_seed: int) -> list[int]:
        config = RunConfig(
            agents=agents, output=str(tmp_path), seed=run_seed, rollout=RolloutSettings(engine="vllm")
        )
        checked = CheckedTask(SevensTask(), train=PROBLEMS, test=[], devices={}, notes=())
        engines = [make_engine(config, one, engine_agent(one.name), checked) for one in agents]
        return [engine.backend._engine["engine_args"]["seed"] for engine in engines]

    first, second = seeds(0), seeds(1)
    assert len({*first, *second}) == 4
    assert seeds(0) == first  # and the same in the same run
    assert all(0 <= seed < 2**32 for seed in (*first, *second))


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = engine_environment(GPU, VllmSettings(python="/x/python"))
    assert found["CUDA_VISIBLE_DEVICES"] == "6"  # the agent's device 1
    assert found["PYTHONPATH"] == str(WORKER_FOLDER)  # another interpreter gets nothing else of ours
    assert found["VLLM_SERVER_DEV_MODE"] == "1"
    found = engine_environment(CPU, VllmSettings(mode="server", devices=(0, 2)))
    assert found["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert found["PYTHONPATH"].split(":") == [str(WORKER_FOLDER), "/elsewhere"]
    found = engine_environment(CPU, VllmSettings())
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert "PYTHONPATH" not in found
    assert {path.name for path in WORKER_FOLDER.glob("*.py")} == {"__init__.py", "hacrl_vllm_worker.py"}


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        (CPU, {}, False),
        (CPU, {"sleep": True}, False),
        (GPU, {}, True),
        (GPU, {"sleep": False}, False),
        (GPU, {"devices": (0,)}, False),
        (GPU, {"devices": (0, 1)}, True),
        (GPU, {"devices": (0,), "sleep": True}, True),
    ],
)
def test_memory_is_given_back_where_the_learner_needs_it(
    device: torch.device, options: dict, expected: bool
) -> None:
    assert sleeps(device, VllmSettings(**options)) is expected


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_was_never_saved_says_what_it_is(tmp_path: Path, adapted: bool) -> None:
    agent = engine_agent()
    assert agent.model.config.architectures is None
    if adapted:
        settings = AgentSettings(name="ada", model="-", lora=LoraSettings())
        agent.model = add_adapters(agent.model, settings, seed=0)
    write_model(agent, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert (config.hidden_size, config.vocab_size) == (64, 22)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == agent.tokenizer.get_vocab()
    assert not list(tmp_path.glob("*.safetensors"))  # weights come later


class TestServe:
    @pytest.fixture
    def config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
        """A recipe whose interpreter claims to have vLLM."""
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho 0.32.0\n")
        python.chmod(0o755)
        char_agent("ada").save(tmp_path / "ada")
        settings = VllmSettings(python=str(python), engine_args={"max_model_len": 60}, url=None)
        agent = AgentSettings(name="ada", model=str(tmp_path / "ada"), vllm=settings)
        monkeypatch.delenv("HACRL_VLLM_API_KEY", raising=False)
        return RunConfig(agents=(agent,), output=str(tmp_path / "run"), device="cpu")

    def test_the_plan_is_the_server_that_a_run_would_start(self, config: RunConfig) -> None:
        plan = plan_server(config, "ada", "0.0.0.0", 8123)
        options = options_of(plan.command)
        assert plan.command[0] == config.agents[0].vllm.python
        assert options["model"] == config.agents[0].model
        assert options["dtype"] == "float32"
        assert (options["host"], options["port"], options["max-model-len"]) == ("0.0.0.0", "8123", "60")
        assert options["worker-extension-cls"] == "hacrl_vllm_worker.WeightReceiver"
        assert options["load-format"] == "safetensors"  # the model's weights, unlike a run's own server
        assert plan.environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert "VLLM_API_KEY" not in plan.environment

    def test_the_key_goes_by_the_environment_alone(
        self, config: RunConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HACRL_VLLM_API_KEY", "secret words")
        plan = plan_server(config, "ada", "127.0.0.1", 8123)
        assert plan.environment["VLLM_API_KEY"] == "secret words"
        assert "secret words" not in json.dumps(plan.command)  # ps would show it to everybody

    def test_an_agent_that_is_used_through_a_url_can_be_served(self, config: RunConfig) -> None:
        settings = VllmSettings(url="http://127.0.0.1:1", engine_args={"max_model_len": 60})
        served = replace(config.agents[0], vllm=settings)
        with pytest.raises(ConfigError, match="vllm is not installed here"):  # in this environment
            plan_server(replace(config, agents=(served,)), "ada", "127.0.0.1", 8123)

    def test_an_agent_that_is_not_there(self, config: RunConfig) -> None:
        with pytest.raises(ConfigError, match="no agent 'bob' in this recipe; it has ada"):
            plan_server(config, "bob", "127.0.0.1", 8123)


def test_a_length_that_responses_would_be_cut_at_is_refused(tmp_path: Path) -> None:
    char_agent("ada").save(tmp_path / "ada")
    for max_length, fits in ((9, True), (8, False)):  # the longest prompt is "111+14:" with 7 tokens
        vllm = VllmSettings(python="/x/python", engine_args={"max_model_len": max_length})
        settings = AgentSettings(name="ada", model=str(tmp_path / "ada"), engine="vllm", vllm=vllm)
        config = RunConfig(
            agents=(settings,),
            output=str(tmp_path / "run"),
            device="cpu",
            rollout=RolloutSettings(prompts_per_step=2, max_new_tokens=2),
        )
        checked = preflight(config, SevensTask())
        if fits:
            make_engine(config, settings, char_agent("ada"), checked).close()
            continue
        with pytest.raises(ConfigError, match=r"ada\.vllm\.engine_args\.max_model_len=8, but .* 9 tokens"):
            make_engine(config, settings, char_agent("ada"), checked)
