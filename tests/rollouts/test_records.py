"""Every record survives a round trip through bytes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.engines.base import SyncReport
from hacrl.json_values import from_tagged_json, is_plain_json, to_tagged_json
from hacrl.rollouts.records import SCHEMA, RecordError, from_bytes, from_json, to_bytes, to_json
from hacrl.training.metrics import (
    AgentReport,
    LearnReport,
    RetokeniseReport,
    RewardReport,
    RolloutReport,
    SourceReport,
    StepReport,
)
from hacrl.types import LearnerSample, Problem, Rollout, Sampling, Segment, Verdict, VerifiedRollout
from tests.rollouts.strategies import (
    FINITE,
    JSON,
    PROBLEMS,
    TEXT,
    TOKENS,
    VERDICTS,
    actions,
    exact,
    rollouts,
    tuples,
    verified,
)

COUNTS = st.dictionaries(TEXT, st.integers(0, 100), max_size=2)
LEARN_REPORTS = st.builds(
    LearnReport,
    updates=st.integers(0, 9),
    loss=FINITE,
    grad_norm=FINITE,
    skipped=st.integers(0, 9),
    dropped=st.dictionaries(TEXT, COUNTS, max_size=2),
    sampler_gap=st.none() | FINITE,
    sampler_gap_max=st.none() | FINITE,
    sampler_kl=st.none() | FINITE,
    sampler_weight=st.none() | FINITE,
    sampler_capped=st.none() | FINITE,
    sources=st.dictionaries(TEXT, st.builds(SourceReport, st.integers(), *[FINITE] * 6), max_size=2),
    retokenised=st.dictionaries(
        TEXT, st.builds(RetokeniseReport, st.integers(0, 9), FINITE, FINITE), max_size=2
    ),
    left_out=COUNTS,
)
STEP_REPORTS = st.builds(
    StepReport,
    st.integers(1, 9),
    st.dictionaries(
        TEXT,
        st.builds(
            AgentReport,
            FINITE,
            st.integers(0, 9),
            st.builds(
                RolloutReport,
                FINITE,
                COUNTS,
                FINITE,
                FINITE,
                st.integers(0, 9),
                st.dictionaries(
                    TEXT,
                    st.builds(RewardReport, st.none() | FINITE, st.none() | FINITE, st.integers(0, 9)),
                    max_size=2,
                ),
                st.dictionaries(TEXT, FINITE, max_size=2),
            ),
            LEARN_REPORTS,
            st.none() | st.builds(SyncReport, st.integers(0, 9), TEXT, FINITE, st.integers(0, 9)),
        ),
        max_size=2,
    ),
)
SAMPLES = st.builds(
    lambda ids, flags, **rest: LearnerSample(response_ids=ids, loss_mask=tuple(flags[: len(ids)]), **rest),
    tuples(TOKENS),
    st.lists(st.booleans(), min_size=6, max_size=6),
    prompt_ids=tuples(TOKENS),
    behaviour_logprobs=st.none() | tuples(FINITE),
    behaviour_logprob=FINITE,
    source_length=st.integers(0, 9),
    source=TEXT,
    is_own=st.booleans(),
    advantage=FINITE,
)
RECORDS = {
    Problem: PROBLEMS,
    Segment: actions(),
    Rollout: rollouts(),
    Verdict: VERDICTS,
    VerifiedRollout: verified(),
    LearnerSample: SAMPLES,
    Sampling: st.builds(Sampling, st.integers(1, 99), FINITE, st.integers(0, 99), FINITE),
    LearnReport: LEARN_REPORTS,
    StepReport: STEP_REPORTS,
}


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_round_trip_through_bytes(kind, data) -> None:
    record = data.draw(RECORDS[kind])
    assert is_plain_json(to_json(record))
    content = to_bytes(record)
    assert b"\n" not in content
    again = from_bytes(kind, content)
    assert type(again) is kind
    assert exact(again) == exact(record)


def test_non_finite_numbers_are_null_and_read_as_nan() -> None:
    one = Segment("action", "x", (1, 2, 3, 4), (-0.1, math.nan, -math.inf, math.inf))
    assert to_json(one)["token_logprobs"] == [-0.1, None, None, None]
    first, *others = from_bytes(Segment, to_bytes(one)).token_logprobs
    assert first == -0.1
    assert all(map(math.isnan, others))


def test_lone_surrogates_and_large_integers_survive() -> None:
    one = Problem("a\ud800", "\udfff😀", "", fields={"n": 2**90, "😀": [1.5]})
    assert from_bytes(Problem, to_bytes(one)) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": SCHEMA + 1}, f"its schema is {SCHEMA + 1}, this version of hacrl reads schema {SCHEMA}"),
        ({"schema": True}, "its schema is True"),
        ({"label": "fine"}, "Verdict: label: 'fine' is none of 'correct', 'wrong'"),
        ({"reward": "1"}, "Verdict: reward: a number was expected, not '1'"),
        ({"extra": 1}, "Verdict: extra is unknown"),
        ({"reward": ...}, "Verdict: reward is missing"),
    ],
)
def test_other_data_is_refused(change, message: str) -> None:
    import json

    data = {"schema": SCHEMA, **to_json(Verdict(1.0, "correct")), **change}
    content = json.dumps({key: value for key, value in data.items() if value is not ...}).encode()
    with pytest.raises(RecordError, match=message):
        from_bytes(Verdict, content)


def test_a_record_s_own_checks_are_made() -> None:
    with pytest.raises(RecordError, match="an action segment of 1 tokens must have 1 log-prob"):
        from_json(Segment, {"kind": "action", "text": "", "token_ids": [1], "token_logprobs": []})
    with pytest.raises(RecordError, match="token_ids: int was expected, not str"):
        from_json(Segment, {"kind": "action", "text": "", "token_ids": ["1"], "token_logprobs": [0.5]})


@pytest.mark.parametrize("value", [(1, 2), {1, 2}, {1: 2}, math.nan, b"", object()])
def test_fields_of_a_problem_are_plain_json(value) -> None:
    with pytest.raises(ValueError, match="field 'x' must be a plain JSON value"):
        Problem("p", "?", "", fields={"x": [value]})


@given(
    st.recursive(
        JSON | st.floats(),
        lambda inner: (
            tuples(inner) | st.dictionaries(st.integers() | st.just("__python__"), inner, max_size=3)
        ),
        max_leaves=5,
    )
)
def test_python_values_survive_as_tagged_json(value) -> None:
    written = to_tagged_json(value)
    assert is_plain_json(written)
    assert repr(from_tagged_json(written)) == repr(value)


def test_sets_survive_and_other_types_are_refused() -> None:
    value = {"a": {1, 2}, "b": frozenset("x"), "c": (1, [2, (3,)])}
    assert from_tagged_json(to_tagged_json(value)) == value
    with pytest.raises(TypeError, match=r"builtins.bytes cannot be written as JSON"):
        to_tagged_json([b""])
