"""Every name of TRL is in the table, and what the table says is true."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from scripts.write_trl_reference import PAGE, trl_page
from transformers import TrainerCallback

from hacrl import Callback, HACRLConfig, HACRLTrainer
from hacrl.config.agent import AgentSettings
from hacrl.config.load import apply_override, build_config
from hacrl.config.method import METHOD_SETTINGS
from hacrl.config.schema import RunConfig
from hacrl.config.trl_names import CONFIG_NAMES, EARLIER_NAMES, MEMBER_NAMES, TRAINER_NAMES, TrlName
from hacrl.errors import ConfigError
from tests.api.conftest import ROWS, has_digit, small

AGENTS = [{"name": "a", "model": "bundled:qwen-large"}]
KEYS = {**CONFIG_NAMES, **EARLIER_NAMES}
# A value of each renamed key that is not the default.
VALUES: dict[str, Any] = {
    "output_dir": "runs/of-trl",
    "learning_rate": 3e-5,
    "weight_decay": 0.25,
    "max_grad_norm": 0.5,
    "mask_truncated_completions": True,
    "num_generations": 3,
    "num_generations_eval": 5,
    "max_completion_length": 17,
    "max_prompt_length": 19,
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 11,
    "num_iterations": 2,
    "beta": 0.125,
    "epsilon": 0.1,
    "epsilon_high": 0.3,
    "gradient_checkpointing": True,
    "trust_remote_code": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "torch_compile": True,
    "save_total_limit": 4,
    "vllm_importance_sampling_clip_max": 4.0,
    "vllm_importance_sampling_cap": 5.0,
    "vllm_gpu_memory_utilization": 0.4,
    "vllm_enable_sleep_mode": True,
    "vllm_server_base_url": "http://gpu7:8000",
}


def names(rows: dict[str, TrlName], *kinds: str) -> list[str]:
    return [name for name, row in rows.items() if row.kind in kinds]


def test_every_name_of_trl_is_in_the_table():
    trl = pytest.importorskip("trl")
    from transformers import Trainer
    from trl.trainer.base_trainer import _BaseTrainer

    assert {field.name for field in dataclasses.fields(trl.GRPOConfig)} == CONFIG_NAMES.keys()
    parameters = inspect.signature(trl.GRPOTrainer.__init__).parameters.keys() - {"self"}
    assert parameters == TRAINER_NAMES.keys()
    members = {name for name in dir(trl.GRPOTrainer) if not name.startswith("_")}
    for kind in (trl.GRPOTrainer, _BaseTrainer, Trainer):
        members |= attributes(kind)
    # the trainer repeats some of its config's fields as attributes
    assert members - CONFIG_NAMES.keys() == MEMBER_NAMES.keys() - CONFIG_NAMES.keys()


def attributes(kind: type) -> set[str]:
    """The public names that a class assigns on ``self``."""
    stores = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(kind)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    owned = [node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"]
    return {name for name in owned if not name.startswith("_")}


def test_the_page_is_written_from_the_table():
    assert PAGE.read_text("utf-8") == trl_page(), "run: python scripts/write_trl_reference.py"


def value_at(record: Any, key: str) -> Any:
    for part in key.split("."):
        record = record[0] if isinstance(record, tuple) else getattr(record, part)
    return record


@pytest.mark.parametrize("name", names(KEYS, "renamed"))
def test_a_renamed_key_is_answered_with_what_to_write_and_that_works(name):
    here, value = KEYS[name].here, VALUES[name]
    with pytest.raises(ConfigError) as caught:
        HACRLConfig(**{"output": "x", name: value})
    if name in CONFIG_NAMES:
        [call] = re.findall(r"HACRLConfig\(.*\)$", str(caught.value), re.MULTILINE)
        given = eval(call.replace("HACRLConfig(", "dict("))
        config = HACRLConfig(**{"output": "x", **given}).run_config(AGENTS, {"name": "arithmetic"}, None)
        assert value_at(config, here.replace("agent_defaults.", "agents.0.")) == value
    for data in ({name: value}, {"checkpoint": {name: value}}):
        with pytest.raises(ConfigError, match=rf"{name}: unknown key; TRL's {name} is {here} here"):
            build_config({"agents": AGENTS, "output": "x", **data})
    recipe = {"agents": AGENTS, "output": "x", "method": "hacpo"}
    written = str(value).lower() if isinstance(value, bool) else value
    apply_override(recipe, f"{here}={written}")
    assert value_at(build_config(recipe), here.replace("agent_defaults.", "agents.0.")) == value


@pytest.mark.parametrize("name", names(KEYS, "differs", "absent"))
def test_other_keys_are_answered_in_python_recipes_and_overrides(name):
    row = KEYS[name]
    words = f"is {row.here} here" if row.here else row.note.replace("`", "")
    recipe: dict[str, Any] = {"agents": AGENTS, "output": "x"}
    apply_override(recipe, f"{name}=1")
    for refused in (lambda: HACRLConfig(**{"output": "x", name: 1}), lambda: build_config(recipe)):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert f"TRL's {name} " in str(caught.value)
        assert words in str(caught.value)
    assert not row.here or is_key(row.here), row.here


def is_key(key: str) -> bool:
    """Whether it is a key of a recipe, or of HACRLConfig alone."""
    first, *rest = key.split(".")
    if first in ("agents[]", "agent_defaults"):
        record: Any = AgentSettings
    elif first == "method" and rest:
        return all(any(hasattr_field(one, part) for one in METHOD_SETTINGS.values()) for part in rest)
    elif not rest:
        return first in {field.name for field in dataclasses.fields(HACRLConfig)} | {"method"}
    else:
        record = typing.get_type_hints(RunConfig)[first]
    for part in rest:
        if not hasattr_field(record, part):
            return False
        record = typing.get_type_hints(record)[part]
    return True


def hasattr_field(record: Any, name: str) -> bool:
    return name in {field.name for field in dataclasses.fields(record)}


def test_works_means_an_effect():
    assert names(KEYS, "works") == ["seed", "project", "reward_weights", "report_to"]
    args = HACRLConfig(output="x", seed=7, project="mine", report_to="tensorboard")
    config = args.run_config(AGENTS, {"name": "arithmetic"}, None)
    assert (config.seed, config.project, config.trackers) == (7, "mine", ("tensorboard",))
    # tests/api/test_trainer.py: the weighted sum of rewards reaches the advantages
    for name, here in (("reward_weights", "task.options.weights"), ("report_to", "trackers")):
        with pytest.raises(ConfigError, match=f"{name}: unknown key; TRL's {name} is {here} here"):
            build_config({"agents": AGENTS, "output": "x", name: 1})


def test_a_grpo_config_is_translated():
    trl = pytest.importorskip("trl")
    given = trl.GRPOConfig(
        output_dir="runs/t", learning_rate=2e-6, num_generations=4, beta=0.04, use_vllm=True, use_cpu=True,
        bf16=False, generation_batch_size=16,
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        HACRLTrainer(["bundled:qwen-large"], task="arithmetic", args=given)
    message = str(caught.value)
    assert message.startswith("args: GRPOConfig of TRL is not a hacrl.HACRLConfig:\n")
    call = (
        "HACRLConfig(output='runs/t', learning={'lr': 2e-06}, "
        "rollout={'rollouts_per_prompt': 4}, method={'kl_coefficient': 0.04})"
    )
    assert f"are written as {call}\n" in message
    assert "TRL's use_vllm is rollout.engine here" in message
    assert "TRL's use_cpu is device here" in message
    assert "TRL's generation_batch_size is rollout.prompts_per_step here" in message
    assert len(message.splitlines()) == 7  # bf16 and steps_per_generation besides: all others have defaults


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (None, 'args: missing; give HACRLConfig(output="runs/NAME", ...)'),
        ({"output": "x"}, "args: must be a hacrl.HACRLConfig, not dict"),
    ],
)
def test_args_of_another_type(args, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        HACRLTrainer(["bundled:qwen-large"], task="arithmetic", args=args)


def test_a_config_without_output_and_with_a_typing_error():
    for given in ({"steps": 3}, {"output": None}):
        with pytest.raises(ConfigError, match="output is missing"):
            HACRLConfig(**given)
    with pytest.raises(ConfigError, match="stpes: unknown key; did you mean 'steps'"):
        HACRLConfig(output="x", stpes=3)


@pytest.mark.parametrize("name", names(TRAINER_NAMES, "differs"))
def test_parameters_of_the_trainer_are_answered(name):
    here = TRAINER_NAMES[name].here
    with pytest.raises(ConfigError, match=f"TRL's {name} is {here} here"):
        HACRLTrainer(**{name: "x", "reward_funcs": has_digit, "train_dataset": ROWS})
    assert here in inspect.signature(HACRLTrainer).parameters


def test_a_key_of_the_config_given_to_the_trainer():
    with pytest.raises(ConfigError, match=r"max_steps is steps here .*; it belongs to args=HACRLConfig"):
        HACRLTrainer(["x"], max_steps=3)
    with pytest.raises(ConfigError, match="taks: unknown argument; did you mean 'task'"):
        HACRLTrainer(["x"], taks="arithmetic")


class Counter(TrainerCallback):
    """Writes down transformers' events."""

    def __init__(self, stop_at: int = 99) -> None:
        self.seen: list[tuple] = []
        self.stop_at = stop_at

    def on_init_end(self, args, state, control, **kwargs):
        self.seen.append(("init", args.output_dir, state.global_step))

    def on_train_begin(self, args, state, control, **kwargs):
        self.seen.append(("begin", state.max_steps, sorted(kwargs["agents"])))

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen.append(("step", state.global_step))

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(("end", state.global_step))
        control.should_training_stop = state.global_step == self.stop_at
        control.should_save = True

    def on_log(self, args, state, control, logs, **kwargs):
        self.seen.append(("log", logs["step"], "char/reward" in logs))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.seen.append(("evaluate", state.global_step, "char/accuracy" in metrics))

    def on_save(self, args, state, control, **kwargs):
        self.seen.append(("save", (Path(args.output_dir) / "agents" / "char").is_dir()))

    def on_train_end(self, args, state, control, **kwargs):
        self.seen.append(("over", state.global_step))


def make(models, output: Path, **given: Any) -> HACRLTrainer:
    changes = given.pop("changes", {})
    return HACRLTrainer(
        models,
        reward_funcs=given.pop("reward_funcs", has_digit),
        train_dataset=ROWS[:-4],
        eval_dataset=ROWS[-4:],
        args=small(output, **changes),
        **given,
    )


def test_callbacks_of_transformers(models, tmp_path):
    counter = Counter(stop_at=2)
    trainer = make(models, tmp_path / "run", callbacks=[counter], changes={"steps": 5})
    trainer.train()
    folder = str(tmp_path / "run")
    assert counter.seen == [
        ("init", folder, 0),
        ("begin", 5, ["char", "pair"]),
        ("evaluate", 0, True),
        *[event for n in (1, 2) for event in (("step", n - 1), ("end", n), ("log", n, True))],
        ("evaluate", 2, True),
        ("save", True),
        ("over", 2),
    ]
    note = "callback Counter asks for should_save, which has no effect here"
    assert (tmp_path / "run" / "notes.txt").read_text().count(note) == 1


def test_args_of_a_callback_answer_names_that_hacrl_lacks(models, tmp_path):
    class Reads(TrainerCallback):
        def on_init_end(self, args, state, control, **kwargs):
            return args.gradient_accumulation_steps

    words = r"TRL's gradient_accumulation_steps is learning\.updates_per_source"
    with pytest.raises(AttributeError, match=words):
        make(models, tmp_path / "run", callbacks=[Reads()])


def test_adding_and_removing_callbacks(models, tmp_path):
    class Notes(Callback):
        steps = 0

        def on_step(self, report, seconds):
            self.steps += self.trainer is not None

    first, second, removed, kept = Counter(), Notes(), Counter(), Counter()
    trainer = make(models, tmp_path / "run", callbacks=[removed, kept], changes={"steps": 1})
    trainer.add_callback(first)
    trainer.add_callback(second)
    trainer.remove_callback(removed)
    assert trainer.pop_callback(kept) is kept
    assert trainer.pop_callback(kept) is None
    trainer.add_callback(kept)
    trainer.add_callback(Notes)  # a class
    trainer.train()
    assert ("end", 1) in first.seen
    assert ("end", 1) in kept.seen
    assert second.steps == 1
    assert removed.seen == [("init", str(tmp_path / "run"), 0)]
    assert trainer.pop_callback(Counter) is first
    with pytest.raises(ConfigError, match=r"callbacks: int is not an instance of a hacrl\.Callback"):
        trainer.add_callback(3)


def test_state_log_history_and_the_state_of_reward_functions(models, tmp_path):
    seen = []

    def rising(completions, trainer_state, **_):
        seen.append(trainer_state.global_step)
        return [float(trainer_state.global_step)] * len(completions)

    changes = {"steps": 2, "evaluation": {"problems": 0}}
    trainer = make(models, tmp_path / "run", reward_funcs=rising, changes=changes)
    assert (trainer.state.global_step, trainer.state.max_steps) == (0, 2)
    trainer.train()
    assert seen == [0, 0, 0, 1, 1]  # tried before models load; two agents in each of two steps
    assert trainer.state.global_step == 2
    logged = [entry for entry in trainer.state.log_history if "char/reward" in entry]
    assert [(entry["step"], entry["char/reward"]) for entry in logged] == [(1, 0.0), (2, 1.0)]


def test_save_model_train_and_resume_as_trl_spells_them(models, tmp_path):
    trainer = make(models, tmp_path / "run", changes={"steps": 1})
    with pytest.raises(ConfigError, match=r"a run is resumed by HACRLConfig\(resume=True, \.\.\.\)"):
        trainer.train(resume_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=None)
    assert trainer.save_model() == {name: tmp_path / "run" / "agents" / name for name in models}
    assert trainer.save_model(output_dir=tmp_path / "b")["char"] == tmp_path / "b" / "char"
    again = make(models, tmp_path / "run", changes={"steps": 2, "resume": True})
    assert again.state.global_step == 1
    with pytest.raises(ConfigError, match="continues from the newest checkpoint of"):
        again.train(resume_from_checkpoint="runs/other/checkpoint-3")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


def test_members_that_hacrl_lacks_are_answered(models, tmp_path):
    with make(models, tmp_path / "run") as trainer:
        for name, row in MEMBER_NAMES.items():
            if row.kind == "works":
                assert hasattr(trainer, name), name
                continue
            with pytest.raises(AttributeError) as caught:
                getattr(trainer, name)
            assert f"has no attribute {name!r}: TRL's {name} " in str(caught.value)
            assert (row.here or row.note.replace("`", "")) in str(caught.value)
            owner, _, attribute = row.here.partition("(")[0].partition("[")[0].partition(".")
            assert owner != "trainer" or hasattr(trainer, attribute.partition(".")[0]), row.here
            config_key = re.match(r"HACRLConfig\((\w+)", row.here)
            assert config_key is None or hasattr_field(HACRLConfig, config_key[1]), row.here
        with pytest.raises(AttributeError, match=r"has no attribute .agnets.$"):
            _ = trainer.agnets


def test_a_lora_config_makes_adapters(models, tmp_path):
    from peft import LoraConfig

    given = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with make(models, tmp_path / "run", peft_config=given) as trainer:
        assert {agent.lora.targets for agent in trainer.config.agents} == {("q_proj", "v_proj")}
        adapters = trainer.agents["char"].model.peft_config["default"]
        assert (adapters.r, adapters.lora_alpha, adapters.target_modules) == (4, 8, {"q_proj", "v_proj"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"r": 4}, "peft_config.target_modules: missing; say which layers: 'all-linear'"),
        ({"target_modules": "all-linear", "lora_dropout": 0.1}, "peft_config.lora_dropout=0.1: hacrl makes"),
        ({"target_modules": "all-linear", "use_dora": True}, "peft_config.use_dora=True: hacrl makes"),
    ],
)
def test_a_lora_config_that_hacrl_would_not_follow(models, tmp_path, given, words):
    from peft import LoraConfig

    with pytest.raises(ConfigError, match=re.escape(words)):
        make(models, tmp_path / "run", peft_config=LoraConfig(**given))


def test_adapters_are_given_once(models, tmp_path):
    from peft import LoraConfig

    with pytest.raises(ConfigError, match="mean the same; give one"):
        make(
            models,
            tmp_path / "run",
            peft_config=LoraConfig(target_modules="all-linear"),
            changes={"agent_defaults": {"lora": {}}},
        )
    with pytest.raises(ConfigError, match=r"must be a peft\.LoraConfig, not dict"):
        make(models, tmp_path / "run", peft_config={"r": 4})
