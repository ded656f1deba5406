"""Whole runs of agents that are trained in different ways, together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hacrl.config.schema import (
    AgentSettings,
    EvaluationSettings,
    LearningSettings,
    LoraSettings,
    RolloutSettings,
    RunConfig,
    TaskSettings,
)
from hacrl.models.agent import Agent
from hacrl.runs.run import LocalRun
from tests.support.forward import plain_logprobs
from tests.training.handmade import PROMPTS, RESPONSES, SAMPLING
from tests.training.runs import HACPO, Run, Runs, assert_moved, assert_same_weights

LORA = LoraSettings(rank=2, alpha=8.0)


def logprobs(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        pairs = [(PROMPTS[which % 3], response) for which, response in enumerate(RESPONSES)]
        return torch.cat([plain_logprobs(model, *pair, SAMPLING) for pair in pairs]).float()


def adapter_of(run: Run, agent: str) -> dict[str, Tensor]:
    return load_file(run.result.folder / "agents" / agent / "adapter" / "adapter_model.safetensors")


def test_adapters_and_full_weights_in_one_run(runs: Runs) -> None:
    """All agents learn from each other; the third trains in bfloat16."""
    run = runs(
        runs.agent("char", lora=LORA),
        "twin",
        runs.agent("pair", lora=LORA, precision="bfloat16", gradient_checkpointing=True),
    )
    for name in ("char", "twin", "pair"):
        for step in run.of(name):
            assert set(step["learning"]["sources"]) == {"char", "twin", "pair"}
            assert step["learning"]["sampler_gap"] < (0.02 if name == "pair" else 1e-5)
    assert_moved(run.weights("twin"), runs.initial_weights("twin"))
    for name in ("char", "pair"):
        start, end = runs.initial_weights(name), run.weights(name)
        changed = {key for key in start if not torch.equal(start[key].to(end[key].dtype), end[key])}
        linear = {key for key in start if key.endswith("_proj.weight")}
        assert changed == linear  # what has adapters; embeddings, norms and head are as they were
        ups = [value for key, value in adapter_of(run, name).items() if "lora_B" in key]
        assert all(float(value.abs().max()) > 1e-3 for value in ups)
    assert not (run.result.folder / "agents" / "twin" / "adapter").exists()
    assert {value.dtype for value in run.weights("pair").values()} == {torch.bfloat16}


def test_initial_adapters_do_not_depend_on_other_agents(runs: Runs) -> None:
    """Their initial weights depend on the run's seed and the agent's name alone."""

    def start(*agents: str, seed: int = 0, of: str = "char") -> dict[str, Tensor]:
        return adapter_of(runs(*(runs.agent(name, lora=LORA) for name in agents), steps=0, seed=seed), of)

    alone = start("char")
    assert_same_weights(alone, start("char", "pair"))
    assert_same_weights(alone, start("pair", "char"))
    for other in (start("char", seed=1), start("char", "twin", of="twin")):
        assert not any(torch.equal(other[key], value) for key, value in alone.items() if "lora_A" in key)


def test_runs_with_adapters_repeat_to_the_bit(runs: Runs) -> None:
    first, second = (
        runs(runs.agent("char", lora=LORA), runs.agent("pair", gradient_checkpointing=True)) for _ in range(2)
    )
    assert first.metrics_text == second.metrics_text
    assert_same_weights(adapter_of(first, "char"), adapter_of(second, "char"))
    assert_same_weights(first.weights("pair"), second.weights("pair"))


def test_checkpointing_changes_no_metric(runs: Runs) -> None:
    plain = runs("char", "pair")
    checkpointed = runs(*(runs.agent(name, gradient_checkpointing=True) for name in ("char", "pair")))
    for name in ("char", "pair"):
        for one, other in zip(plain.of(name), checkpointed.of(name), strict=True):
            assert one["rollout"] == other["rollout"]
            for key in ("loss", "grad_norm"):
                assert other["learning"][key] == pytest.approx(one["learning"][key], rel=1e-4, abs=1e-6)


def bfloat16_run(runs: Runs, output: Path, lr: float) -> LocalRun:
    return LocalRun(
        RunConfig(
            agents=tuple(runs.agent(name, precision="bfloat16") for name in ("char", "pair")),
            output=str(output),
            steps=3,
            device="cpu",
            threads=1,
            task=TaskSettings(name="sevens"),
            method=HACPO,
            rollout=RolloutSettings(prompts_per_step=4, rollouts_per_prompt=4, max_new_tokens=4),
            learning=LearningSettings(lr=lr),
            evaluation=EvaluationSettings(problems=0),
        )
    )


def test_a_run_in_bfloat16(runs: Runs, tmp_path: Path) -> None:
    with bfloat16_run(runs, tmp_path / "run", lr=5e-3) as run:
        run.train()
        folders = run.save()
        agents = {
            participant.name: participant.agent for participant in run.trainer.executor.workers.values()
        }
        for name, folder in folders.items():
            saved = load_file(folder / "model.safetensors")
            assert {value.dtype for value in saved.values()} == {torch.bfloat16}
            assert_moved(saved, runs.initial_weights(name))
            assert agents[name].policy_version == 3 * 4  # two updates for each of two sources
            trained = logprobs(agents[name].model)
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert loaded.dtype == torch.bfloat16
            assert torch.equal(logprobs(loaded), trained)
            settings = AgentSettings(name=name, model=str(folder), precision="bfloat16")
            assert torch.equal(logprobs(Agent.load(settings, "cpu").model), trained)


def test_steps_too_small_for_bfloat16_are_not_lost(runs: Runs, tmp_path: Path) -> None:
    """A norm's weights, all 1, cannot move by 1e-6 in bfloat16; their masters do at every update."""
    with bfloat16_run(runs, tmp_path / "run", lr=1e-6) as run:
        run.train()
        for participant in run.trainer.executor.workers.values():
            parameters = dict(participant.agent.model.named_parameters())
            masters = [m.detach() for m in participant.learner.optimizer.masters]
            for (name, parameter), master in zip(parameters.items(), masters, strict=True):
                assert torch.equal(parameter, master.to(torch.bfloat16))
                assert parameter.grad is None
                start = runs.initial_weights(participant.name)[name].to(torch.bfloat16).float()
                # 12 updates of about 1e-6 each, some of them against each other
                assert 2e-6 < float((master - start).abs().max()) < 4e-5
                if "norm" in name:
                    assert torch.equal(parameter, torch.ones_like(parameter))
