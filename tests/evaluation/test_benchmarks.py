"""The seven benchmarks: hub columns and answers from rows as the hub has them, files, counts and golds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.errors import TaskError
from hacrl.evaluation import benchmarks
from hacrl.evaluation.benchmarks import BENCHMARKS, load_benchmark, load_file
from hacrl.types import Rollout

SHARED = Path(__file__).parents[3] / "shared" / "data"
SUFFIX = " Let's think step by step and output the final answer within \\boxed{}."

# a row of each data set, with the columns it has on the hub (texts shortened), and the answer in it
HUB_ROWS = {
    "math500": (
        {"problem": "Convert.", "solution": "\\boxed{x}", "answer": "\\frac{14}{3}", "unique_id": "test/a/8"},
        "\\frac{14}{3}",
    ),
    "math": (
        {"problem": "How many?", "level": "Level 3", "solution": "\\boxed{1} or \\boxed{\\dfrac{9}{7}}."},
        "\\dfrac{9}{7}",
    ),
    "gsm8k": ({"question": "Janet?", "answer": "16 - 3 = <<16-3=13>>13\n#### 1,018"}, "1018"),
    "aime2025": ({"id": "0", "problem": "Find the sum.", "answer": "70"}, "70"),
    "amc23": ({"id": 0, "question": "Cities?", "answer": 27.0, "url": "https://x"}, "27"),
    "minerva": ({"question": "Magellan?", "answer": "4.5e33"}, "4.5e33"),
    "olympiad": (
        {"id": 1606, "question": "Xenia?", "solution": ["Long."], "final_answer": ["$69$,$84$"]},
        "69,84",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_columns_and_answers_of_the_hub(name, tmp_path, monkeypatch):
    """A folder laid out like the data set on the hub, read by the same library."""
    row, answer = HUB_ROWS[name]
    benchmark = BENCHMARKS[name]
    config = benchmark.config or "default"
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: test\n    path: test.jsonl\n---\n"
    )
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(benchmarks.BENCHMARKS, name, replace(benchmark, hub=str(tmp_path)))
    task = load_benchmark(name)
    question = row.get("problem") or row.get("question")
    assert [(p.prompt, p.answer) for p in task.test] == [(question + SUFFIX, answer)]
    assert task.train == ()
    assert task.notes == (
        f"{name} has {' or '.join(map(str, benchmark.sizes))} problems, but {task.source} has 1",
    )


def test_files_of_the_user(tmp_path):
    rows = [
        {"question": "2+2?", "solution": "It is \\boxed{4}."},
        {"question": "3+3?", "solution": "Six.\n#### 6"},
        {"question": "4+4?", "solution": "8"},
    ]
    path = tmp_path / "own.json"
    path.write_text(json.dumps(rows))
    task = load_file(path, prompt="Q: {problem}")
    assert {(p.prompt, p.answer) for p in task.test} == {("Q: 2+2?", "4"), ("Q: 3+3?", "6"), ("Q: 4+4?", "8")}
    assert task.name == "own"
    assert task.notes == ()


def test_a_prefix_is_the_same_choice_in_every_order_of_the_rows(tmp_path):
    rows = [json.dumps({"problem": f"{i}+1", "answer": str(i + 1)}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    (tmp_path / "b.jsonl").write_text("\n".join(reversed(rows)))
    first, second = (load_file(tmp_path / name).test for name in ("a.jsonl", "b.jsonl"))
    assert first == second
    assert [p.answer for p in first] != [str(i + 1) for i in range(50)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "x", "answer": ""}, "rows.jsonl:1: column 'answer' holds no answer"),
        ({"problem": "x", "answer": "\\boxed{}"}, "rows.jsonl:1: column 'answer' holds no answer"),
        ({"problem": " ", "answer": "1"}, "rows.jsonl:1: column 'problem' is empty"),
        ({"task": "x", "answer": "1"}, "it has task, answer; name it with --columns problem=NAME"),
    ],
)
def test_rows_without_a_problem_or_an_answer_are_named(row, words, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError, match="^--on: .*" + words.replace("\\", "\\\\")):
        load_file(tmp_path / "rows.jsonl")


def test_an_unreadable_file_names_its_option(tmp_path):
    (tmp_path / "math500.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match=r"^--on: .*math500\.jsonl is not UTF-8"):
        load_file(tmp_path / "math500.jsonl")
    with pytest.raises(TaskError, match=r"^--data: .*math500\.jsonl is not UTF-8"):
        load_benchmark("math500", tmp_path)


def test_missing_data_names_the_fix(tmp_path):
    with pytest.raises(TaskError, match="did you mean 'olympiad'\\? There are math500, math, gsm8k"):
        load_benchmark("olympiads", tmp_path)
    (tmp_path / "other.txt").write_text("")
    with pytest.raises(TaskError, match=r"gsm8k.test.jsonl, which does not exist \(found: other.txt\)"):
        load_benchmark("gsm8k", tmp_path)
    with pytest.raises(TaskError, match="there is no folder"):
        load_benchmark("gsm8k", tmp_path / "gone")
    with pytest.raises(TaskError, match=r"cannot be reached.*--data FOLDER takes local files.*amc23.jsonl"):
        load_benchmark("amc23")


@pytest.mark.skipif(not SHARED.is_dir(), reason="the benchmarks' files are not here")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("math500", 500),
        ("math", 5000),
        ("gsm8k", 1319),
        ("aime2025", 30),
        ("amc23", 40),
        ("minerva", 272),
        ("olympiad", 675),
    ],
)
def test_every_benchmark_has_its_problems_and_accepts_its_own_answers(name, count):
    task = load_benchmark(name, SHARED)
    assert len(task.test) == count
    assert task.notes == ()
    assert len({problem.id for problem in task.test}) == count
    sample = task.test[:40]
    texts = [f"So the answer is $\\boxed{{{problem.answer}}}$." for problem in sample]
    wrong = ["So the answer is $\\boxed{987654321}$." for _ in sample]
    try:
        verdicts = task.verify([answered(*pair) for pair in zip(sample, texts, strict=True)])
        assert [v.label for v in verdicts] == ["correct"] * len(sample)
        verdicts = task.verify([answered(*pair) for pair in zip(sample, wrong, strict=True)])
        assert {v.label for v in verdicts} == {"wrong"}
    finally:
        task.close()


def answered(problem, text: str) -> Rollout:
    return Rollout.single_turn(problem, "a", text, (1,), (0.0,), "stop", 0, "")
