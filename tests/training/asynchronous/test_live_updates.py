"""Weights that change in mid-generation: which policy sampled which token, and what is learnt from it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hacrl.engines.hf.live_update import LiveUpdate
from hacrl.runs.run import LocalRun
from tests.training.asynchronous.orders import asynchronous, lines, logged
from tests.training.asynchronous.test_runs import check_all_learnt_once, check_staleness
from tests.training.runs import Runs

SECONDS = 60.0


def test_a_batch_whose_weights_change_after_two_tokens(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch 2 is sampled while step 1 is learnt: two tokens by version 0, the others by version 4."""
    end_of_token = LiveUpdate.end_of_token
    tokens: dict[str, int] = {}  # of the generation under way, by engine
    announced = threading.Event()
    is_announced = LiveUpdate.is_announced.fget
    assert is_announced is not None

    def waiting(self: Any) -> None:
        name = self._name
        tokens[name] = tokens.get(name, 0) + 1
        if self.version == 0 and name in second and tokens[name] == 2:
            for _ in range(int(SECONDS * 1000)):
                if is_announced(self):
                    break
                announced.wait(0.001)
            assert is_announced(self), "the learner never published"
        end_of_token(self)

    generation = LiveUpdate.generation
    second: set[str] = set()  # engines that are at their second batch
    begun: dict[str, int] = {}

    def counting(self: Any) -> Any:
        tokens[self._name] = 0
        begun[self._name] = begun.get(self._name, 0) + 1
        if begun[self._name] == 2:
            second.add(self._name)
        return generation(self)

    monkeypatch.setattr(LiveUpdate, "end_of_token", waiting)
    monkeypatch.setattr(LiveUpdate, "generation", counting)
    config = asynchronous(runs, "char", "pair", steps=3)
    with LocalRun(config) as run:
        run.train()
        run.save()
    check_all_learnt_once(config)
    check_staleness(config)
    (_, report, _) = lines(config.output, "metrics.jsonl")
    for agent in ("char", "pair"):
        long = [row for row in logged(config, 2, agent) if row["tokens"] > 2]
        assert long
        for row in long:
            (segment,) = row["segments"]
            assert segment["versions"] == [[0, 2], [4, row["tokens"] - 2]]
        rows = logged(config, 2, agent)
        old = sum(min(2, row["tokens"]) for row in rows)
        total = sum(row["tokens"] for row in rows)
        found = report["agents"][agent]["asynchronous"]
        # learnt in step 2: tokens of version 0 are one step old, those of version 4 are fresh
        assert found["staleness"][agent]["steps_mean"] == pytest.approx(old / total)
        assert found["staleness"][agent]["versions_mean"] == pytest.approx(4 * old / total)
        assert found["mixed"] == len(long) / len(rows)
