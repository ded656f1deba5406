"""From responses to numbers, changes and tables."""

from __future__ import annotations

import pytest

from hacrl.evaluation.chunks import plan_chunks
from hacrl.evaluation.results import PairResult, Results, ScoredResponse, score
from hacrl.evaluation.tables import TextTable, result_tables, results_markdown


def responses(rewards: list[float], verdict: str | None = None) -> list[ScoredResponse]:
    return [
        ScoredResponse(
            "p", i, reward, verdict or ("correct" if reward else "wrong"), 10 * i, "stop" if i else "length"
        )
        for i, reward in enumerate(rewards)
    ]


def test_rewards_go_to_their_problems_whatever_the_order_of_the_chunks():
    """The second prompt of three is too long to be asked with the others, and comes last in the file."""
    plan = plan_chunks([10, 90, 10], 100, 80, samples=2, batch=8)
    found = score(responses([1, 0, 1, 1, 0, 0]), plan, [2])
    assert found.problem_averages == (0.5, 0.0, 1.0)
    assert found.average.mean == 0.5
    assert found.pass_at[2].mean == pytest.approx(2 / 3)
    assert (found.problems, found.samples, found.shortened) == (3, 2, 1)
    assert found.verdicts == {
        "correct": 3,
        "wrong": 3,
        "unparsable": 0,
        "timeout": 0,
        "crash": 0,
        "scored": 0,
    }
    assert found.stopped == pytest.approx(5 / 6)
    assert found.mean_tokens == 25.0


def test_samples_of_one_problem_from_several_chunks_belong_together():
    plan = plan_chunks([5, 5], None, 9, samples=3, batch=2)
    found = score(responses([1, 1, 1, 0, 0, 1]), plan, [1, 3])
    assert found.problem_averages == (1.0, pytest.approx(1 / 3))
    assert found.pass_at[1].mean == pytest.approx(2 / 3)
    assert found.pass_at[3].mean == 1.0


def test_scores_have_a_best_but_no_pass():
    plan = plan_chunks([5], None, 9, samples=2, batch=2)
    found = score(responses([0.25, 0.75], "scored"), plan, [2])
    assert found.pass_at == {}
    assert found.best_at[2].mean == 0.75
    assert found.average.mean == 0.5


def pair(label: str, rewards: list[float], stage: str | None = None, benchmark: str = "b") -> PairResult:
    plan = plan_chunks([5] * len(rewards), None, 9, samples=1, batch=64)
    found = score(responses(rewards), plan, ())
    return PairResult(
        label=label,
        agent=label.split(" ")[0],
        stage=stage,
        run="r",
        origin="r",
        variant=None,
        run_seed=None,
        model="m",
        benchmark=benchmark,
        source="s",
        temperature=0.0,
        top_p=1.0,
        stop=(),
        score=found,
    )


def test_changes_are_between_the_same_agent_before_and_after():
    results = Results(
        (
            pair("ada (before)", [0, 0, 1, 1], "before"),
            pair("ada", [1, 0, 1, 1], "after"),
            pair("bob", [1, 1, 1, 1], "after"),
        ),
        seed=0,
    )
    (change,) = results.changes()
    assert (change.agent, change.benchmark, change.change.mean) == ("ada", "b", 0.25)
    (table,) = result_tables(results)
    assert table.title == "b: 4 problems, 1 response each, greedy, at most 9 new tokens"
    assert table.headings == ("agent", "avg@1", "change", "stopped", "tokens", "correct", "wrong")
    # differences 1, 0, 0, 0: stderr .25; 1.96 of them: .490
    assert [row[2] for row in table.rows] == ["", "+0.250 ± 0.490", ""]
    assert [row[-2:] for row in table.rows] == [("2", "2"), ("3", "1"), ("4", "0")]


def test_several_benchmarks_are_summed_up_first():
    results = Results(
        (pair("ada", [1, 0]), pair("ada", [1, 1], benchmark="c"), pair("bob", [0, 0])), 0, ("n",)
    )
    summary, *rest = result_tables(results)
    assert summary.headings == ("agent", "b avg@1", "c avg@1")
    assert summary.rows == (("ada", "0.500", "1.000"), ("bob", "0.000", ""))
    assert [table.title[0] for table in rest] == ["b", "c"]
    assert results_markdown(results).endswith("\n- n\n")


def test_a_table_as_markdown_and_without_a_column():
    table = TextTable("t", ("agent", "x"), (("a|b", "1"),))
    assert table.markdown() == "**t**\n\n| agent | x |\n|---|---|\n| a&#124;b | 1 |\n"
    assert table.width == (5 + 2) + (1 + 2)
    assert table.without("x") == TextTable("t", ("agent",), (("a|b",),))
