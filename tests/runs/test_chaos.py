"""A run that is killed at random moments ends like an undisturbed one (scripts/chaos.py: 50 kills)."""

from __future__ import annotations

import pytest
import torch

from tests.support.chaos import PHASES, chaos_config, differing_files, run_with_kills


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_kills_do_not_change_the_result(tmp_path):
    torch.set_num_threads(1)
    calm, chaos = chaos_config(tmp_path / "calm", 9), chaos_config(tmp_path / "chaos", 9)
    run_with_kills(calm, 0, seed=0)
    lives = run_with_kills(chaos, 10, seed=0)
    assert sum(lives.kills.values()) == 10
    assert set(lives.kills) >= set(PHASES[1:])
    assert differing_files(tmp_path / "calm", tmp_path / "chaos") == []
