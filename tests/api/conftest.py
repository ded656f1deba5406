"""Tiny random agents as folders, and small runs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hacrl import HACRLConfig
from tests.support.tiny import save_agents

SMALL = {
    "steps": 2,
    "device": "cpu",
    "threads": 1,
    "method": {"name": "hacpo", "clip_low": 0.2, "clip_high": 0.28, "delta": 0.9, "delta_step": 0.01},
    "rollout": {"prompts_per_step": 3, "rollouts_per_prompt": 4, "max_new_tokens": 4},
    "learning": {"lr": 5e-3},
}
ROWS = [{"prompt": f"{a}+{b}:", "digit": str((a + b) % 10)} for a in range(6) for b in range(4)]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    """ "char" and "pair": name -> folder."""
    return save_agents(tmp_path_factory.mktemp("models"))


def small(output: Path, **changes: Any) -> HACRLConfig:
    return HACRLConfig(output=output, progress=False, **{**SMALL, **changes})


def has_digit(completions, digit, **_):
    """1 if the row's digit is in the response."""
    return [float(gold in text) for text, gold in zip(completions, digit, strict=True)]


def shortness(completions, **_):
    """Minus the number of characters."""
    return [-len(text) for text in completions]
