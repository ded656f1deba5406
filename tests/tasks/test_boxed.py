"""Maths from data sets: columns, answers, prompts, presets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hacrl.tasks.splits import question_key
from hacrl.types import Turn
from tests.tasks.helpers import SHARED_DATA, build, needs_shared_data, refusal, rollout_of

SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."
PLAIN = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(1, 41)]
# Rows laid out as on the hub.
MATH_HUB = [
    {
        "problem": "What is $\\frac{1}{4}+\\frac14$?",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": "First \\boxed{0.25}, then $\\boxed{\\frac{1}{2}}$.",
    },
    {"problem": "Two.", "level": "Level ?", "type": "Algebra", "solution": "It is $\\boxed 2$."},
    {"problem": "Set.", "level": "Level 5", "type": "Algebra", "solution": "So \\boxed {\\{1,\\,2\\}}."},
    {"problem": "Nothing.", "level": "Level 2", "type": "Algebra", "solution": "Draw it: $\\boxed{}$"},
]
GSM_HUB = [
    {"question": "Clips?", "answer": "He sold 48/2 = <<48/2=24>>24 clips.\n#### 72"},
    {"question": "Thousands?", "answer": "1,100+100\n#### 1,200 \n"},
    {"question": "Debt?", "answer": "#### -5"},
]
OTHER = [{"problem": "What is 50 + 50?", "answer": "100"}]


def lines_of(path: Path) -> list[str]:
    return path.read_text("utf-8").split("\n")[:-1]  # GSM8K has characters at which splitlines breaks


def answers(problems) -> dict[str, str]:
    return {one.prompt.removesuffix(SUFFIX): one.answer for one in problems}


def test_the_papers_prompt_and_the_columns_usually_called_so():
    task = build("boxed", train=PLAIN, test=OTHER)
    assert answers(task.train) == {row["problem"]: row["answer"] for row in PLAIN}
    assert task.test[0].prompt == "What is 50 + 50?" + SUFFIX
    assert (task.name, task.max_reward, task.notes, task.test[0].context) == ("boxed", 1.0, (), ())


def test_system_prompt_and_demonstrations_are_turns_of_a_chat():
    shown = [{"problem": "What is 3 + 3?", "solution": "It is \\boxed{6}."}]
    task = build(
        "boxed", train=PLAIN, test=OTHER, prompt="Q: {problem} {x}", system="Be brief.", demonstrations=shown
    )
    assert task.test[0].prompt == "Q: What is 50 + 50? {x}"
    assert task.test[0].context == (
        Turn("system", "Be brief."),
        Turn("user", "Q: What is 3 + 3? {x}"),
        Turn("assistant", "It is \\boxed{6}."),
    )
    assert len(task.train) == 39
    assert task.notes == ("1 training question removed: it is among the demonstrations",)


def test_without_a_test_set_a_tenth_is_held_out_unless_said_otherwise():
    task = build("boxed", train=PLAIN)
    assert len(task.train) + len(task.test) == 40
    assert 1 <= len(task.test) <= 10  # 4 expected, standard deviation 1.9
    assert len(build("boxed", train=PLAIN, test_share=0).train) == 40
    assert len(build("boxed", train=PLAIN, test_share=0.5).test) > len(task.test)
    assert len(build("boxed", train=PLAIN, test=OTHER, limit=7).train) == 7


def test_the_kind_of_answer_is_detected():
    task = build("boxed", train=MATH_HUB[:3], test=GSM_HUB)
    assert answers(task.train) == {
        "What is $\\frac{1}{4}+\\frac14$?": "\\frac{1}{2}",
        "Two.": "2",
        "Set.": "\\{1,\\,2\\}",
    }
    assert answers(task.test) == {"Clips?": "72", "Thousands?": "1200", "Debt?": "-5"}


def test_answer_from_sets_the_kind_of_answer():
    rows = [{"problem": "a", "answer": "see \\boxed{1}"}, {"problem": "b", "answer": "2"}]
    message = refusal("boxed", train=rows, test=OTHER)
    assert message == (
        "task.options.train: the rows given: of 2 values in column 'answer', 1 have a \\boxed{} and 0 a "
        "####: say what the column holds with answer_from: column, boxed or hashes"
    )
    some = [{"problem": "a", "answer": "it is so\n#### 5"}, {"problem": "b", "answer": "6"}]
    assert "0 have a \\boxed{} and 1 a ####" in refusal("boxed", train=some, test=OTHER)
    task = build("boxed", train=rows, test=OTHER, answer_from="column")
    assert answers(task.train) == {"a": "see \\boxed{1}", "b": "2"}
    task = build("boxed", train=rows, test_share=0, answer_from="boxed", skip_missing_answers=True)
    assert answers(task.train) == {"a": "1"}
    assert task.notes == ("1 training row left out: it has no answer",)


def test_columns_by_name_nested_and_per_source():
    rows = [
        {"id": 7, "q": "a", "extra": {"gold": [{"v": 18}, {"v": "x"}]}},
        {"id": 8, "q": "b", "extra.gold.0.v": 2.5},
    ]
    columns = {"problem": "q", "answer": "extra.gold.0.v", "id": "id"}
    task = build("boxed", train=rows, test_share=0, columns=columns)
    assert {one.id: one.answer for one in task.train} == {
        "7": "18",
        "8": "2.5",
    }  # numbers as Python writes them


def test_a_source_may_have_column_names_of_its_own(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("Frage,Antwort\nc,9\n")
    test = {"path": str(path), "columns": {"problem": "Frage", "answer": "Antwort"}}
    task = build("boxed", train=PLAIN, test=test, columns={"problem": "problem"})
    assert answers(task.test) == {"c": "9"}
    test["columns"]["anser"] = "x"
    message = refusal("boxed", train=PLAIN, test=test)
    assert message == "task.options.test.columns.anser: unknown; did you mean 'answer'?"


def refuse_rows(*rows, **options) -> str:
    return refusal("boxed", **{"train": list(rows), "test": OTHER, **options})


def test_missing_columns_are_named():
    row = {"problm": "a", "answer": "1", "meta": {"level": 1}}
    assert refuse_rows(row) == (
        "task.options.train: the rows given: has no column 'problem' or 'question'; it has problm, answer, "
        "meta, meta.level; did you mean 'problm'?; name it with columns: {problem: NAME}"
    )
    assert refuse_rows(row, columns={"problem": "problm", "answer": "anser"}) == (
        "task.options.train: the rows given: has no column 'anser' (columns.answer); it has problm, answer, "
        "meta, meta.level; did you mean 'answer'?"
    )
    assert refuse_rows(row, columns={"solution": "x"}).startswith(
        "task.options.columns.solution: unknown; it takes"
    )
    assert (
        refuse_rows(row, columns={"answer": 3})
        == "task.options.columns.answer=3: must be the name of a column"
    )


@pytest.mark.parametrize("empty", [None, "", "  \n", float("nan")])
def test_missing_answers_are_counted_and_the_first_is_named(tmp_path: Path, empty):
    path = tmp_path / "a.jsonl"
    rows = [{"problem": "a", "answer": "1"}, {"problem": "b", "answer": empty}, {"problem": "c"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refusal("boxed", train=str(path), test=OTHER)
    assert message == (
        f"task.options.train: {path}:2: no answer in column 'answer' (2 rows of 3 without); add it, "
        "or skip such rows with skip_missing_answers: true"
    )
    task = build("boxed", train=str(path), test=OTHER, skip_missing_answers=True)
    assert answers(task.train) == {"a": "1"}
    assert task.notes == ("2 training rows left out: they have no answer",)


def test_rows_without_a_problem_or_an_answer_are_refused():
    good = {"problem": "a", "answer": "1"}
    assert refuse_rows(good, {"problem": " ", "answer": "1"}).endswith(
        "row 2: column 'problem' is empty; every row needs a problem"
    )
    assert refuse_rows(good, {"problem": "b", "answer": ["1"]}).endswith(
        "row 2: column 'answer' holds a list, must be text or a number"
    )
    assert refuse_rows(good, {"problem": "b", "answer": True}).endswith(
        "holds a bool, must be text or a number"
    )
    nothing = refuse_rows({"problem": "a", "answer": None}, skip_missing_answers=True)
    assert nothing.endswith("the rows given: no row has an answer in column 'answer'")
    both = [{**good, "id": "x"}, {"problem": "b", "answer": "2", "id": None}]
    assert refuse_rows(*both, columns={"id": "id"}, test=[{**OTHER[0], "id": "z"}]).endswith(
        "row 2: column 'id' is empty; every row needs an id"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"answer_from": "box"}, "answer_from='box': must be one of auto, column, boxed, hashes"),
        ({"prompt": "no place"}, "prompt='no place': must be text that contains {problem}"),
        ({"system": 3}, "system=3: must be text"),
        (
            {"demonstrations": [{"problem": "a"}]},
            "demonstrations: entry 1 must be {problem: TEXT, solution: TEXT}",
        ),
        ({"demonstrations": "a"}, "demonstrations='a': must be a list of"),
        ({"limit": 0}, "limit=0: must be a whole number of at least 1"),
        ({"limit": 2.5}, "limit=2.5: must be a whole number"),
        ({"test_share": 0.5}, "test_share=0.5: there is a test set already; give only one of the two"),
        ({"test": None, "test_share": 1}, "test_share=1: must be at least 0 and less than 1"),
        ({"columns": ["a"]}, "columns=['a']: must map problem or answer or id to the name of a column"),
        ({"trian": "x"}, "trian: unknown option of task 'boxed'; did you mean 'train'?"),
        ({"verifier": 3}, "verifier: must be a mapping of keys to values, not 3"),
        ({"verifier": {"timelimit": 3}}, "verifier.timelimit: unknown key; it takes workers, time_limit"),
        ({"verifier": {"workers": 0}}, "verifier.workers must be at least 1, not 0"),
    ],
)
def test_invalid_options_are_named(options, expected: str):
    assert refusal("boxed", **{"train": PLAIN, "test": OTHER, **options}).startswith(
        f"task.options.{expected}"
    )


def test_train_is_needed():
    assert refusal("boxed") == "task.options.train: missing; task 'boxed' needs it"


def test_presets_read_rows_laid_out_as_on_the_hub():
    task = build("math", train=MATH_HUB, test=[{**MATH_HUB[1], "problem": "Other."}])
    assert task.name == "math"
    assert sorted(answers(task.train).values()) == ["2", "\\frac{1}{2}", "\\{1,\\,2\\}"]
    assert task.notes == ("1 training row left out: it has no answer",)  # \boxed{}, as twice in MATH
    task = build("gsm8k", train=GSM_HUB[:2], test=GSM_HUB[1:])
    assert (answers(task.train), answers(task.test)) == (
        {"Clips?": "72"},
        {"Thousands?": "1200", "Debt?": "-5"},
    )
    assert task.notes == ("1 training question removed: it is in the test set",)


def test_presets_name_the_data_sets_of_the_hub(monkeypatch):
    """What would be downloaded, without downloading it."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, name=None, *, split, revision):
        asked.append((path, name, split, revision))
        rows = MATH_HUB if "MATH" in path else GSM_HUB
        return datasets.Dataset.from_list(rows[:2] if split == "train" else rows[2:3])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    build("math")
    build("gsm8k", test={"path": "openai/gsm8k", "name": "socratic", "revision": "abc"})
    assert asked == [
        ("DigitalLearningGmbH/MATH-lighteval", None, "train", None),
        ("DigitalLearningGmbH/MATH-lighteval", None, "test", None),
        ("openai/gsm8k", "main", "train", None),
        ("openai/gsm8k", "socratic", "test", "abc"),
    ]


@needs_shared_data
def test_the_whole_of_math():
    train, test = SHARED_DATA / "math.train.jsonl", SHARED_DATA / "math.test.jsonl"
    task = build("math", train=str(train), test=str(test))
    # 7,500 rows; two have no answer, one pair and one question of the test set differ in white space alone
    assert (len(task.train), len(task.test)) == (7496, 5000)
    assert task.notes == (
        "2 training rows left out: they have no answer",
        "1 repeated training question left out",
        "1 training question removed: it is in the test set",
    )
    # The same numbers counted another way.
    rows = [json.loads(line) for line in lines_of(train)]
    keys = Counter(" ".join(row["problem"].split()) for row in rows if row["answer"])
    held_out = {" ".join(json.loads(line)["problem"].split()) for line in lines_of(test)}
    assert (keys.total(), len(keys), len(keys.keys() & held_out)) == (7498, 7497, 1)


@needs_shared_data
@pytest.mark.parametrize("name", ["math", "gsm8k"])
def test_answers_read_from_solutions_are_those_of_the_answer_column(name: str):
    path = SHARED_DATA / f"{name}.train.jsonl"
    task = build(name, train=str(path), test=OTHER, columns={"problem": "problem"})
    read = build(name, train={"path": str(path), "columns": {"answer": "solution"}}, test=OTHER)
    golds = [json.loads(line) for line in lines_of(path)]
    by_question = {question_key(row["problem"]): row["answer"] for row in golds}
    assert len(read.train) == len(task.train) > 7000
    for one in read.train:
        assert one.answer == by_question[question_key(one.prompt.removesuffix(SUFFIX))]
    assert [one.id for one in read.train] == [one.id for one in task.train]


def test_responses_are_judged_as_mathematics():
    pytest.importorskip("hacrl.tasks.math.pool")
    task = build("math", train=MATH_HUB, test=OTHER)
    half = next(one for one in task.train if one.answer == "\\frac{1}{2}")
    try:
        assert task.verify([]) == []
        verdicts = task.verify(
            [
                rollout_of(half, "So \\boxed{0.5}."),
                rollout_of(task.test[0], "\\boxed{100}"),
                rollout_of(half, "\\boxed{\\frac{1}{3}}"),
                rollout_of(half, "1/2"),
            ]
        )
    finally:
        task.close()
        task.close()
    assert [(one.reward, one.label) for one in verdicts] == [
        (1.0, "correct"),
        (1.0, "correct"),
        (0.0, "wrong"),
        (0.0, "unparsable"),
    ]


def test_close_ends_the_verifier_and_a_later_verify_starts_another(monkeypatch):
    pool = pytest.importorskip("hacrl.tasks.math.pool")
    closed = []

    class Counted(pool.MathVerifier):
        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(pool, "MathVerifier", Counted)
    task = build("boxed", train=PLAIN, test=OTHER)
    for _ in range(2):
        assert task.verify([rollout_of(task.test[0], "\\boxed{100}")])[0].label == "correct"
        task.close()
    assert len(closed) == len(set(map(id, closed))) == 2
