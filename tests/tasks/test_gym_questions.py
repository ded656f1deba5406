"""What the worker processes of ``gym:NAME`` do, without the processes: questions, refusals, strict scores."""

from __future__ import annotations

import json

import pytest

from hacrl.json_values import from_tagged_json, is_plain_json
from hacrl.tasks.gym.questions import answer_request
from hacrl.tasks.gym.worker import _label
from hacrl.tasks.splits import question_key

reasoning_gym = pytest.importorskip("reasoning_gym")
SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # a + b and a - b
KINDS = [
    "chain_sum",
    "basic_arithmetic",
    "gcd",
    "spell_backward",
    "letter_counting",
    "mini_sudoku",
    "countdown",
]


def asked(kind: str = "chain_sum", count: int = 6, **request) -> dict:
    given = {"kind": kind, "count": count, "config": {}, "seed": 0, "avoid": [], "answer": "boxed", **request}
    return answer_request(given)


def keys(reply: dict) -> list[str]:
    return [question_key(one["question"]) for one in reply["questions"]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_answer_is_correct_and_more_than_it_is_wrong(kind: str):
    dataset = reasoning_gym.create_dataset(kind, size=1, seed=0)
    for one in asked(kind)["questions"]:
        assert _label(dataset, one["answer"], one["entry"]) == "correct"
        # reasoning-gym itself gives most kinds part of a point for this
        assert _label(dataset, f"perhaps {one['answer']}", one["entry"]) == "wrong"
        assert _label(dataset, "", one["entry"]) == "wrong"


@pytest.mark.parametrize(
    "kind", ["graph_color", "knights_knaves", "rubiks_cube", "mini_sudoku", "zebra_puzzles"]
)
def test_entries_are_plain_json_and_come_back_exactly(kind: str):
    reply = asked(kind, count=3)
    made = {entry["question"]: entry for entry in reasoning_gym.create_dataset(kind, size=3, seed=0)}
    for one in reply["questions"]:
        assert is_plain_json(one["entry"])
        assert from_tagged_json(json.loads(json.dumps(one["entry"]))) == made[one["question"]]


def test_part_of_a_point_is_wrong():
    dataset = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)
    one = asked()["questions"][0]
    padded = f"{one['answer']} or so"
    assert 0 < dataset.score_answer(padded, {"answer": one["answer"]}) < 1
    assert _label(dataset, padded, one["entry"]) == "wrong"


def test_a_scorer_that_raises_is_a_crash():
    dataset = reasoning_gym.create_dataset("prime_factorization", size=1, seed=0)
    entry = asked("prime_factorization")["questions"][0]["entry"]
    assert _label(dataset, "x", entry) == "crash"  # int("x") there


def test_a_kind_with_few_questions_is_exhausted_exactly():
    # Two numbers of one digit (0 to 9) and two operators: 10 * 10 * 2 = 200 questions.
    reply = asked(count=200, config=SMALL)
    assert len(set(keys(reply))) == 200
    assert reply["draws"] > 200
    message = asked(count=201, config=SMALL)["error"]
    assert message.startswith(f"size: gym:chain_sum has only 200 different questions with config {SMALL} (")
    assert message.endswith("but size, test_size and demonstrations need 201; lower them or widen config")


def test_avoided_questions_are_not_drawn():
    shown = asked(count=200, config=SMALL)["questions"][7]["question"]
    reply = asked(count=199, config=SMALL, avoid=[f" {shown}"])
    assert question_key(shown) not in keys(reply)
    assert "has only 199 different" in asked(count=200, config=SMALL, avoid=[shown])["error"]


def test_a_seed_gives_other_questions_and_the_same_seed_the_same():
    replies = [asked(count=40, seed=seed) for seed in (3, 3, 4000)]
    assert replies[0] == replies[1]
    assert len(set(keys(replies[0])) & set(keys(replies[2]))) < 5


def test_the_order_is_not_that_of_the_generator():
    drawn = reasoning_gym.create_dataset("gcd", size=60, seed=0)
    generated = [question_key(drawn[i]["question"]) for i in range(60)]
    reply = keys(asked("gcd", count=60))
    assert sorted(reply) == sorted(generated)
    places = [generated.index(key) for key in reply]
    # A fair shuffle has a mean displacement of about 60 / 3 = 20; the generator's own order has 0.
    assert sum(abs(place - i) for i, place in enumerate(places)) / 60 > 10


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"kind": "chain_som"}, "task.name: reasoning-gym has no 'chain_som'; did you mean 'chain_sum'"),
        ({"kind": ""}, "task.name: reasoning-gym has no ''; it has ab, acre, advanced_geometry, "),
        (
            {"config": {"min_term": 2}},
            "config.min_term: unknown setting of gym:chain_sum; did you mean 'min_terms'?",
        ),
        (
            {"config": {"zzz": 2}},
            "config.zzz: unknown setting of gym:chain_sum; it takes min_terms, max_terms, ",
        ),
        ({"config": {"size": 2}}, "config.size: give size next to config, not inside it"),
        ({"config": {"min_terms": 9, "max_terms": 2}}, "config: gym:chain_sum refuses {'min_terms': 9, "),
        ({"kind": "mini_sudoku", "answer": "last_line"}, "answer='last_line': the correct answer "),
    ],
)
def test_invalid_requests_are_refused(request_, expected: str):
    assert asked(**request_)["error"].startswith(expected)


def test_kinds_that_name_no_answer():
    assert [one["answer"] for one in asked("graph_color", count=2)["questions"]] == [None, None]
