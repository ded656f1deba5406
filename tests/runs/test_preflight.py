"""Checks before any weights are loaded and before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.errors import ConfigError, ModelError, TaskError
from hacrl.runs.dry_run import dry_run
from hacrl.runs.preflight import preflight
from hacrl.runs.run import build_trainer, run_locally
from hacrl.types import Turn
from tests.runs.long_prompts import LongTask, config_of, edit, refusal
from tests.support.sevens import SevensTask, problem
from tests.support.tiny import save_agents


def test_weights_are_loaded_last(models: dict[str, str], tmp_path: Path) -> None:
    """These models have no weights: preflight passes, and only the loading fails."""
    config = config_of(models, tmp_path)
    checked = preflight(config, LongTask())
    assert checked.notes == ()
    assert checked.devices == {"char": "cpu", "pair": "cpu"}
    assert (len(checked.train), len(checked.test)) == (8, 2)
    assert "agents.char.model: folder " in (message := refusal(config, LongTask(), ModelError))
    assert "has no weights" in message


def test_missing_weights_are_found_before_the_others_load(tmp_path: Path) -> None:
    models = save_agents(tmp_path / "models")
    (Path(models["char"]) / "model.safetensors").write_bytes(b"not weights")  # to load it would fail
    (Path(models["pair"]) / "model.safetensors").unlink()
    message = refusal(config_of(models, tmp_path), LongTask(), ModelError)
    assert message.startswith(f"agents.pair.model: folder {models['pair']} has no weights")


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        (("1:", "2:", "1:"), ("3:", "4:"), "a training and a training problem have the same id '1:'"),
        (("1:", "2:"), ("3:", "1:"), "a training and a held-out problem have the same id '1:'"),
    ],
)
def test_problem_ids_must_be_unique(
    models: dict[str, str], tmp_path: Path, train: Sequence[str], test: Sequence[str], words: str
) -> None:
    task = SevensTask()
    task.train, task.test = [problem(one) for one in train], [problem(one) for one in test]
    assert words in refusal(config_of(models, tmp_path), task, TaskError)


@pytest.mark.parametrize(("held_out", "asked", "evaluated"), [(3, None, 3), (250, None, 200), (250, 7, 7)])
def test_a_run_is_evaluated_on_all_held_out_problems(
    models: dict[str, str], tmp_path: Path, held_out: int, asked: int | None, evaluated: int
) -> None:
    task = SevensTask()
    task.test = [problem(f"{number}+0:") for number in range(1000, 1000 + held_out)]
    config = config_of(models, tmp_path, evaluation={} if asked is None else {"problems": asked})
    checked = preflight(config, task)
    assert (len(checked.test), checked.notes) == (evaluated, ())


def test_a_task_without_held_out_problems_can_be_trained_on(models: dict[str, str], tmp_path: Path) -> None:
    task = SevensTask()
    task.test = []
    checked = preflight(config_of(models, tmp_path, evaluation={}), task)
    assert checked.notes == ("task 'sevens' holds out no problems, so the agents are not evaluated",)
    assert preflight(config_of(models, tmp_path, evaluation={"problems": 0}), task).notes == ()
    message = refusal(config_of(models, tmp_path), task, ConfigError)
    assert "evaluation.problems=2, but task 'sevens' holds out only 0 problems; lower it" in message


def test_an_agent_s_own_device_is_named_as_such(models: dict[str, str], tmp_path: Path) -> None:
    agents = [{"name": name, "model": folder} for name, folder in models.items()]
    config = config_of(models, tmp_path, agents=[agents[0], {**agents[1], "device": "gpu"}])
    assert refusal(config, LongTask(), ConfigError).startswith("agents.pair.device: 'gpu' is not a device")
    config = config_of(models, tmp_path, device="cuda:63")
    assert refusal(config, LongTask(), ConfigError).startswith(
        "device: there is no 'cuda:63' (this machine has"
    )


def test_prompts_that_an_agent_cannot_read_are_noted(tmp_path: Path) -> None:
    """The bundled agents know digits and operators: of "what is 1+1:" all letters and spaces are unknown."""
    task = LongTask()
    task.train = [problem("what is 1+1:"), problem("2+2:"), problem("3+3:")]
    checked = preflight(config_of({"small": "bundled:qwen-small-a"}, tmp_path), task)
    (note,) = checked.notes
    assert note == (
        "agent 'small' cannot read the prompts: 40% of their tokens are unknown to its tokenizer"
    )  # 8 of 12 + 4 + 4
    task.train = task.train[1:]
    assert preflight(config_of({"small": "bundled:qwen-small-a"}, tmp_path), task).notes == ()


def test_without_notes_there_is_no_file(tmp_path: Path) -> None:
    config = config_of(save_agents(tmp_path / "models"), tmp_path)
    assert not (run_locally(config, task=LongTask()).folder / "notes.txt").exists()


def test_a_tokenizer_that_cannot_stop(models: dict[str, str], tmp_path: Path) -> None:
    edit(Path(models["pair"]) / "tokenizer_config.json", lambda config: config.pop("eos_token"))
    message = refusal(config_of(models, tmp_path), LongTask(), ModelError)
    assert message.startswith("agent 'pair': the tokenizer of")
    assert "has no eos_token" in message


def test_a_template_without_system_prompts(models: dict[str, str], tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (Path(models["pair"]) / "chat_template.jinja").write_text(template + "{{ messages[0].content }}")
    task = LongTask()
    assert preflight(config_of(models, tmp_path), task).notes == ()
    task.train = [replace(one, context=(Turn("system", "1"),)) for one in task.train]
    message = refusal(config_of(models, tmp_path), task, ModelError)
    assert "agent 'pair': its chat template cannot write a conversation of system, user: no system" in message


def test_a_missing_model_is_found_first(models: dict[str, str], tmp_path: Path) -> None:
    missing = {**models, "pair": str(tmp_path / "nowhere")}
    assert "agents.pair.model: folder" in refusal(config_of(missing, tmp_path), LongTask(), ConfigError)


def test_user_code_is_tried_before_models_are_read(tmp_path: Path) -> None:
    class Broken(LongTask):
        def self_test(self) -> None:
            raise TaskError("reward function 'f' fails")

    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")  # no tokenizer: reading it would fail
    config = config_of({"x": str(tmp_path / "empty")}, tmp_path)
    assert refusal(config, Broken(), TaskError) == "reward function 'f' fails"


def test_building_a_trainer_runs_the_checks(tmp_path: Path) -> None:
    """The checks are those of preflight."""
    config = config_of(save_agents(tmp_path / "models"), tmp_path)
    config = replace(config, rollout=replace(config.rollout, max_new_tokens=60))
    with pytest.raises(TaskError, match="but the model's context length is 64"):
        build_trainer(config)


@pytest.mark.parametrize("check", ["train", "dry run"])
def test_lora_without_peft_ends_before_the_data_are_read(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    missing = {"name": "gsm8k", "options": {"train": str(tmp_path / "none.jsonl")}}
    config = config_of(models, tmp_path, agent_defaults={"lora": {"rank": 2}}, task=missing)
    with pytest.raises(ConfigError, match=r"lora needs peft: pip install 'hacrl\[lora\]'"):
        (run_locally if check == "train" else dry_run)(config)
    assert not (tmp_path / "run").exists()
