"""Train and test share no question, whatever the data set does."""

from __future__ import annotations

import pytest

from hacrl.errors import TaskError
from hacrl.tasks.splits import Candidate, make_splits, question_id, question_key
from hacrl.types import Problem


def asked(*questions: str, answer: str = "1") -> list[Candidate]:
    return [Candidate(text, Problem(question_id(text), text, answer)) for text in questions]


def numbered(count: int) -> list[Candidate]:
    return asked(*(f"question {i}" for i in range(count)))


def ids(problems) -> list[str]:
    return [one.id for one in problems]


def test_a_question_is_its_text_in_one_unicode_form_with_spaces_collapsed():
    assert (
        question_key("caf\u00e9 \n\t au  lait ") == question_key("cafe\u0301 au lait") == "caf\u00e9 au lait"
    )
    assert question_key("Find X") != question_key("Find x")
    assert question_id("a  b") == question_id("a b") != question_id("ab")


def test_test_questions_are_taken_out_of_train():
    splits = make_splits(asked("a", "b  c", "d", "e"), asked("b c", "e\n", "z"))
    assert sorted(one.prompt for one in splits.train) == ["a", "d"]
    assert sorted(one.prompt for one in splits.test) == ["b c", "e\n", "z"]
    assert splits.notes == ("2 training questions removed: they are in the test set",)


def test_repeats_are_kept_once_and_conflicting_answers_counted():
    train = [*asked("a", "b", "a ", " b"), *asked("a", answer="2")]
    splits = make_splits(train, asked("z", "z"))
    assert sorted(one.prompt for one in splits.train) == ["a", "b"]  # the first of each
    assert splits.notes == (
        "3 repeated training questions left out, 1 of them with another answer than the one kept",
        "1 repeated test question left out",
    )


def test_demonstrated_questions_are_in_no_split():
    splits = make_splits(asked("a", "b"), asked("c", "d"), shown=["b", " c"])
    assert (ids(splits.train), ids(splits.test)) == (ids_of("a"), ids_of("d"))
    assert splits.notes == (
        "1 training question removed: it is among the demonstrations",
        "1 test question removed: it is among the demonstrations",
    )


def ids_of(*questions: str) -> list[str]:
    return [question_id(text) for text in questions]


def test_a_share_is_held_out_by_hash():
    splits = make_splits(numbered(2000), None, test_share=0.25)
    # 500 expected; the standard deviation is sqrt(2000 * .25 * .75) = 19.4
    assert 430 < len(splits.test) < 570
    assert len(splits.train) + len(splits.test) == 2000
    assert not set(ids(splits.train)) & set(ids(splits.test))
    # A question's split depends on itself alone: not on the others, nor on their order.
    fewer = make_splits(numbered(2000)[999::-1], None, test_share=0.25)
    assert set(ids(fewer.test)) == set(ids(splits.test)) & set(
        ids_of(*(f"question {i}" for i in range(1000)))
    )


def test_the_order_is_fixed_shuffled_and_blind_to_the_split():
    splits = make_splits(numbered(2000), None, test_share=0.25)
    again = make_splits(numbered(2000)[::-1], None, test_share=0.25)
    assert (ids(splits.train), ids(splits.test)) == (ids(again.train), ids(again.test))
    numbers = [int(one.prompt.split()[1]) for one in splits.test]
    assert numbers != sorted(numbers)
    # The first half of the test set must be as spread out as all of it: mean 999.5, and of 250 draws
    # the mean's standard deviation is 577 / sqrt(250) = 36.5
    assert abs(sum(numbers[:250]) / 250 - 999.5) < 4 * 36.5
    # ids are the bits that made the split: if they made the order too, the ids would come sorted
    assert ids(splits.test) != sorted(ids(splits.test))


def test_limit_keeps_a_prefix():
    whole, some = make_splits(numbered(20), asked("z")), make_splits(numbered(20), asked("z"), limit=5)
    assert ids(some.train) == ids(whole.train)[:5]
    assert some.notes == ("5 of 20 training questions are used (limit)",)
    assert make_splits(numbered(5), asked("z"), limit=5).notes == ()


def test_rows_with_one_prompt_and_different_columns_stay_together():
    rows = [
        Candidate("q", Problem("q-1", "q", ""), "first"),
        Candidate("q", Problem("q-2", "q", ""), "second"),
        Candidate("q", Problem("q-2", "q", ""), "second"),
        *asked("r"),
    ]
    splits = make_splits(rows, asked("z"))
    assert sorted(ids(splits.train)) == sorted(["q-1", "q-2", *ids_of("r")])
    assert splits.notes == ("1 repeated training question left out",)
    assert [one.prompt for one in make_splits(rows, asked("q ")).train] == ["r"]


def test_empty_splits_are_refused():
    with pytest.raises(
        TaskError, match=r"^train: no training question is left; 1 training question removed: it is"
    ):
        make_splits(asked("a"), asked("a"))
    with pytest.raises(
        TaskError, match=r"^test_share=0.0001: no question of 3 is held out; give a larger share"
    ):
        make_splits(asked("a", "b", "c"), None, test_share=0.0001)
    assert make_splits(asked("a"), None).test == ()


def test_one_id_for_two_questions():
    twice = [Candidate("a", Problem("7", "a", "1")), Candidate("b", Problem("7", "b", "1"))]
    with pytest.raises(TaskError, match=r"^columns.id: '7' names two questions, 'a' and 'b'"):
        make_splits(twice, None)
    with pytest.raises(TaskError, match=r"^columns.id: '7' names two questions"):
        make_splits(twice[:1], twice[1:])
