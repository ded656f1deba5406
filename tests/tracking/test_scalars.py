from __future__ import annotations

from dataclasses import asdict

from hacrl.tracking.samples import as_text, sample_rows
from hacrl.tracking.scalars import evaluation_scalars, step_scalars
from tests.tracking.scenario import EXPECTED, NASTY, SECONDS, accuracies, report, rollouts


def test_every_number_of_a_step_has_its_name():
    for step in (1, 2):
        scalars = step_scalars(report(step), SECONDS)
        expected = {name: values[step] for name, values in EXPECTED.items() if "accuracy" not in name}
        assert {name: scalars[name] for name in expected} == expected


def test_every_number_of_a_report_is_logged():
    """As many scalars as numbers in metrics.jsonl, plus times and verdicts that did not occur."""

    def numbers(value) -> int:
        if isinstance(value, dict):
            return sum(numbers(one) for one in value.values())
        return isinstance(value, int | float)

    written = sum(numbers(asdict(agent)) for agent in report(1).agents.values())
    # 6 kinds of verdicts, of which each agent's report counts 2; 3 times
    assert len(step_scalars(report(1), SECONDS)) == written + 2 * (6 - 2) + 3


def test_missing_measurements_are_not_logged_as_zero():
    assert "llama/learning/sampler_gap" not in step_scalars(report(1), {})


def test_accuracies():
    assert evaluation_scalars(accuracies(2)) == {
        "qwen/accuracy": 0.5,
        "qwen/accuracy_stderr": 0.0625,
        "llama/accuracy": 0.75,
        "llama/accuracy_stderr": 0.0625,
    }


def test_the_first_response_to_each_of_the_first_problems_is_shown():
    rows = sample_rows(3, "qwen", rollouts("qwen"), 2)
    assert [row.response for row in rows] == [f"{NASTY} p0/0", f"{NASTY} p1/0"]
    assert [row.values[:4] for row in rows] == [[3, "qwen", 1.0, "correct"]] * 2
    assert rows[0].prompt == "[system]\nBe brief.\n[user]\nask 0"
    assert (rows[1].prompt, rows[1].answer, rows[1].tokens) == ("ask 1", "8", 3)
    assert len(sample_rows(3, "qwen", rollouts("qwen"), 10)) == 3  # no problem twice
    assert sample_rows(3, "qwen", rollouts("qwen"), 0) == []


def test_rows_as_plain_text():
    text = as_text(sample_rows(3, "qwen", rollouts("qwen"), 2))
    assert text.count("--- step 3 · qwen · reward 1 · correct · 3 tokens\n") == 2
    assert f"--- prompt\nask 1\n--- answer\n8\n--- response\n{NASTY} p1/0\n" in text
