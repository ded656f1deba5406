"""orjson writes the lines of learner records: the same bytes as the writer of all other rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from hacrl.rollouts.log import SCHEMA, RolloutLog, _encode, _encode_learnt
from hacrl.rollouts.records import to_json
from hacrl.types import LearntRollout

RECORDS = [
    LearntRollout("ada", "bob", "p1", 0, "used", 0.5, 1.25, 0.0, 1e-9, (1, 2**31), (-0.25, 0.0)),
    LearntRollout("ada", "bob", "p1", 1, "too_long", -0.0),
    LearntRollout("ada", "bob", "p2", 0, "bad_update", math.inf, math.nan, 0.5, 2.0, None, (-math.inf,)),
    LearntRollout("ada", 'b"\\b', "\u202e\x1b[2J ünï 数", 0, "empty", 0.1),
    LearntRollout("ada", "bob", "half \ud83d", 0, "empty", 0.1),
]


def test_lines_are_those_of_the_common_writer() -> None:
    for record in (*RECORDS, replace(RECORDS[0], late_from=5), replace(RECORDS[0], loss_mask=(True, False))):
        row = {"schema": SCHEMA, "step": 7, **to_json(record)}
        for key in ("loss_mask", "late_from"):  # only in the lines of episodes, and of late rollouts
            if getattr(record, key) is None:
                del row[key]
        assert _encode_learnt(7, record) == _encode(row)


def test_records_come_back(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path)
    log.append_learnt(7, "ada", RECORDS)
    rows = list(log.read_learnt(7))
    assert [(row["step"], row["learner"], row["problem"]) for row in rows] == [
        (7, "ada", record.problem) for record in RECORDS
    ]
    assert (rows[0]["token_ids"], rows[0]["token_logprobs"]) == ([1, 2**31], [-0.25, 0.0])
    assert (rows[2]["advantage"], rows[2]["ratio"], rows[2]["token_logprobs"]) == (None, None, [None])
