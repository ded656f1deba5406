"""Learning settings that cannot work name their key and value."""

from __future__ import annotations

import pytest

from hacrl.learning.settings import LearningSettings


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("updates_per_source", 0, "at least 1"),
        ("epochs", 0, "at least 1"),
        ("micro_batch_tokens", 0, "at least 1"),
        ("lr", 0.0, "positive"),
        ("lr", -1e-6, "positive"),
        ("max_grad_norm", 0.0, "positive"),
        ("beta1", 1.0, r"in \[0, 1\)"),
        ("beta2", -0.1, r"in \[0, 1\)"),
        ("weight_decay", -0.1, "not be negative"),
    ],
)
def test_impossible_values(key: str, value: float, says: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must .*{says}.* not {value}"):
        LearningSettings(**{key: value})


def test_number_of_updates() -> None:
    assert LearningSettings(updates_per_source=2).updates(sources=3) == 6
    assert LearningSettings(updates_per_source=2, epochs=3).updates(sources=2) == 12
    assert LearningSettings(updates_per_source=2, epochs=3, updates_per_step=5).updates(sources=2) == 5


def test_a_pass_without_an_update_is_refused() -> None:
    with pytest.raises(ValueError, match="updates_per_step=2 must be at least epochs=3"):
        LearningSettings(updates_per_step=2, epochs=3)
