"""Rollout settings: the distribution they stand for, and values that cannot work."""

from __future__ import annotations

import pytest

from hacrl.config.schema import RolloutSettings
from hacrl.types import Sampling


def test_sampling_is_what_was_set() -> None:
    settings = RolloutSettings(max_new_tokens=9, temperature=0.7, top_k=3, top_p=0.8)
    assert settings.sampling == Sampling(9, temperature=0.7, top_k=3, top_p=0.8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompts_per_step", 0),
        ("rollouts_per_prompt", 0),
        ("max_new_tokens", 0),
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_impossible_values(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{key} must .* not {value}"):
        RolloutSettings(**{key: value})
