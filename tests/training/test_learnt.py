"""What a learner made of each rollout: fates and numbers by hand, and the records of whole runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from hacrl.config.schema import HacpoSettings
from hacrl.rollouts.log import RolloutLog
from hacrl.rollouts.records import from_json
from hacrl.training.learnt import learnt_rollouts
from hacrl.training.samples import LearnerSamples
from hacrl.types import LearnerSample, LearntRollout
from tests.support.forward import plain_logprobs
from tests.training.handmade import PROMPTS, RESPONSES, SAMPLING, sample
from tests.training.runs import GSPO, HACPO, Runs
from tests.training.test_learner import fresh, learner

TOKENISED = ("used", "clipped_below", "clipped_above", "no_signal")


def learnt(agent, samples: list[LearnerSample], updates: int = 1, **settings) -> dict[int, LearntRollout]:
    numbered = [replace(one, problem="p", index=i) for i, one in enumerate(samples)]
    stats = learner(agent, **settings).learn(numbered, updates, seed=0)
    records = learnt_rollouts(agent.name, stats, LearnerSamples(numbered))
    return {record.sample: record for record in records}


def test_own_rollouts_by_hand() -> None:
    agent = fresh()
    samples = [
        sample(agent, 0, ratio=1.0, advantage=1.0),
        sample(agent, 1, ratio=1.3, advantage=2.0),  # above 1.2, advantage > 0
        sample(agent, 2, ratio=0.7, advantage=-1.0),  # below 0.9, advantage < 0
        sample(agent, 3, ratio=1.05, advantage=-1.5),
        sample(agent, 4, ratio=1.0, advantage=0.0),
    ]
    found = learnt(agent, samples, micro_batch_tokens=20)
    assert [found[i].fate for i in range(5)] == [
        "used",
        "clipped_above",
        "clipped_below",
        "used",
        "no_signal",
    ]
    assert [found[i].ratio for i in range(4)] == pytest.approx([1.0, 1.3, 0.7, 1.05], abs=1e-5)
    # L = - 1/5 sum s A, and ds/dlog pi_t = s/|y| for each of |y| tokens: s |A| / 5 in all, 0 if clipped
    assert [found[i].weight for i in range(4)] == pytest.approx([0.2, 0.0, 0.0, 1.575 / 5], abs=1e-5)
    assert [found[i].clipped for i in range(4)] == [0.0, 1.0, 1.0, 0.0]
    assert (found[4].ratio, found[4].weight, found[4].token_logprobs) == (None, None, None)
    assert [found[i].advantage for i in range(5)] == [1.0, 2.0, -1.0, -1.5, 0.0]


def test_rollouts_of_another_agent_by_hand() -> None:
    agent = fresh()
    method = HacpoSettings(alpha=1.0, delta=0.5, delta_step=0.0, cross_upper=1.0)
    samples = [
        sample(agent, 0, ratio=0.9, advantage=2.0, own=False, retokenised=True),
        sample(agent, 1, ratio=0.4, advantage=2.0, own=False),  # below 1 - 0.5
        sample(agent, 2, ratio=1.1, advantage=-1.0, own=False),  # above 1, whatever the advantage
    ]
    found = learnt(agent, samples, method=method)
    assert [found[i].fate for i in range(3)] == ["used", "clipped_below", "clipped_above"]
    # L = - 1/3 sum s stopgrad(s)^1 A: s^2 |A| / 3 = 0.81 * 2 / 3
    assert [found[i].weight for i in range(3)] == pytest.approx([0.54, 0.0, 0.0], abs=1e-5)
    assert [found[i].token_ids for i in range(3)] == [RESPONSES[0], None, None]  # retokenised ones only


def test_log_probabilities_are_those_of_the_first_use() -> None:
    agent = fresh()
    before = plain_logprobs(agent.model, PROMPTS[0], RESPONSES[0], SAMPLING).tolist()
    one = sample(agent, 0, ratio=1.0, advantage=1.0)
    found = learnt(agent, [one, one], updates=4, epochs=2)[0]
    after = plain_logprobs(agent.model, PROMPTS[0], RESPONSES[0], SAMPLING).tolist()
    assert found.token_logprobs == pytest.approx(before, abs=6e-5)  # rounded to 4 decimals
    assert found.token_logprobs != pytest.approx(after, abs=1e-3)
    assert all(round(value, 4) == value for value in found.token_logprobs or ())


def test_rollouts_of_an_update_that_was_left_out() -> None:
    agent = fresh()
    found = learnt(agent, [sample(agent, 0, ratio=1.0, advantage=float("nan"))])
    assert (found[0].fate, found[0].ratio) == ("bad_update", None)


def test_a_run_keeps_a_record_of_each_rollout_for_each_learner(runs: Runs) -> None:
    run = runs("char", "twin", "pair", steps=2, learning={"max_cross_rollouts": 6})
    log = RolloutLog(run.result.folder / "rollouts")
    for step, metrics in enumerate(run.steps, start=1):
        sampled = {(row["agent"], row["problem"], row["sample"]) for row in log.read(step)}
        rows = list(log.read_learnt(step))
        by_learner = Counter(row["learner"] for row in rows)
        assert by_learner == dict.fromkeys(("char", "twin", "pair"), len(sampled))
        assert {(row["agent"], row["problem"], row["sample"]) for row in rows} == sampled
        for name, agent in metrics.items():
            mine = [row for row in rows if row["learner"] == name]
            fates = Counter(row["fate"] for row in mine)
            assert fates["over_limit"] == sum(agent["learning"]["left_out"].values()) > 0
            assert fates["no_signal"] == agent["learning"]["skipped"]
            dropped = sum(sum(reasons.values()) for reasons in agent["learning"]["dropped"].values())
            assert fates["not_representable"] + fates["too_long"] == dropped
            for source, numbers in agent["learning"]["sources"].items():
                used = [row for row in mine if row["agent"] == source and row["ratio"] is not None]
                assert len(used) == numbers["used"]
                ratios = [row["ratio"] for row in used]
                assert sum(ratios) / len(ratios) == pytest.approx(numbers["ratio_mean"])
                weight = sum(row["weight"] for row in mine if row["weight"] is not None)
                assert sum(row["weight"] for row in used) / weight == pytest.approx(numbers["gradient"])
            assert sum(numbers["gradient"] for numbers in agent["learning"]["sources"].values()) == (
                pytest.approx(1.0)
            )


def test_records_come_back_from_the_log(runs: Runs) -> None:
    run = runs("char", "pair", steps=1, method=HACPO)
    for row in RolloutLog(run.result.folder / "rollouts").read_learnt(1):
        step = {key: row.pop(key) for key in ("schema", "step")}
        assert step == {"schema": 1, "step": 1}
        record = from_json(LearntRollout, row)
        is_retokenised = record.learner != record.agent and record.fate in TOKENISED
        assert (record.token_ids is not None) == is_retokenised


def test_an_agent_alone_has_records_of_its_own_rollouts_only(runs: Runs) -> None:
    run = runs("char", "twin", steps=1, method=GSPO)
    rows = list(RolloutLog(run.result.folder / "rollouts").read_learnt(1))
    assert len(rows) == 2 * 16
    assert all(row["learner"] == row["agent"] for row in rows)
    assert json.loads(run.metrics_text)["agents"]["char"]["learning"].keys().isdisjoint({"learnt", "notes"})
