"""rollout.stop in whole runs: what is verified, learnt, evaluated, resumed and logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from hacrl.config.schema import RolloutSettings
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun
from hacrl.types import Sampling
from tests.training.runs import Runs
from tests.training.test_interruptions import Events

STOP = ["7", "="]  # half of all tokens of "pair" end in a digit, many of them with more before it
LONG = {"max_new_tokens": 12, "stop": tuple(STOP)}


def test_every_response_ends_where_its_text_has_a_stop_string(runs: Runs) -> None:
    run = runs("char", "pair", steps=1, rollout=LONG)
    for name in ("char", "pair"):
        responses = [one.rollout for one in run.watcher.rollouts[1, name]]
        ended = [one for one in responses if one.finish_reason == "stop_string"]
        assert len(ended) > 3
        for one in responses:
            stop_text = one.segments[0].stop_text
            assert not any(string in one.text for string in STOP)
            assert (one in ended) == bool(stop_text)
            assert one not in ended or any(stop_text.startswith(string) for string in STOP)
        # the task asks for a seven, and no verifier sees one that ends the response
        assert {one.reward for one in run.watcher.rollouts[1, name]} == {0.0}
        (metrics,) = run.of(name)
        length = [one.finish_reason for one in responses].count("length")
        assert metrics["rollout"]["stopped"] == pytest.approx(1 - length / 16)


def test_learners_of_any_tokenizer_learn_to_write_the_stop_string(runs: Runs) -> None:
    run = runs("char", "pair", steps=1, rollout={**LONG, "stop": ("3",)})
    log = RolloutLog(run.result.folder / "rollouts")
    rows = {(row["agent"], row["problem"], row["sample"]): row for row in log.read(1)}
    texts = []
    for learnt in log.read_learnt(1):
        row = rows[learnt["agent"], learnt["problem"], learnt["sample"]]
        is_cross = (learnt["learner"], learnt["agent"]) == ("char", "pair")
        if is_cross and row["finish_reason"] == "stop_string" and learnt["token_ids"] is not None:
            texts.append(row["text"] + row["segments"][0]["stop_text"])
            assert len(learnt["token_ids"]) == len(texts[-1])  # of one character each, and no stop token (1)
            assert 1 not in learnt["token_ids"]
    assert any(not text.endswith("3") for text in texts)  # a pair of digits, the stop string in front


def test_masking_of_truncated_responses_keeps_those_that_a_string_ended(runs: Runs) -> None:
    run = runs("char", steps=1, rollout=LONG, learning={"mask_truncated": True})
    reasons = [one.rollout.finish_reason for one in run.watcher.rollouts[1, "char"]]
    (metrics,) = run.of("char")
    assert 0 < reasons.count("length") < 16
    assert metrics["learning"]["dropped"] == {"char": {"truncated": reasons.count("length")}}


@pytest.mark.parametrize("at", [("verify", "pair"), ("learn", "char")])
def test_a_run_that_was_interrupted_is_resumed_exactly(runs: Runs, at: tuple[str, str]) -> None:
    rollout = {**LONG, "stop": ("=", "3")}
    whole = runs("char", "pair", steps=2, rollout=rollout)
    config = runs.config("char", "pair", steps=2, rollout=rollout)
    events = Events(at)
    with LocalRun(config, [events]) as run:
        events.run = run
        run.train()
        assert run.is_interrupted
        run.save()
    found = inspect_run(Path(config.output))
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
    assert (run.result.folder / "metrics.jsonl").read_text() == whole.metrics_text
    logs = [
        list(RolloutLog(folder / "rollouts").read()) for folder in (whole.result.folder, run.result.folder)
    ]
    assert logs[0] == logs[1]
    assert "stop_string" in {row["finish_reason"] for row in logs[0]}


def test_evaluation_has_the_same_stop_strings(runs: Runs) -> None:
    config = runs.config("char", steps=0, rollout=LONG, evaluation={"problems": 4, "max_new_tokens": 9})
    assert config.evaluation.sampling(config.rollout.sampling) == Sampling(9, 1.0, stop=("7", "="))
    with LocalRun(config) as run:
        accuracy = run.trainer.evaluate(0)["char"]
    assert accuracy.mean == 0.0  # every seven ends its response, and is not part of its text


def test_one_string_is_a_list_of_one() -> None:
    assert RolloutSettings(stop="#").sampling.stop == RolloutSettings(stop=("#",)).sampling.stop == ("#",)
    assert RolloutSettings().sampling.stop == ()


@pytest.mark.parametrize(
    ("stop", "message"), [("", "empty text"), (("a", ""), "empty text"), ("\ud800", "half")]
)
def test_strings_that_would_end_every_response_or_none_are_refused(stop, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSettings(stop=stop)
