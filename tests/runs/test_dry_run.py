"""Dry runs: what is checked, what is listed as not checked, and the memory estimate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoConfig

from hacrl.cli.dry_run import dry_run_lines
from hacrl.config.load import load_config
from hacrl.config.schema import LoraSettings, RunConfig
from hacrl.errors import ConfigError, ModelError, TaskError
from hacrl.memory import estimate as memory
from hacrl.memory.estimate import AgentShapes, device_memory, footprints, workload
from hacrl.runs import hub
from hacrl.runs.dry_run import dry_run
from hacrl.runs.hub import needs_hub
from hacrl.tasks.arithmetic import ArithmeticTask
from tests.support.tiny import byte_tokenizer, save_agents

GIB = 2**30


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Two random tiny agents on the built-in task."""
    folder = tmp_path_factory.mktemp("dry")
    agents = "\n".join(f"  - {{name: {n}, model: {m}}}" for n, m in save_agents(folder / "models").items())
    path = folder / "tiny.yaml"
    path.write_text(
        f"agents:\n{agents}\nsteps: 3\noutput: {folder / 'out'}\ndevice: cpu\n"
        "rollout: {prompts_per_step: 4, rollouts_per_prompt: 2, max_new_tokens: 16}\n"
        "evaluation: {problems: 5, samples_per_problem: 1}\n"
    )
    return path


def last_line(plan) -> str:
    return list(dry_run_lines(plan))[-1]


def test_a_local_run_is_checked_completely(recipe, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_probe", lambda _: pytest.fail("a run of local files asked the network"))
    config = load_config(recipe)
    plan = dry_run(config)
    assert (plan.updates_per_step, plan.rollouts_per_step) == (4, {"char": 8, "pair": 8})
    assert plan.not_checked == ()
    assert plan.train_problems > 100
    assert plan.test_problems == 5
    char, pair = plan.agents
    assert char.stop_tokens == pair.stop_tokens == ("<eos>",)
    # a token is a character for the one; for the other "(23+14)*2:" is ( 23 + 14 ) * 2 :, and none is longer
    asked = [problem.prompt for problem in ArithmeticTask().train]
    assert (char.longest_prompt, pair.longest_prompt) == (max(map(len, asked)), 8)
    saved = [Path(agent.settings.model) / "model.safetensors" for agent in plan.agents]
    # float32: a file is its weights, a header of the length that its first eight bytes say, and those
    for file, agent in zip(saved, plan.agents, strict=True):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert agent.footprint.weights == file.stat().st_size - 8 - header
    assert plan.devices[0].agents == ("char", "pair")
    assert plan.devices[0].available == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert last_line(plan) == "ready"
    assert not Path(config.output).exists()


def test_the_output_describes_the_run(recipe):
    text = "\n".join(dry_run_lines(dry_run(load_config(recipe, ["rollout.max_prompt_tokens=9"]))))
    assert "clip_low: 0.0003" in text  # a default nobody wrote down
    assert "4 prompts; rollouts: char 8, pair 8" in text
    assert "each agent trains on all agents' rollouts in 4 updates" in text
    assert "3 steps: 48 rollouts, 12 updates per agent" in text
    assert "training problems are left out: their prompts are longer than rollout.max_prompt_tokens=9" in text
    assert max(map(len, text.splitlines())) < 120
    alone = "\n".join(dry_run_lines(dry_run(load_config(recipe, ["method=gspo"]))))
    assert "each agent trains on its own rollouts in 2 updates" in alone


def test_a_run_that_does_not_fit_is_told_what_would(recipe, monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda _: 1000)
    options = ["method.kl_coefficient=0.1", "learning.micro_batch_tokens=8192", "rollout.max_batch=8"]
    plan = dry_run(load_config(recipe, options))
    (device,) = plan.devices
    assert not device.fits
    assert last_line(plan) == "ready, except for what is marked WARNING above"
    changes = {advice.change: advice.needed for advice in device.advice}
    assert list(changes) == [
        "agent_defaults.gradient_checkpointing=true",
        "learning.micro_batch_tokens=2048",
        "a device for each agent, e.g. agents.pair.device=cuda:1",
    ]
    for change, needed in list(changes.items())[:-1]:  # what is promised is what the change brings
        after = dry_run(load_config(recipe, [*options, *change.split()]))
        assert after.devices[0].needed == needed < 0.95 * device.needed
    assert changes.popitem()[1] == max(agent.footprint.peak for agent in plan.agents)
    lines = list(dry_run_lines(plan))
    assert "WARNING: the run does not fit on cpu. Each of these changes helps:" in lines


def test_advice_for_real_models_is_what_each_change_brings(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda _: 80 * GIB)
    sized = AgentShapes({"small": "cuda", "large": "cuda:0"}, shapes(), {})

    def needed(*overrides: str) -> memory.DeviceMemory:
        run = load_config(Path("paper_size"), overrides)
        (found,) = device_memory(run, sized, footprints(run, sized))  # one device under two names
        return found

    before = needed()
    assert (before.device, before.agents) == ("cuda:0", ("small", "large"))
    changes = {advice.change: advice.needed for advice in before.advice}
    assert changes.popitem()[0] == "a device for each agent, e.g. agents.large.device=cuda:1"
    assert list(changes) == [
        "agent_defaults.lora.rank=64 agent_defaults.lora.alpha=128",
        "method.kl_coefficient=0",
        "rollout.max_batch=16",
        "rollout.max_new_tokens=2048",
    ]
    assert {change: needed(*change.split()).needed for change in changes} == changes


def shapes():
    qwen = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
    small = {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
    }
    large = {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
    }
    return {
        "small": AutoConfig.for_model("qwen3", **qwen, **small),
        "large": AutoConfig.for_model("qwen3", **qwen, **large),
    }


def test_the_work_of_an_agent():
    def work(*overrides: str):
        config: RunConfig = load_config(Path("paper_size"), overrides)
        return workload(config, config.agents[0], 300, config.learning.micro_batch_tokens or 4096)

    paper = work()
    train, evaluation = paper.decodings
    assert (train.prompts, train.responses, train.longest) == (8, 64, 4396)  # max_batch 64, 8 of each
    assert (evaluation.prompts, evaluation.responses) == (64, 64)  # of 200 problems, one of each
    assert (paper.learnt_tokens, paper.longest_sample) == (4396, 4396)  # one sample is longer than 4096
    assert (paper.reference, paper.filtered) == (True, False)
    other = work("max_batch=4", "evaluation.problems=0", "micro_batch_tokens=9000", "top_p=0.9")
    assert [(one.prompts, one.responses) for one in other.decodings] == [(1, 4)]  # a part of a group
    assert (other.learnt_tokens, other.filtered) == (9000, True)
    few = work("prompts_per_step=3", "evaluation.problems=5", "evaluation.max_new_tokens=8192")
    assert [(one.prompts, one.responses, one.new_tokens) for one in few.decodings] == [
        (3, 24, 4096),
        (5, 5, 8192),
    ]


@pytest.mark.parametrize(
    ("overrides", "kind", "words"),
    [
        (["trackers=[abacus]"], ConfigError, "abacus"),
        (["device=cuda:99"], ConfigError, "cuda:99"),
        (["agents.char.model=./gone"], ConfigError, "agents.char.model: folder ./gone does not exist"),
        (["evaluation.problems=1000000"], ConfigError, "holds out only"),
        (["rollout.max_new_tokens=60"], TaskError, "but the model's context length is 64"),
        (["task.name=boxed", "task.options.train=gone.jsonl"], TaskError, "no such file"),
        (["agents.char.lora.targets=[nothing]"], ModelError, "nothing"),
    ],
)
def test_a_mistake_is_the_same_error_as_in_a_run(recipe, overrides, kind, words):
    with pytest.raises(kind, match=words):
        dry_run(load_config(recipe, overrides))


def test_an_output_folder_in_use_is_an_error(recipe, tmp_path):
    (tmp_path / "config.yaml").write_text("old")
    config = load_config(recipe, [f"output={tmp_path}"])
    with pytest.raises(ConfigError, match="exists already; "):
        dry_run(config)
    assert last_line(dry_run(config, overwrite=True)) == "ready"
    assert (tmp_path / "config.yaml").read_text() == "old"


def test_a_tokenizer_that_does_not_belong_to_the_model_is_an_error(recipe, tmp_path):
    models = save_agents(tmp_path)
    byte_tokenizer().save_pretrained(models["char"])  # 259 tokens, the model has 22
    with pytest.raises(ModelError, match="has token 258, the model only 22 embeddings"):
        dry_run(load_config(recipe, [f"agents.char.model={models['char']}"]))


def test_without_the_hub_the_rest_is_checked(recipe):
    """Tests run with HF_HUB_OFFLINE; one of two agents is on the hub."""
    overrides = ["agents.pair.model=Qwen/Qwen3-1.7B-Base", "rollout.max_prompt_tokens=9"]
    plan = dry_run(load_config(recipe, overrides))
    assert plan.not_checked == (
        "tokenizer, stop tokens and prompt lengths of agent 'pair' (Qwen/Qwen3-1.7B-Base): "
        "HF_HUB_OFFLINE is set",
    )
    char, pair = plan.agents
    assert (char.longest_prompt, pair.longest_prompt, pair.stop_tokens) == (9, None, None)
    assert pair.footprint.counts.total == 1_720_574_976
    assert plan.devices[0].needed > 16 * 1_720_574_976
    assert any("left out" in note for note in plan.notes)
    with pytest.raises(
        TaskError, match="but the model's context length is 64"
    ):  # the other agent's, that is at hand
        dry_run(load_config(recipe, [overrides[0], "rollout.max_new_tokens=60"]))


def test_without_the_hub_an_unknown_model_has_unknown_memory(recipe):
    plan = dry_run(load_config(recipe, ["agents.pair.model=somebody/unknown"]))
    assert [line.partition(":")[0] for line in plan.not_checked] == [
        "tokenizer, stop tokens and prompt lengths of agent 'pair' (somebody/unknown)",
        "memory of agent 'pair' (somebody/unknown)",
    ]
    assert plan.agents[0].footprint is not None
    assert plan.agents[1].footprint is None
    assert plan.devices[0].needed is None
    lines = list(dry_run_lines(plan))
    assert any(line.startswith("cpu (char, pair): needs an unknown amount") for line in lines)
    assert lines[-1] == "ready, except for what is marked NOT CHECKED above"


def test_unknown_layers_have_unknown_memory(recipe, tmp_path):
    folder = save_agents(tmp_path)["char"]
    AutoConfig.for_model("blt").save_pretrained(folder)  # has no single width and number of layers
    plan = dry_run(load_config(recipe, [f"agents.char.model={folder}"]))
    assert plan.not_checked == (f"memory of agent 'char' ({folder}): unknown type of layers",)
    assert [agent.footprint is None for agent in plan.agents] == [True, False]


def hacrl(endpoint: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """An environment with another hub, an empty cache and no offline setting."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": endpoint, "HF_HOME": str(cwd / "hf")}
    environment.pop("HF_HUB_OFFLINE")
    command = [sys.executable, "-m", "hacrl.cli.main", "train", *arguments, "--dry-run"]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_an_unreachable_hub_is_probed_once_and_is_no_error(tmp_path):
    shown = hacrl("http://127.0.0.1:9", "paper_model", "device=cpu", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "Retrying" not in shown.stderr + shown.stdout  # the libraries' own way: half a minute a file
    assert "Traceback" not in shown.stderr
    lines = shown.stdout.splitlines()
    unchecked = [line for line in lines if line.startswith("NOT CHECKED: ")]
    assert len(unchecked) == 3
    assert "the data of task 'math': http://127.0.0.1:9 cannot be reached" in unchecked[0]
    for line, agent in zip(unchecked[1:], ("qwen", "llama"), strict=True):
        assert f"tokenizer, stop tokens and prompt lengths of agent '{agent}'" in line
    assert "parameters           4,022,468,096                     3,212,749,824" in lines
    assert "58 steps: 118,784 rollouts, 232 updates per agent" in lines
    assert lines[-1].startswith("ready, except for what is marked ")
    assert not (tmp_path / "runs").exists()


class NothingHere(BaseHTTPRequestHandler):
    """A hub that answers and does not have the model."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_a_model_that_the_hub_does_not_have_is_an_error(recipe, tmp_path):
    with HTTPServer(("127.0.0.1", 0), NothingHere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        failed = hacrl(endpoint, str(recipe), "agents.pair.model=somebody/typo", cwd=tmp_path)
        server.shutdown()
    assert failed.returncode == 2, failed.stdout
    assert "agent 'pair': cannot load" in failed.stderr
    assert "somebody/typo" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_without_peft_adapters_are_not_advised(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda _: GIB)
    monkeypatch.setitem(sys.modules, "peft", None)
    run, sized = load_config(Path("paper_size")), AgentShapes({"small": "cpu", "large": "cpu"}, shapes(), {})
    (found,) = device_memory(run, sized, footprints(run, sized))
    changes = [advice.change for advice in found.advice]
    assert "method.kl_coefficient=0" in changes
    assert not any("lora" in change for change in changes)


def test_which_runs_need_the_hub(recipe, tmp_path):
    data = tmp_path / "problems.jsonl"
    data.write_text(json.dumps({"problem": "1 + 6", "answer": "7"}) + "\n")
    local = ["task.name=math", f"task.options.train={data}", "task.options.test={path: " + f"{data}}}"]
    assert not needs_hub(load_config(recipe))
    assert not needs_hub(load_config(recipe, local))
    assert needs_hub(load_config(recipe, local[:2]))  # the preset's test set
    assert needs_hub(load_config(recipe, ["agents.pair.model=Qwen/Qwen3-4B"]))
    assert not needs_hub(load_config(recipe, ["agents.pair.model=bundled:llama-pairs"]))
    rows = json.dumps([{"problem": "1 + 6" * 60, "answer": "7"}])  # longer than a file's name can be
    assert not needs_hub(load_config(recipe, ["task.name=boxed", f"task.options.train={rows}"]))
    remote = load_config(recipe, ["task.name=boxed", "task.options.train=some/data"])
    assert needs_hub(remote)
    assert not needs_hub(remote, has_task=True)  # handed in from Python, with its data


def test_the_offline_setting_is_restored(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_probe", lambda endpoint: f"{endpoint} is asleep")
    with hub.cache_only_if_unreachable() as reason:
        assert reason == f"{constants.ENDPOINT} is asleep"
        assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (True, True)
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)
    monkeypatch.setattr(hub, "_probe", lambda _: None)
    with hub.cache_only_if_unreachable() as reason:
        assert (reason, constants.HF_HUB_OFFLINE) == (None, False)


def test_lora_is_not_advised_to_those_who_use_it(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda _: GIB)
    run = load_config(Path("paper_size"), ["agent_defaults.lora.rank=8"])
    assert {agent.lora for agent in run.agents} == {LoraSettings(rank=8)}
    sized = AgentShapes({"small": "cpu", "large": "cpu"}, shapes(), {})
    (found,) = device_memory(run, sized, footprints(run, sized))
    assert found.advice
    assert not any("lora" in advice.change for advice in found.advice)
