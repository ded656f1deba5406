"""The numbers and tables of a study, worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hacrl.report.benchmark_tables import Score
from hacrl.runs.results import RunResult
from hacrl.studies.markdown import study_markdown
from hacrl.studies.study import HELD_OUT, MEAN, RunKey, make_study
from hacrl.training.metrics import Accuracy


def result(before: float, *after: float, probe_tokens: int = 0) -> RunResult:
    """A run of the agents ada, bob, ... with these accuracies after step 9."""
    agents = ["ada", "bob"][: len(after)]
    return RunResult(
        Path(),
        accuracies={
            0: {agent: Accuracy(before, 0, 1, 1) for agent in agents},
            9: {agent: Accuracy(mean, 0, 1, 1) for agent, mean in zip(agents, after, strict=True)},
        },
        rewards={agent: [0.0] for agent in agents},
        rollouts=dict.fromkeys(agents, 100),
        updates=dict.fromkeys(agents, 7),
        generated_tokens=dict.fromkeys(agents, 2000),
        learnt_tokens=dict.fromkeys(agents, 3500),
        probe_tokens=dict.fromkeys(agents, probe_tokens),
        seconds=dict.fromkeys(agents, 12.4),
    )


def one_agent() -> dict[RunKey, RunResult]:
    return {
        ("gspo", 0): result(0.5, 0.6),
        ("hacpo", 0): result(0.5, 0.7),
        ("gspo", 1): result(0.4, 0.8),
        ("hacpo", 1): result(0.4, 0.75),
    }


def test_a_study_pairs_seeds() -> None:
    study = make_study(one_agent(), reference="gspo")
    (measure,) = study.measures
    assert measure.name == HELD_OUT
    found = measure.outcomes["hacpo"]["ada"]
    assert found.by_seed == (0.7, 0.75)
    assert found.mean == pytest.approx(0.725)
    # differences +0.1 and -0.05: mean 0.025, sample standard deviation 0.15 / sqrt(2), standard error 0.075
    test = found.difference
    assert test is not None
    assert (test.mean, test.positive, test.pairs) == (pytest.approx(0.025), 1, 2)
    # t = 0.025 / 0.075 = 1/3 with one degree of freedom: p = 1 - 2/pi * atan(1/3) = 0.795167
    assert test.p_value == pytest.approx(1 - 2 / math.pi * math.atan(1 / 3))
    assert test.high == pytest.approx(0.025 + 12.7062 * 0.075, abs=1e-4)
    # two equal tests, of ada and of the mean, which is ada: Holm doubles the p-value, at most to 1
    assert found.p_corrected == 1.0
    assert measure.before["ada"].by_seed == (0.5, 0.4)
    assert measure.outcomes["gspo"]["ada"].difference is None


def test_the_mean_of_agents_is_tested_and_all_tests_are_corrected_together() -> None:
    runs = {
        (variant, seed): result(0.1, ada + seed / 10, bob + (seed == 2) / 100)
        for variant, ada, bob in (("gspo", 0.2, 0.3), ("naive", 0.25, 0.35), ("hacpo", 0.4, 0.2))
        for seed in range(3)
    }
    runs["hacpo", 1] = result(0.1, 0.6, 0.2)  # ada +0.2, +0.3, +0.2
    (measure,) = make_study(runs, "gspo").measures
    mean = measure.outcomes["hacpo"][MEAN]
    assert mean.by_seed == pytest.approx((0.3, 0.4, 0.405))
    assert mean.difference is not None
    # ada +0.2, +0.3, +0.2 and bob -0.1 each: half of the sums
    assert mean.difference.mean == pytest.approx((0.05 + 0.1 + 0.05) / 3)
    tested = {
        (variant, agent): outcome
        for variant in ("naive", "hacpo")
        for agent, outcome in measure.outcomes[variant].items()
    }
    # naive's differences are the same in every seed: nothing to test. Two tests are left: ada's, whose
    # t = 0.7/3 / (0.1/3) = 7 gives p = 1 - 7/sqrt(51) = 0.0198, is doubled; the mean's is
    # t = (0.2/3) / (0.05/3) = 4, p = 1 - 4/sqrt(18) = 0.0572
    given = {key: outcome.p_corrected for key, outcome in tested.items() if outcome.p_corrected is not None}
    assert given == pytest.approx(
        {("hacpo", "ada"): 2 * (1 - 7 / math.sqrt(51)), ("hacpo", MEAN): 1 - 4 / math.sqrt(18)}
    )


def test_the_tables_have_outcomes_costs_and_tests() -> None:
    text = study_markdown(make_study(one_agent(), reference="gspo"))
    assert "| hacpo | 0.725 ± 0.035 (+0.025, 1/2) | 0.725 | 100 | 2,000 | 3,500 | 7 | 12 |" in text
    # 80% power at one degree of freedom takes a mean of 16.334 standard errors: 16.334 * 0.075 = 1.225
    assert "| hacpo | ada | +0.025 | -0.928 to +0.978 | 1/2 | 0.795 | 1.000 | 1.225 |" in text
    assert "corrected by Holm's method. Detectable: the smallest true difference that the test finds" in text
    assert "probability of 80%" in text
    one_seed = {key: run for key, run in one_agent().items() if key[1] == 0}
    assert "95% interval" not in study_markdown(make_study(one_seed, reference="gspo"))


def test_probe_tokens_are_a_column_if_a_method_has_any() -> None:
    runs = one_agent()
    assert "probe tokens" not in study_markdown(make_study(runs, "gspo"))
    runs["hacpo", 1] = result(0.4, 0.75, probe_tokens=300)
    study = make_study(runs, "gspo")
    assert study.costs["hacpo"]["ada"]["probe tokens"] == (0, 300)
    assert "| 3,500 | 150 | 7 | 12 |" in study_markdown(study)  # the mean over seeds


def score(stage: str, measure: str, mean: float) -> Score:
    return Score(None, None, "ada", stage, "gsm8k", measure, mean, 0.01)


def test_benchmarks_are_tested_like_the_own_accuracy() -> None:
    scores = {
        ("gspo", 0): [score("before", "pass@8", 0.3), score("after", "pass@8", 0.4)],
        ("hacpo", 0): [score("after", "pass@8", 0.5)],
        ("gspo", 1): [score("after", "pass@8", 0.4)],
        ("hacpo", 1): [score("after", "pass@8", 0.7)],
    }
    study = make_study(one_agent(), "gspo", scores)
    own, benchmark = study.measures
    assert (own.name, benchmark.name) == (HELD_OUT, "gsm8k pass@8")
    assert benchmark.before["ada"].by_seed == (0.3, 0.3)  # one model, evaluated once
    found = benchmark.outcomes["hacpo"]["ada"]
    assert found.by_seed == (0.5, 0.7)
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(0.2)
    text = study_markdown(study)
    assert "**gsm8k pass@8**" in text
    assert "| hacpo | 0.600 ± 0.141 (+0.200, 2/2) | 0.600 |\n" in text
    record = json.loads(json.dumps(study.as_dict()))
    assert record["measures"]["gsm8k pass@8"]["outcomes"]["hacpo"]["ada"]["by_seed"] == [0.5, 0.7]
    assert record["costs"]["gspo"]["ada"]["rollouts"] == [100, 100]


def test_a_seed_without_a_score_is_left_out_of_the_test() -> None:
    scores = {
        ("gspo", 0): [score("after", "greedy", 0.4)],
        ("hacpo", 0): [score("after", "greedy", 0.5)],
        ("hacpo", 1): [score("after", "greedy", 0.7)],
    }
    found = make_study(one_agent(), "gspo", scores).measures[1].outcomes["hacpo"]["ada"]
    assert found.by_seed == (0.5, 0.7)
    assert found.difference is not None
    assert (found.difference.pairs, found.difference.mean) == (1, pytest.approx(0.1))
    assert found.difference.p_value is None
