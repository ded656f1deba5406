"""Errors of impossible learning settings name the key and the value."""

from __future__ import annotations

import pytest

from hacrl.config.load import build_config
from hacrl.config.schema import LearningSettings
from hacrl.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("updates_per_source", 0, "at least 1"),
        ("epochs", 0, "at least 1"),
        ("micro_batch_tokens", 0, "at least 1"),
        ("max_cross_rollouts", 0, "at least 1"),
        ("lr", 0.0, "positive"),
        ("lr", -1e-6, "positive"),
        ("max_grad_norm", 0.0, "positive"),
        ("weight_decay", -0.1, "not be negative"),
        ("mismatch_cap", 0.99, "at least 1"),
        ("mismatch_cap", float("nan"), "at least 1"),
    ],
)
def test_impossible_values(key: str, value: float, says: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must .*{says}.* not {value}"):
        LearningSettings(**{key: value})


@pytest.mark.parametrize(("betas", "value"), [((1.0, 0.9), "1.0"), ((0.9, -0.1), "-0.1")])
def test_impossible_betas(betas: tuple[float, float], value: str) -> None:
    with pytest.raises(ValueError, match=rf"betas must be in \[0, 1\), not {value}"):
        LearningSettings(betas=betas)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("old_policy", "lerner", ["learning.old_policy", "'lerner'", "'auto', 'sampler' or 'learner'"]),
        ("mismatch_cap", 0.5, ["learning", "mismatch_cap must be at least 1, not 0.5"]),
        ("mismatch_cap", "high", ["learning.mismatch_cap", "'high'"]),
    ],
)
def test_impossible_old_policy_settings(key: str, value: object, words: list[str]) -> None:
    agents = [{"name": "ada", "model": "bundled:qwen-small-a"}]
    with pytest.raises(ConfigError) as caught:
        build_config({"agents": agents, "output": "runs/x", "learning": {key: value}})
    for word in words:
        assert word in str(caught.value)


def test_old_policy_decides_whether_pi_old_is_recomputed() -> None:
    for exact in (True, False):
        assert LearningSettings().recomputes_old_policy(exact) == (not exact)
        assert LearningSettings(old_policy="learner").recomputes_old_policy(exact)
        assert not LearningSettings(old_policy="sampler").recomputes_old_policy(exact)


def test_number_of_updates() -> None:
    assert LearningSettings(updates_per_source=2).updates(sources=3) == 6
    assert LearningSettings(updates_per_source=2, epochs=3).updates(sources=2) == 12
    assert LearningSettings(updates_per_source=2, epochs=3, updates_per_step=5).updates(sources=2) == 5


def test_fewer_updates_than_epochs_are_refused() -> None:
    with pytest.raises(ValueError, match="updates_per_step=2 must be at least epochs=3"):
        LearningSettings(updates_per_step=2, epochs=3)
