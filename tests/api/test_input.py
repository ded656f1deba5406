"""Valid and invalid arguments of the trainer; errors come before anything is written."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pandas
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import hacrl
from hacrl import AgentSettings, Callback, HACRLConfig, HACRLTrainer
from hacrl.api.agents import agent_requests
from hacrl.config.schema import (
    EvaluationSettings,
    GspoSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    TaskSettings,
)
from hacrl.errors import ConfigError, HacrlError
from tests.api.conftest import ROWS, has_digit, small
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent

AGENT = {"name": "a", "model": "bundled:qwen-large"}


def names(*given) -> list[str]:
    return [request.section["name"] for request in agent_requests(list(given))]


def test_names_come_from_models():
    assert names("Qwen/Qwen3-1.7B-Base", "meta-llama/Llama-3.2-3B-Instruct", "bundled:qwen-large") == [
        "Qwen3-1.7B-Base",
        "Llama-3.2-3B-Instruct",
        "qwen-large",
    ]
    assert names("/data/models/my model (v2)/", "smollm2-135m") == ["my-model-v2-", "smollm2-135m"]
    assert names("..", "/") == ["agent", "agent-2"]


def test_names_are_unique_whatever_their_case():
    assert names("a/Twin", "b/twin", {"model": "c/TWIN", "lr": 0.1}) == ["Twin", "twin-2", "TWIN-3"]
    # a name somebody chose is never taken, even if it comes later
    assert names("x/pair", AgentSettings(name="pair", model="y")) == ["pair-2", "pair"]


def test_a_model_without_a_path_is_named_after_its_architecture():
    agent = char_agent()
    assert names((agent.model, agent.tokenizer)) == ["qwen3"]
    assert names(agent) == ["char"]


def run_config(**changes):
    return HACRLConfig(output="out", **changes).run_config([AGENT], {"name": "arithmetic"}, None)


def test_settings_records_and_mappings_are_the_same():
    records = run_config(
        method=GspoSettings(clip_low=0.1),
        rollout=RolloutSettings(max_new_tokens=7),
        learning=LearningSettings(lr=0.5),
        evaluation=EvaluationSettings(every=3),
    )
    mappings = run_config(
        method={"name": "gspo", "clip_low": 0.1},
        rollout={"max_new_tokens": 7},
        learning={"lr": 0.5},
        evaluation={"every": 3},
    )
    assert records == mappings
    assert records.method == GspoSettings(clip_low=0.1)
    assert run_config(method="gspo").method == GspoSettings()
    assert run_config().method == HacpoSettings()


def test_every_key_of_a_run_can_be_set():
    from dataclasses import fields

    from hacrl.config.schema import RunConfig

    said = {field.name for field in fields(HACRLConfig)}
    assert {field.name for field in fields(RunConfig)} - said == {"agents", "task"}  # the trainer's own


def test_defaults_are_those_of_a_recipe():
    from hacrl.config.load import build_config

    assert run_config() == build_config({"agents": [AGENT], "output": "out"})


def test_trackers_under_both_names():
    assert run_config(trackers="wandb").trackers == ("wandb",)
    assert run_config(report_to=["wandb", "mlflow"]).trackers == ("wandb", "mlflow")
    assert run_config(report_to="none").trackers == ()
    with pytest.raises(ConfigError, match=r"report_to='wandb' and trackers=\('mlflow',\) mean the same"):
        run_config(report_to="wandb", trackers=("mlflow",))


def test_agent_defaults_apply_to_agents_without_own_settings():
    args = HACRLConfig(output="out", agent_defaults={"lr": 0.5, "lora": {"rank": 3}})
    sections = [
        request.section for request in agent_requests(["a/x", AgentSettings(name="y", model="b", lr=0.25)])
    ]
    config = args.run_config(sections, {"name": "arithmetic"}, None)
    assert [agent.lr for agent in config.agents] == [0.5, 0.25]
    assert [agent.lora.rank for agent in config.agents] == [3, 3]


def test_tasks_by_name_and_settings(models, tmp_path):
    for number, task in enumerate([TaskSettings(options={"largest": 50}), {"options": {"largest": 50}}]):
        args = small(tmp_path / str(number), steps=0, evaluation={"problems": 0})
        with HACRLTrainer(models, task=task, args=args) as trainer:
            assert trainer.config.task.options == {"largest": 50}


def lacking_task():
    class Lacking:
        name, max_reward, train, test = "x", 1.0, (), ()

    return Lacking()


def adapted_in_place(models):
    """By transformers' own ``add_adapter``, which leaves no way to merge or switch off."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(models["char"])
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return model, AutoTokenizer.from_pretrained(models["char"])


def quantised(models):
    """Marked as transformers marks what it has loaded in 4 or 8 bits."""
    model = AutoModelForCausalLM.from_pretrained(models["char"])
    model.is_quantized = True
    return model, AutoTokenizer.from_pretrained(models["char"])


def frozen(models):
    model = AutoModelForCausalLM.from_pretrained(models["char"]).requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(models["char"])


def pair_of(models, tokenizer: str = "char"):
    return AutoModelForCausalLM.from_pretrained(models["char"]), AutoTokenizer.from_pretrained(
        models[tokenizer]
    )


REWARD = {"reward_funcs": has_digit, "train_dataset": ROWS}


@pytest.mark.parametrize(
    ("given", "args", "words"),
    [
        ({"agents": "bundled:qwen-large"}, {}, ["agents: must be a list", "str"]),
        ({"agents": []}, {}, ["agents: name at least one agent"]),
        ({"agents": [3]}, {}, ["agents[0] is int", "(model, tokenizer) pair"]),
        ({"agents": lambda m: [pair_of(m)[0]]}, {}, ["Qwen3ForCausalLM", "a model needs its tokenizer"]),
        ({"agents": lambda m: [(pair_of(m)[0], None)]}, {}, ["(Qwen3ForCausalLM, NoneType)", "tokenizer"]),
        ({"agents": lambda m: [pair_of(m)] * 2}, {}, ["share one model object"]),
        ({"agents": lambda m: [pair_of(m, "pair")]}, {}, ["agent 'char'", "token 121", "22 embeddings"]),
        ({"agents": lambda m: [frozen(m)]}, {}, ["agent 'char'", "frozen"]),
        ({"agents": lambda m: [adapted_in_place(m)]}, {}, ["agent 'char'", "could not be merged"]),
        ({"agents": lambda m: [quantised(m)]}, {}, ["agent 'char'", "quantised"]),
        ({"agents": {"x": AgentSettings(name="y", model="m")}}, {}, ["the entry 'x' has the name 'y'"]),
        ({"agents": {"a b": "bundled:qwen-large"}}, {}, ["name 'a b' becomes a folder name"]),
        ({"agents": [{"model": "bundled:qwen-large", "lrr": 1}]}, {}, ["agents.0.lrr", "'lr'"]),
        ({"agents": ["bundled:gpt"]}, {}, ["agents.gpt.model", "no bundled agent 'gpt'"]),
        (
            {
                "agents": lambda m: [
                    {"model": pair_of(m)[0], "tokenizer": pair_of(m)[1], "precision": "bfloat16"}
                ]
            },
            {},
            ["agents.char.precision", "loaded already"],
        ),
        (
            {"agents": [{"model": "m", "tokenizer": len}]},
            {},
            ["has a tokenizer, but its model is not loaded"],
        ),
        ({"callbacks": [Callback]}, {}, ["callbacks: Callback is not an instance"]),
        ({"task": None}, {}, ["give reward_funcs and train_dataset, or give task"]),
        ({"task": None, "reward_funcs": has_digit}, {}, ["give reward_funcs and train_dataset"]),
        ({"task": "arithmetic", "train_dataset": ROWS}, {}, ["train_dataset: a task has its own data"]),
        ({"task": "arithmetic"}, {"reward_weights": [1]}, ["reward_weights: a task has its own"]),
        ({"task": "arithmetics"}, {}, ["task.name", "arithmetics"]),
        ({"task": SevensTask}, {}, ["task: the class SevensTask is not a task"]),
        ({"task": lacking_task()}, {}, ["Lacking without verify, close"]),
        ({"task": None, **REWARD}, {"reward_weights": [1, 2]}, ["reward_weights=[1, 2]: give 1"]),
        ({"task": None, **REWARD, "reward_funcs": []}, {}, ["reward_funcs: give at least one"]),
        ({"task": None, **REWARD, "reward_funcs": "nowhere:f"}, {}, ["reward_funcs: 'nowhere:f'"]),
        ({"task": None, **REWARD, "train_dataset": []}, {}, ["train_dataset: the rows given", "no rows"]),
        ({"task": None, **REWARD, "eval_dataset": "no.jsonl"}, {}, ["eval_dataset: no.jsonl"]),
        ({"task": None, **REWARD}, {"reward_range": [1]}, ["reward_range=[1]"]),
        ({"task": None, **REWARD, "reward_funcs": 3}, {}, ["reward_funcs: must be a function", "int"]),
        ({"task": None, **REWARD, "reward_funcs": torch.nn.Linear(1, 1)}, {}, ["'Linear' is a model"]),
        (
            {"task": None, **REWARD, "train_dataset": {"prompt": ["a", "b"]}},
            {},
            ["train_dataset: is a mapping of 'prompt' to lists; give a list of rows"],
        ),
        (
            {"task": None, **REWARD, "eval_dataset": {"train": Dataset.from_list(ROWS)}},
            {},
            ["eval_dataset: has several splits ('train'); give one of them"],
        ),
        ({"callbacks": Callback()}, {}, ["callbacks: must be a list, not Callback"]),
        ({"task": None, **REWARD, "reward_funcs": lambda completions: 1}, {}, ["<lambda>", "returned int"]),
        ({}, {"steps": -1}, ["steps must not be negative"]),
        ({}, {"steps": "ten"}, ["HACRLConfig", "steps", "'ten'"]),
        ({}, {"learning": {"learning_rate": 1}}, ["learning.learning_rate: unknown key"]),
        ({}, {"rollout": LearningSettings(lr=0.5)}, ["rollout.lr: unknown key"]),
        (
            {},
            {"method": "ppo"},
            [
                "method.name: must be one of grpo, gspo, naive, hacpo, "
                "success_gated, xgrpo, ftis, sapo, s2l_po, aligned"
            ],
        ),
        ({}, {"evaluation": {"problems": 10**6}}, ["evaluation.problems=1000000"]),
        ({}, {"trackers": "tensorbord"}, ["trackers", "did you mean 'tensorboard'"]),
        ({}, {"device": "toaster"}, ["device", "toaster"]),
    ],
)
def test_errors_name_the_key_and_write_nothing(models, tmp_path, monkeypatch, given, args, words):
    monkeypatch.chdir(tmp_path)
    given = {"agents": models, "task": "arithmetic", **given}
    if callable(given["agents"]):
        given["agents"] = given["agents"](models)
    with pytest.raises(HacrlError) as caught:
        HACRLTrainer(**given, args=small(tmp_path / "run", **args))
    for word in words:
        assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_is_kept(models, tmp_path):
    HACRLTrainer(models, task=SevensTask(), args=small(tmp_path / "run", steps=0)).train()
    with pytest.raises(ConfigError, match="exists already; "):
        HACRLTrainer(models, task=SevensTask(), args=small(tmp_path / "run", steps=0))
    HACRLTrainer(models, task=SevensTask(), args=small(tmp_path / "run", steps=0, overwrite=True)).train()


def test_evaluating_without_problems_is_refused(models, tmp_path):
    trainer = HACRLTrainer(models, **REWARD, args=small(tmp_path / "run"))
    with pytest.raises(ConfigError, match="give eval_dataset or eval_share"):
        trainer.evaluate()


def test_arrays_and_data_frames_are_read(models, tmp_path):
    rows = pandas.DataFrame(ROWS)
    args = small(
        tmp_path / "run", steps=0, reward_weights=numpy.array([0.5]), reward_range=torch.tensor([0, 1])
    )
    with HACRLTrainer(
        models, reward_funcs=has_digit, train_dataset=rows, args=args, callbacks=None
    ) as trainer:
        assert trainer.config.task.options["weights"] == [0.5]
        assert trainer.config.task.options["reward_range"] == [0, 1]
        found = {problem.prompt: problem.fields["digit"] for problem in trainer._run._task.train}
    assert found == {row["prompt"]: row["digit"] for row in ROWS}


def test_other_data_and_unwritable_folders_are_named(models, tmp_path):
    (tmp_path / "file").write_text("")
    with HACRLTrainer(models, task=SevensTask(), args=small(tmp_path / "run", steps=0)) as trainer:
        with pytest.raises(ConfigError, match=r"evaluate: held-out problems are given to HACRLTrainer\(eval"):
            trainer.evaluate(ROWS)
        with pytest.raises(ConfigError, match=r"save_model: cannot write to .*x: Not a directory"):
            trainer.save_model(tmp_path / "file" / "x")


def test_a_share_can_be_held_out(models, tmp_path):
    with HACRLTrainer(models, **REWARD, args=small(tmp_path / "run", eval_share=0.5)) as trainer:
        held_out = trainer.config.evaluation.problems
    assert 6 <= held_out <= 18  # about half of 24, by a hash of the prompt


def fresh(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_hacrl_is_light():
    heavy = "import sys; print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert fresh(f"import hacrl; hacrl.__version__; {heavy}") == "[]"
    config = "from hacrl import HACRLConfig, AgentSettings, Problem; HACRLConfig(output='x')"
    assert fresh(f"{config}; {heavy}") == "['pydantic']"


def test_public_names_of_the_package():
    assert {"HACRLTrainer", "HACRLConfig", "AgentSettings", "Callback"} <= set(hacrl.__all__)
    assert set(hacrl.__all__) <= set(dir(hacrl))
    for name in hacrl.__all__:
        assert getattr(hacrl, name).__name__ == name
    with pytest.raises(AttributeError, match="'hacrl' has no attribute 'Trainer'"):
        hacrl.Trainer  # noqa: B018


def test_a_script_without_a_guard(models, tmp_path):
    """Worker processes of the verifier do not run the user's script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from hacrl import HACRLConfig, HACRLTrainer\n"
        "from hacrl.tasks.math.pool import MathVerifier\n"
        "from hacrl.config.schema import VerifierSettings\n"
        "print('started')\n"
        "verifier = MathVerifier(VerifierSettings(workers=1, time_limit=60.0))\n"
        "def equal(completions, **_):\n"
        "    pairs = [(r'\\frac{x+1}{2}', r'\\boxed{0.5x + 0.5}') for _ in completions]\n"
        "    return [verdict.reward for verdict in verifier.verify(pairs)]\n"
        "args = HACRLConfig(output='run', steps=1, threads=1, device='cpu', progress=False,\n"
        "    rollout={'prompts_per_step': 1, 'rollouts_per_prompt': 2, 'max_new_tokens': 2})\n"
        f"trainer = HACRLTrainer({list(models.values())!r}, reward_funcs=equal,\n"
        "    train_dataset=[{'prompt': '1:'}, {'prompt': '2:'}], args=args)\n"
        "print(trainer.train().rewards)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["started", "{'char': [1.0], 'pair': [1.0]}"]
