"""The rules for sharing in whole runs of agents with two tokenizers: who learns from whom, and how much."""

from __future__ import annotations

import pytest

from hacrl.config.schema import (
    FtisSettings,
    S2lpoSettings,
    SapoSettings,
    SuccessGatedSettings,
    XgrpoSettings,
)
from tests.training.runs import Run, Runs, assert_moved

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def uses(run: Run, agent: str) -> list[dict[str, int]]:
    """Return how often responses of each source were in updates, step by step."""
    return [
        {source: used["used"] for source, used in step["learning"]["sources"].items()}
        for step in run.of(agent)
    ]


@pytest.mark.parametrize(
    ("method", "group", "updates", "shares"),
    [
        (FtisSettings(**CLIP), 8, 4, True),
        (SapoSettings(**CLIP), 8, 4, True),
        (SuccessGatedSettings(**CLIP), 2, 2, True),  # small groups: some have no success
        (XgrpoSettings(**CLIP), 8, 2, False),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_all_agents_learn(runs: Runs, method, group: int, updates: int, shares: bool) -> None:
    run = runs("char", "pair", method=method, rollout={"rollouts_per_prompt": group})
    for agent in ("char", "pair"):
        assert_moved(run.weights(agent), runs.initial_weights(agent))
        assert [step["learning"]["updates"] for step in run.of(agent)] == [updates] * 3
        assert all(step["learning"]["bad_updates"] == 0 for step in run.of(agent))
    assert any("pair" in step for step in uses(run, "char")) == shares


def test_an_explorer_gives_way_to_the_learner_and_keeps_its_weights(runs: Runs) -> None:
    method = S2lpoSettings(explorer="pair", anneal=1.0, **CLIP)
    run = runs("char", "pair", method=method, steps=4)
    assert_moved(run.weights("char"), runs.initial_weights("char"))
    assert not (run.result.folder / "agents" / "pair").exists()  # it is frozen: there is nothing to save
    assert [step["learning"]["updates"] for step in run.of("pair")] == [0] * 4
    # of 4 responses to each of 4 prompts, after 0, 1/4, 1/2 and 3/4 of the steps: 4, 3, 2 and 1 are pair's
    for step, count in zip(run.of("char"), (16, 12, 8, 4), strict=True):
        learning = step["learning"]
        assert learning["sources"].get("pair", {"used": 0})["used"] <= count
        assert learning["sources"].get("char", {"used": 0})["used"] <= 16 - count
        dropped = sum(learning["dropped"].get("pair", {}).values())
        used = sum(source["used"] for source in learning["sources"].values())
        assert used + learning["skipped"] + dropped == 16
