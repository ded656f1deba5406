from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import datasets
import pandas
import pytest

from hacrl.errors import CheckpointError
from hacrl.rollouts.log import RolloutLog
from hacrl.types import Problem, Rollout, Segment, Turn, Verdict, VerifiedRollout

PROBLEMS = [
    Problem("p1", "1+1:", "2", context=(Turn("system", "Be brief."),)),
    Problem("p\ud83d2", "say \u202e\ud83d", "3"),  # half of a UTF-16 pair, and a mark that turns text around
]


def rollouts() -> list[VerifiedRollout]:
    # 0.1 + 0.2 and the smallest float show that numbers come back to the last bit
    values = [(-0.1 - 0.2, -5e-324), (-1e300, -1 / 3), (-0.0, -math.pi)]
    made = []
    for number, (problem, logprobs) in enumerate(zip([PROBLEMS[0], *PROBLEMS], values, strict=True)):
        rollout = Rollout.single_turn(
            problem,
            "small",
            f"4 \x1b[2J {number}",
            (5, 2**31 + number),
            logprobs,
            "stop",
            3,
            tokenizer="abc",
            prompt_ids=(7, 8, 9),
        )
        made.append(VerifiedRollout(rollout, Verdict(0.1 * number, "wrong")))
    return made


@pytest.fixture
def log(tmp_path: Path) -> RolloutLog:
    log = RolloutLog(tmp_path / "run" / "rollouts")
    log.append(4, "small", rollouts())
    return log


def test_rollouts_come_back_to_the_last_bit(log: RolloutLog):
    assert log.has(4, "small")
    assert not log.has(4, "large")
    assert log.load(4, "small", PROBLEMS) == rollouts()


def test_a_row_has_prompt_and_gold_answer(log: RolloutLog):
    first, second, third = log.read(step=4)
    assert (first["prompt"], first["answer"], first["prompt_ids"]) == ("1+1:", "2", [7, 8, 9])
    assert first["context"] == [{"role": "system", "content": "Be brief."}]
    assert "context" not in third
    assert [row["sample"] for row in (first, second, third)] == [0, 1, 0]
    assert first["tokens"] == 2
    assert first["tokenizer"] == "abc"
    assert [segment["kind"] for segment in first["segments"]] == ["action"]


def test_log_probabilities_that_are_not_finite_come_back_as_nan(log: RolloutLog):
    one = rollouts()[0]
    log.append(
        5,
        "small",
        [
            replace(
                one,
                rollout=replace(
                    one.rollout,
                    segments=(replace(one.rollout.segments[0], token_logprobs=(-1.5, -math.inf)),),
                ),
            )
        ],
    )
    (loaded,) = log.load(5, "small", PROBLEMS)
    assert loaded.rollout.token_logprobs[0] == -1.5
    assert math.isnan(loaded.rollout.token_logprobs[1])
    assert "Infinity" not in (log.folder / "step-000005" / "small.jsonl").read_text()


def test_observations_are_kept_between_actions(log: RolloutLog):
    segments = (
        Segment("action", "look", (4, 5), (-0.25, -0.5)),
        Segment("observation", "a door", (6, 7, 8)),
        Segment("action", "open", (9, 1), (-0.125, -1.0)),
    )
    one = rollouts()[0]
    log.append(5, "small", [replace(one, rollout=replace(one.rollout, segments=segments))])
    (row,) = log.read(step=5)
    assert [part["kind"] for part in row["segments"]] == ["action", "observation", "action"]
    assert row["tokens"] == 4  # of actions
    assert row["logprob"] == -1.875
    assert log.load(5, "small", PROBLEMS)[0].rollout.segments == segments


def test_pandas_and_datasets_read_the_log(tmp_path: Path):
    log = RolloutLog(tmp_path / "rollouts")
    log.append(1, "small", rollouts()[:2])
    log.append(2, "small", rollouts()[:1])
    path = tmp_path / "rollouts" / "step-000001" / "small.jsonl"
    table = pandas.read_json(path, lines=True)
    assert table["reward"].tolist() == [0.0, 0.1]
    rows = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "rollouts" / "*" / "*.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert sorted(rows["step"]) == [1, 1, 2]


def test_a_file_that_was_being_written_does_not_count(log: RolloutLog):
    (log.folder / "step-000006").mkdir()
    (log.folder / "step-000006" / ".small.jsonl.unfinished").write_text('{"schema": 1, "st')
    assert not log.has(6, "small")
    assert list(log.read(step=6)) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"schema": 1, "st', "line 1, is damaged"), ('{"schema": 99}', "another schema than 1")],
)
def test_a_damaged_file_is_named(log: RolloutLog, content: str, message: str):
    path = log.folder / "step-000004" / "small.jsonl"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        log.load(4, "small", PROBLEMS)
    assert str(path) in str(raised.value)


def test_rollouts_of_other_problems_are_refused(log: RolloutLog):
    with pytest.raises(CheckpointError, match="does not fit this run"):
        log.load(4, "small", PROBLEMS[1:])


def test_an_unwritable_folder_is_an_error(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="hacrl resume"):
        RolloutLog(tmp_path / "run" / "rollouts").append(1, "small", rollouts())


@pytest.mark.parametrize(
    ("keep", "resumable_from", "left"),
    [
        ("all", None, [1, 2, 3, 4, 5]),
        (2, None, [4, 5]),
        (2, 1, [2, 3, 4, 5]),  # a resumed run reads steps 2 to 5
        (9, None, [1, 2, 3, 4, 5]),
        ("none", 4, [5]),
        ("none", None, []),
    ],
)
def test_retention(tmp_path: Path, keep, resumable_from, left):
    log = RolloutLog(tmp_path / "rollouts")
    for step in range(1, 6):
        log.append(step, "small", rollouts()[:1])
    log.prune(keep, steps_done=5, resumable_from=resumable_from)
    assert log.steps() == left


def test_no_character_disturbs_a_terminal(log: RolloutLog):
    lines = (log.folder / "step-000004" / "small.jsonl").read_text("utf-8").splitlines()
    assert all(line.isprintable() for line in lines)
    assert json.loads(lines[2])["prompt"] == "say \u202e\ud83d"


def test_policy_versions_are_in_the_log_only_where_there_are_several(tmp_path: Path):
    log = RolloutLog(tmp_path / "rollouts")
    plain, *_ = rollouts()
    spans = ((3, 1), (4, 1))
    (segment,) = plain.rollout.segments
    updated = replace(plain, rollout=replace(plain.rollout, segments=(replace(segment, versions=spans),)))
    log.append(1, "small", [plain, updated])
    first, second = log.read(1)
    assert list(first["segments"][0]) == ["kind", "text", "token_ids", "token_logprobs"]
    assert second["segments"][0]["versions"] == [[3, 1], [4, 1]]
    loaded = log.load(1, "small", PROBLEMS)
    assert loaded == [plain, updated]
    assert [one.rollout.versions for one in loaded] == [((3, 2),), spans]
    assert [one.rollout.newest_version for one in loaded] == [3, 4]


def test_policy_versions_must_cover_the_sampled_tokens():
    with pytest.raises(ValueError, match="must cover its 2 sampled tokens, not"):
        Segment("action", "74", (5, 6), (-0.1, -0.2), ((3, 1),))
    with pytest.raises(ValueError, match="must cover its 0 sampled tokens, not"):
        Segment("observation", "74", (5, 6), (), ((3, 2),))


def test_versions_of_several_segments():
    """Actions of 2 and 3 tokens with an observation between them; version 4 begins in the second action."""
    segments = (
        Segment("action", "ab", (5, 6), (-0.1, -0.2)),
        Segment("observation", "c", (7,)),
        Segment("action", "def", (5, 6, 7), (-0.1, -0.2, -0.3), ((3, 1), (4, 2))),
    )
    rollout = Rollout(PROBLEMS[0], "small", segments, "length", 3, "abc")
    assert rollout.versions == ((3, 3), (4, 2))
    assert (rollout.oldest_version, rollout.newest_version) == (3, 4)
