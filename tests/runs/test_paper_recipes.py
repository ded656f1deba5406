"""The paper's recipes: sized with the true shapes, and run from end to end with small models."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hacrl.cli.dry_run import dry_run_lines
from hacrl.config.load import load_config
from hacrl.config.schema import RunConfig
from hacrl.memory import estimate as memory
from hacrl.models.footprint import KNOWN_SHAPES
from hacrl.runs.dry_run import dry_run
from hacrl.runs.run import LocalRun
from tests.support.paper_models import RIGHT, save_shape_only, save_small_model, write_problems

RECIPES = {  # recipe -> agent -> the paper's model, kind, seed and width of its stand-in
    "paper_state": {
        "hybrid": ("Qwen/Qwen3-4B", "qwen3", 0, 32),
        "instruct": ("Qwen/Qwen3-4B-Instruct-2507", "qwen3", 1, 32),
    },
    "paper_size": {
        "small": ("Qwen/Qwen3-1.7B-Base", "qwen3", 0, 32),
        "large": ("Qwen/Qwen3-4B-Base", "qwen3", 1, 48),
    },
    "paper_model": {
        "qwen": ("Qwen/Qwen3-4B-Base", "qwen3", 0, 32),
        "llama": ("meta-llama/Llama-3.2-3B-Instruct", "llama", 1, 32),
    },
}
PARAMETERS = {
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
}


@pytest.mark.parametrize(
    ("recipe", "alpha", "delta_step"),
    [("paper_state", 3.0, 0.01), ("paper_size", 1.0, 0.025), ("paper_model", 1.0, 0.025)],
)
def test_recipes_have_the_papers_numbers(recipe, alpha, delta_step):
    config = load_config(Path(recipe))
    method, rollout, learning = config.method, config.rollout, config.learning
    assert {agent.name: agent.model for agent in config.agents} == {
        name: model for name, (model, *_) in RECIPES[recipe].items()
    }
    assert (config.steps, config.task.name, method.name) == (58, "math", "hacpo")
    assert (method.alpha, method.delta, method.delta_step) == (alpha, 0.2, delta_step)
    assert (method.clip_low, method.clip_high, method.kl_coefficient) == (0.0003, 0.0004, 0.001)
    assert method.capability_window == 5
    assert (rollout.prompts_per_step, rollout.rollouts_per_prompt) == (128, 8)
    assert (rollout.max_prompt_tokens, rollout.max_new_tokens, rollout.temperature) == (1024, 4096, 1.0)
    assert (learning.lr, learning.updates(sources=1), learning.updates(sources=2)) == (1e-6, 2, 4)
    for agent in config.agents:
        assert (agent.precision, agent.gradient_checkpointing, agent.lora) == ("bfloat16", True, None)
    thinking = {agent.name: agent.chat_template_args for agent in config.agents}
    assert thinking.pop("hybrid", None) == ({"enable_thinking": False} if recipe == "paper_state" else None)
    assert set(map(str, thinking.values())) == {"{}"}


def local_config(recipe: str, folder: Path, *overrides: str) -> RunConfig:
    """The recipe with models of a folder and a file of problems."""
    train, test = write_problems(folder)
    local = [f"agents.{name}.model={folder / name}" for name in RECIPES[recipe]]
    local += [f"task.options.train={train}", f"task.options.test={test}", f"output={folder / 'run'}"]
    return load_config(Path(recipe), [*local, "device=cpu", "threads=1", *overrides])


@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run_with_the_true_shapes(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda _: 300 * 2**30)
    for name, (model, *_) in RECIPES[recipe].items():
        save_shape_only(tmp_path / name, KNOWN_SHAPES[model])
    small = ("prompts_per_step=8", "evaluation.problems=6")
    plan = dry_run(local_config(recipe, tmp_path, *small))
    assert plan.not_checked == ()
    assert (plan.train_problems, plan.test_problems, plan.updates_per_step) == (24, 6, 4)
    assert set(plan.rollouts_per_step.values()) == {64}
    persistent = 0
    for agent in plan.agents:
        parameters = PARAMETERS[RECIPES[recipe][agent.settings.name][0]]
        assert agent.footprint.counts.total == agent.footprint.counts.trainable == parameters
        assert (
            agent.footprint.persistent == 20 * parameters
        )  # weights, masters, gradients, moments, reference
        assert 20 < agent.longest_prompt < 120
        persistent += agent.footprint.persistent
    (device,) = plan.devices
    assert device.needed == persistent + max(agent.footprint.transient for agent in plan.agents)
    assert device.fits
    assert list(dry_run_lines(plan))[-1] == "ready"
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Finished:
    """A run with its agents as they were in memory at its end."""

    folder: Path
    kind: str
    metrics: list[dict]
    reference_is_start: dict[str, bool | None]  # None: no copy, because adapters can be switched off
    logprobs: dict[str, Tensor]  # of PROBE, by the agent in memory

    def start(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / name / "model.safetensors")

    def trained(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / "run" / "agents" / name / "model.safetensors")


PROBE = f"What is $8 - 1$? We count: {RIGHT}"
# Run here on agents in memory, and in another process on what was saved: nothing of hacrl is in it.
LOGPROBS = """
def logprobs(model, tokenizer, text):
    import torch
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
"""
RELOAD = (
    LOGPROBS
    + """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
text, *folders = sys.argv[1:]
def one(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    return logprobs(model, AutoTokenizer.from_pretrained(folder), text)
print(json.dumps({folder: one(folder) for folder in folders}))
"""
)
KINDS = {
    "full": (),  # precision, lr and all else as in the recipe
    "lora": ("agent_defaults.lora.rank=4", "agent_defaults.precision=float32", "lr=1e-2"),
}


def finished(recipe: str, kind: str, folder: Path) -> Finished:
    for name, (_, model_type, seed, width) in RECIPES[recipe].items():
        save_small_model(folder / name, model_type, seed, width)
    small = ("steps=4", "prompts_per_step=4", "rollout.max_new_tokens=8", "evaluation.problems=4")
    config = local_config(recipe, folder, *small, *KINDS[kind])
    scope: dict = {}
    exec(LOGPROBS, scope)
    same, found = {}, {}
    with LocalRun(config) as run:
        run.train()
        run.save()
        for participant in run.trainer.executor.workers.values():
            name, agent = participant.name, participant.agent
            copy = getattr(participant.learner._reference, "_model", None) if kind == "full" else None
            start = load_file(folder / name / "model.safetensors")
            same[name] = copy and all(copy.state_dict()[key].equal(value) for key, value in start.items())
            found[name] = torch.tensor(scope["logprobs"](agent.model, agent.tokenizer, PROBE))
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return Finished(folder, kind, metrics, same, found)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, str], Finished]:
    """Every recipe, with full fine-tuning and with adapters: four steps each."""
    return {
        (recipe, kind): finished(recipe, kind, tmp_path_factory.mktemp(f"{recipe}-{kind}"))
        for recipe in RECIPES
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def reloaded(runs) -> dict[str, Tensor]:
    """Folder -> log-probabilities, by plain transformers in another process."""
    folders = [str(run.folder / "run" / "agents" / name) for run in runs.values() for name in run.logprobs]
    command = [sys.executable, "-c", RELOAD, PROBE, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {folder: torch.tensor(values) for folder, values in json.loads(done.stdout).items()}


pairs = pytest.mark.parametrize(
    ("recipe", "name"), [(recipe, name) for recipe, agents in RECIPES.items() for name in agents]
)
kinds = pytest.mark.parametrize("kind", KINDS)


@pairs
@kinds
def test_four_steps_of_four_updates(runs, recipe, name, kind):
    run = runs[recipe, kind]
    other = next(agent for agent in RECIPES[recipe] if agent != name)
    assert [step["step"] for step in run.metrics] == [1, 2, 3, 4]
    for number, step in enumerate(run.metrics, start=1):
        agent = step["agents"][name]
        learning = agent["learning"]
        assert agent["rollout"]["rollouts"] == 32  # 4 prompts x 8
        assert (learning["updates"], agent["policy_version"]) == (4, 4 * number)
        assert learning["grad_norm"] > 0
        # the KL term needs all own responses, with or without advantage; others' only with one
        assert learning["sources"][name]["used"] == 32
        lost = sum(learning["dropped"].get(other, {}).values())
        assert learning["sources"].get(other, {"used": 0})["used"] + learning["skipped"] + lost == 32
        assert set(learning["retokenised"]) == ({other} if recipe == "paper_model" else set())
        assert lost <= (4 if recipe == "paper_model" else 0)  # a broken character now and then
        for report in learning["retokenised"].values():
            assert (report["rollouts"], report["round_trip"]) == (32 - lost, (32 - lost) / 32)
    rewards = [step["agents"][name]["rollout"]["reward"] for step in run.metrics]
    assert 0.05 < sum(rewards) / 4 < 0.95  # right and wrong answers: there is something to learn


@pairs
def test_the_reference_is_the_model_training_started_from(runs, recipe, name):
    run = runs[recipe, "full"]
    assert run.reference_is_start[name] is True
    assert runs[recipe, "lora"].reference_is_start[name] is None


@pairs
@kinds
def test_weights_moved_and_stay_in_their_precision(runs, recipe, name, kind):
    before, after = runs[recipe, kind].start(name), runs[recipe, kind].trained(name)
    assert before.keys() == after.keys()  # tied embeddings are saved once, adapters are merged
    dtype = torch.bfloat16 if kind == "full" else torch.float32
    assert {value.dtype for value in after.values()} == {dtype}
    # by 16 steps of lr 1e-6 at most a few in a hundred bfloat16 numbers change, but in every matrix some do
    linear = [key for key in before if "proj" in key]
    assert len(linear) == 14
    assert [key for key in linear if after[key].equal(before[key].to(dtype))] == []


@pairs
@kinds
def test_saved_agents_are_the_trained_ones_in_another_process(runs, reloaded, recipe, name, kind):
    run = runs[recipe, kind]
    there = reloaded[str(run.folder / "run" / "agents" / name)]
    here = run.logprobs[name]
    assert here.shape == there.shape
    assert len(here) > 10
    if kind == "full":
        assert there.equal(here)
    else:
        assert float((there - here).abs().max()) < 1e-5
