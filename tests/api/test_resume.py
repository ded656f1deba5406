"""Resuming a run from Python."""

from __future__ import annotations

import pytest

from hacrl import HACRLConfig, HACRLTrainer
from hacrl.errors import ConfigError

ROWS = [{"prompt": f"({a}+{b})*2:", "answer": str(2 * (a + b))} for a in range(10, 20) for b in range(2, 6)]


def correct(completions, answer, **_):
    return [float(text.endswith("#" + gold)) for text, gold in zip(completions, answer, strict=True)]


def trainer(folder, steps: int, **args) -> HACRLTrainer:
    return HACRLTrainer(
        agents=["bundled:qwen-small-a", "bundled:llama-pairs"],
        reward_funcs=correct,
        train_dataset=ROWS,
        args=HACRLConfig(
            output=folder,
            steps=steps,
            rollout={"prompts_per_step": 4, "rollouts_per_prompt": 4, "max_new_tokens": 24},
            learning={"lr": 1e-4},
            progress=False,
            **args,
        ),
    )


def test_a_resumed_run_equals_one_run(tmp_path):
    trainer(tmp_path / "whole", 3).train()
    trainer(tmp_path / "parts", 1, resume=True, checkpoint={"every": 1}).train()  # nothing there: it starts
    result = trainer(tmp_path / "parts", 3, resume=True).train()
    lines = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts")]
    assert lines[0] == lines[1]
    assert len(result.rewards["llama-pairs"]) == 3


def test_a_different_run_is_refused(tmp_path):
    trainer(tmp_path / "run", 1, checkpoint={"every": 1}).train()
    with pytest.raises(ConfigError, match=r"seed was 0, now 3"):
        trainer(tmp_path / "run", 2, resume=True, seed=3)
    with pytest.raises(ConfigError, match=r"continue it with `hacrl resume"):
        trainer(tmp_path / "run", 2)
