"""examples/audit_step.py recomputes steps of a real run, finds changed numbers, and does not need hacrl."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit_step
import pytest
import yaml
from safetensors.torch import load_file, save_file

from hacrl import HACRLConfig, HACRLTrainer
from tests.support.tiny import (
    byte_tokenizer,
    character_tokenizer,
    sentencepiece_like_tokenizer,
    tiny_gpt2,
    tiny_llama,
    tiny_qwen,
)

SCRIPT = Path(audit_step.__file__)
AGENTS = ("small-a", "llama")  # of recipes/model.yaml: two architectures, two tokenizers
TOKEN_ROW = "log pi of own tokens / (1+|log pi|)"
LOG_ROWS = {
    "prompt tokens",
    "texts equal to their tokens",
    TOKEN_ROW,
    "log pi of own responses / |y|",
}
REWARD_ROWS = {"mean reward", "capability P", "capability history"}


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two steps of HACPO with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("audited") / "run"
    settings = "steps=2 checkpoint.every=1 evaluation.problems=0 seed=3 device=cpu"
    sizes = "rollout.prompts_per_step=4 rollout.rollouts_per_prompt=4"
    done = run_python("-m", "hacrl", "train", "model", *settings.split(), *sizes.split(), f"output={folder}")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def failures(folder: Path, step: int = 1) -> set[tuple[str, str]]:
    return set(audit_step.audit(folder, step, {}).failed)


def log_of(folder: Path, agent: str, step: int = 1) -> Path:
    return folder / audit_step.ROLLOUTS.format(step=step, agent=agent)


def change_lines(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the first JSON object of a file."""
    first, *others = path.read_text().splitlines()
    row = json.loads(first)
    change(row)
    path.write_text("\n".join([json.dumps(row), *others]) + "\n")


def change_config(folder: Path, key: str, value: Any) -> None:
    """Set a key in a run's config.yaml, which may not have the key."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    *sections, last = key.split(".")
    section = config
    for name in sections:
        section = section[name]
    assert section.get(last) != value
    section[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("step", [1, 2])
def test_every_number_of_a_step_is_recomputed(run, step):
    table = audit_step.audit(run, step, {})
    assert table.failed == []
    rows = {(agent, quantity): tolerance for agent, quantity, _, tolerance in table.rows}
    for k, j in (AGENTS, AGENTS[::-1]):
        assert rows[k, TOKEN_ROW] == rows[k, "log pi of own responses / |y|"] == 1e-5
        assert rows[k, "loss"] == 1e-6
        others = {
            f"learnt from {j}",
            f"own tokens per token of {j}",
            f"omega({j}, {k})",
            f"s of {j}, largest",
        }
        weights = {"gradients (exp_avg)", "weights with clear gradients", "all weights: gap / length of move"}
        assert {
            quantity for agent, quantity in rows if agent == k
        } >= LOG_ROWS | REWARD_ROWS | others | weights


def test_the_run_is_no_trivial_case(run):
    """Both kinds of clipping occur, own and others' responses are learnt from, and two tokens differ."""
    found = audit_step.read_metrics(run, 1)
    learning = {k: found[k]["learning"] for k in AGENTS}
    assert all(one["updates"] == 4 and one["grad_norm"] > 0.01 for one in learning.values())
    assert {k: sorted(one["sources"]) for k, one in learning.items()} == {k: sorted(AGENTS) for k in AGENTS}
    assert 0 < learning["small-a"]["sources"]["llama"]["clipped"] < 1
    assert learning["llama"]["sources"]["llama"]["clipped"] > 0
    assert learning["small-a"]["retokenised"]["llama"]["length_ratio"] > 1.2
    assert found["small-a"]["capability"] != found["llama"]["capability"]


UNSET: dict[str, Any] = {"method": {}, "learning": {}, "agent": {}}
SET: dict[str, Any] = {
    "method": {"reward_range": (-1.0, 2.0)},
    "learning": {"updates_per_step": 5},
    "agent": {"lr": 2e-3},
}


@pytest.mark.parametrize("optional", [UNSET, SET], ids=["unset", "set"])
def test_chat_templates_dropped_responses_and_optional_keys(tmp_path, optional):
    """Three kinds of tokenizer, one with a chat template. Other agents drop most responses of two of them.

    The task does not know its highest reward. The optional keys are once left out, once set.
    """
    template = (
        "{% for turn in messages %}{{ '(' if turn['role'] == 'user' else ')' }}{{ turn['content'] }}"
        "{% if turn['role'] == 'assistant' %}<pad>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}){% endif %}"
    )
    kinds = {
        "char": (tiny_qwen, character_tokenizer()),
        "spaced": (tiny_llama, sentencepiece_like_tokenizer()),
        "bytes": (tiny_gpt2, byte_tokenizer()),
    }
    kinds["char"][1].chat_template = template  # its turns end with <pad>, not with eos
    for name, (model, tokenizer) in kinds.items():
        model(tokenizer).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    rows = [{"prompt": f"{a}+{b}:", "digit": str((a + b) % 10)} for a in range(6) for b in range(4)]
    HACRLTrainer(
        agents=[{"name": name, "model": str(tmp_path / name), **optional["agent"]} for name in kinds],
        reward_funcs=lambda completions, digit, **_: [
            2.0 * (gold in text) for text, gold in zip(completions, digit, strict=True)
        ],
        train_dataset=rows,
        args=HACRLConfig(
            output=tmp_path / "run",
            steps=1,
            device="cpu",
            progress=False,
            method={"name": "hacpo", "clip_low": 0.2, "clip_high": 0.28, "delta": 0.9, **optional["method"]},
            rollout={"prompts_per_step": 6, "rollouts_per_prompt": 6, "max_new_tokens": 6},
            learning={"lr": 5e-3, "weight_decay": 0.01, **optional["learning"]},
        ),
    ).train()
    table = audit_step.audit(tmp_path / "run", 1, {}, max_reward=None)
    assert table.failed == []
    found = audit_step.read_metrics(tmp_path / "run", 1)
    updates = optional["learning"].get("updates_per_step", 6)  # 6: 2 updates for each of 3 sources
    assert all(one["learning"]["updates"] == updates for one in found.values())
    lowest = optional["method"].get("reward_range", (0.0,))[0]
    for one in found.values():  # 1e-8: no capability is below it, so that ratios exist
        assert one["capability"] == pytest.approx(max(one["rollout"]["reward"] - lowest, 1e-8))
    assert found["bytes"]["rollout"]["reward"] == 0  # the lowest capability and the bounds of omega count
    dropped = {k: one["learning"]["dropped"] for k, one in found.items()}
    assert dropped["char"]["spaced"]["not_representable"] > 0
    assert found["char"]["learning"]["sources"].keys() >= {"char", "spaced"}
    assert found["char"]["rollout"]["stopped"] > 0  # "bytes" appends its own stop token to these
    assert "char" not in dropped["bytes"]


def test_a_changed_log_probability_fails_where_it_was_logged(copied):
    def change(row: dict[str, Any]) -> None:
        row["segments"][0]["token_logprobs"][2] -= 0.01
        row["logprob"] -= 0.01

    change_lines(log_of(copied, "llama"), change)
    failed = failures(copied)
    changed = {TOKEN_ROW, "log pi of own responses / |y|"}  # and what is computed from them
    assert {("llama", quantity) for quantity in changed} <= failed
    assert not {("small-a", quantity) for quantity in LOG_ROWS} & failed
    assert not {(k, quantity) for k in AGENTS for quantity in REWARD_ROWS} & failed


def test_a_changed_reward_fails_where_it_was_logged(copied):
    def change(row: dict[str, Any]) -> None:
        row["reward"] = 1 - row["reward"]

    change_lines(log_of(copied, "small-a"), change)
    failed = failures(copied)
    assert {("small-a", quantity) for quantity in REWARD_ROWS} <= failed
    assert not {("llama", quantity) for quantity in REWARD_ROWS} & failed
    assert not {(k, quantity) for k in AGENTS for quantity in LOG_ROWS} & failed
    assert {(k, "loss") for k in AGENTS} <= failed  # both learn from it


def test_a_changed_text_fails_for_its_author_and_the_other_learner(copied):
    def change(row: dict[str, Any]) -> None:
        row["text"] = row["segments"][0]["text"] = row["text"] + "1"

    change_lines(log_of(copied, "llama"), change)
    failed = failures(copied)
    assert {("llama", "texts equal to their tokens"), ("small-a", "own tokens per token of llama")} <= failed
    assert ("llama", "loss") not in failed  # it learns from its tokens


def test_a_changed_metric_fails_alone(copied):
    def change(row: dict[str, Any]) -> None:
        row["agents"]["small-a"]["learning"]["loss"] += 2e-6

    change_lines(copied / audit_step.METRICS, change)
    assert failures(copied) == {("small-a", "loss")}


def test_a_changed_weight_fails_alone(copied):
    path = copied / audit_step.CHECKPOINT.format(step=1) / audit_step.TENSORS.format(agent="llama")
    tensors = load_file(path)
    place = int(tensors["7.exp_avg"].abs().argmax())  # the gradient is far above rounding there
    tensors["7.master"].flatten()[place] += 2e-6  # 1% of the learning rate
    save_file(tensors, path)
    assert failures(copied) == {("llama", "weights with clear gradients")}


@pytest.mark.parametrize(
    ("key", "value", "quantity"),
    [
        ("seed", 4, "loss"),
        ("method.alpha", 2.0, "loss"),
        ("method.delta", 0.1, "s of {}, share clipped"),
        ("method.delta_step", 0.05, "loss"),
        ("method.clip_low", 0.0003, "loss"),
        ("method.clip_high", 0.0004, "loss"),
        ("method.reward_range", [0.0, 0.3], "loss"),
        ("method.reward_range", [-1.0, 1.0], "capability P"),
        ("learning.lr", 2.02e-4, "weights with clear gradients"),
        ("learning.betas", [0.91, 0.95], "gradients (exp_avg)"),
        ("learning.betas", [0.9, 0.96], "gradients (exp_avg_sq)"),
        ("learning.weight_decay", 0.1, "weights with clear gradients"),
        ("learning.max_grad_norm", 0.1, "gradients (exp_avg)"),
        ("learning.updates_per_source", 1, "updates"),
        ("learning.updates_per_step", 2, "updates"),
    ],
)
def test_a_step_with_another_setting_would_be_another_step(copied, key, value, quantity):
    change_config(copied, key, value)
    failed = failures(copied)
    assert any((k, quantity.format(j)) in failed for k, j in (AGENTS, AGENTS[::-1]))


@pytest.mark.parametrize(
    ("constant", "value"), [("STD_EPSILON", 1e-3), ("RATIO_MAX", 1.0), ("RATIO_MIN", 1.0)]
)
def test_a_step_with_another_constant_would_be_another_step(run, monkeypatch, constant, value):
    monkeypatch.setattr(audit_step, constant, value)
    assert {(k, "loss") for k in AGENTS} & failures(run)


def test_a_key_that_is_not_set_means_its_default(copied):
    """The run's config.yaml has none of these keys. Their defaults change nothing."""
    config = yaml.safe_load((copied / "config.yaml").read_text())
    assert not {"reward_range", "kl_coefficient", "learn_stop_token"} & config["method"].keys()
    assert "updates_per_step" not in config["learning"]
    change_config(copied, "method.reward_range", [0.0, 1.0])
    change_config(copied, "method.kl_coefficient", 0.0)
    change_config(copied, "method.learn_stop_token", True)
    change_config(copied, "learning.updates_per_step", 4)
    assert failures(copied) == set()


def test_the_capability_window_shows_in_the_second_step(copied):
    change_config(copied, "method.capability_window", 1)
    assert ("llama", "capability P") in failures(copied, 2)


def test_what_the_run_has_not_kept_is_named(copied):
    shutil.rmtree(copied / audit_step.CHECKPOINT.format(step=1))
    for step in (1, 2):  # the checkpoint after, the checkpoint before
        with pytest.raises(SystemExit, match=r"step-000001 is missing.*checkpoint\.every=1"):
            audit_step.audit(copied, step, {})
    log_of(copied, "llama", step=2).unlink()
    with pytest.raises(SystemExit, match=r"llama\.jsonl is missing.*keep_rollouts=all"):
        audit_step.audit(copied, 2, {})
    with pytest.raises(SystemExit, match="step 3 is not in"):
        audit_step.audit(copied, 3, {})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("method.kl_coefficient", 0.001, r"method\.kl_coefficient is 0\.001: the audit covers 0"),
        ("method.reading", "public", r"method\.reading is 'public': the audit covers 'paper'"),
    ],
)
def test_a_setting_that_the_audit_does_not_cover_is_named(copied, key, value, message):
    change_config(copied, key, value)
    with pytest.raises(SystemExit, match=message):
        audit_step.audit(copied, 1, {})


def test_an_agent_that_the_audit_does_not_cover_is_named(copied):
    config = yaml.safe_load((copied / "config.yaml").read_text())
    config["agents"][1]["lora"] = {"rank": 4}
    (copied / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit, match=r"agents\.llama\.lora is \{'rank': 4\}: the audit covers None"):
        audit_step.audit(copied, 1, {})


def test_the_script_imports_nothing_of_hacrl():
    allowed = {"numpy", "safetensors", "torch", "transformers", "yaml"} | sys.stdlib_module_names
    imported = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported <= allowed
    assert {"torch", "transformers"} <= imported


def test_the_command_runs_where_hacrl_cannot_be_imported(copied):
    """Exit code 0 if all rows pass, 1 if one fails."""
    blocked = (
        f"import sys; sys.argv = {[str(SCRIPT), str(copied), '--step', '1']!r}; sys.modules['hacrl'] = None"
    )
    code = f"{blocked}; import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FAIL" not in done.stdout
    passed, of, total, *_ = done.stdout.splitlines()[-1].split()
    assert (passed, of) == (total, "of")

    change_lines(
        copied / audit_step.METRICS, lambda row: row["agents"]["llama"]["rollout"].update(reward=2.0)
    )
    done = run_python(str(SCRIPT), str(copied), "--step", "1")
    assert done.returncode == 1
    [failed] = [line for line in done.stdout.splitlines() if line.endswith("FAIL")]
    assert failed.startswith("llama        mean reward")
