"""The loop: who does what when, and whether the reported numbers are those of the rollouts."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hacrl.config.schema import GrpoSettings, NaiveSettings
from hacrl.engines.answering import verify_rollouts
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.seeding import derive_seed
from hacrl.tasks.registry import TASKS
from hacrl.training.metrics import accuracy_by_problem
from hacrl.types import Rollout, Sampling, Verdict
from tests.support.engines import sample_rollouts
from tests.support.sevens import SevensTask
from tests.training.runs import GSPO, HACPO, Run, Runs, assert_moved, assert_same_weights


def test_everybody_answers_before_anybody_learns(runs: Runs) -> None:
    run = runs("char", "pair", steps=2)
    for step in (1, 2):
        phases = [(phase, agent) for at, phase, agent in run.watcher.phases if at == step and phase != "save"]
        assert phases == [
            ("rollout", "char"),
            ("verify", "char"),
            ("rollout", "pair"),
            ("verify", "pair"),
            ("learn", "char"),
            ("learn", "pair"),
        ]
        # 2 updates per source, 2 sources: 4 updates a step, none of them before the step's rollouts
        for name in ("char", "pair"):
            versions = {v.rollout.policy_version for v in run.watcher.rollouts[step, name]}
            assert versions == {4 * (step - 1)}
            assert run.of(name)[step - 1]["policy_version"] == 4 * step


def test_engines_apart_answer_side_by_side_and_nothing_else_changes(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = {"problems": 3, "every": 1}
    one_by_one = runs("char", "twin", "pair", steps=2, evaluation=evaluation)
    runs_concurrently = property(lambda engine: engine.policy.name != "twin")
    monkeypatch.setattr(TransformersEngine, "runs_concurrently", runs_concurrently)
    run = runs("char", "twin", "pair", steps=2, evaluation=evaluation)
    phases = [(phase, agent) for at, phase, agent in run.watcher.phases if at == 1 and phase != "learn"]
    for together in (slice(0, 2), slice(6, 8)):  # whoever is ready first begins
        phases[together] = sorted(phases[together])
    assert phases == [
        ("rollout", "char"),
        ("rollout", "pair"),
        ("verify", "char"),
        ("verify", "pair"),
        ("rollout", "twin"),
        ("verify", "twin"),
        ("evaluate", "char"),
        ("evaluate", "pair"),
        ("evaluate", "twin"),
    ]
    assert run.metrics_text == one_by_one.metrics_text
    accuracies = [(one.result.folder / "evaluations.jsonl").read_text() for one in (run, one_by_one)]
    assert accuracies[0] == accuracies[1]
    assert len(accuracies[0].splitlines()) == 3
    assert run.watcher.rollouts == one_by_one.watcher.rollouts
    for name in ("char", "twin", "pair"):
        assert_same_weights(run.weights(name), one_by_one.weights(name))


def test_each_agents_seconds_are_its_own(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is still answering when the other has ended."""
    char_has_ended = threading.Event()
    generate = TransformersEngine.generate

    def waiting(engine, *asked):
        rollouts = generate(engine, *asked)
        if engine.policy.name == "char":
            char_has_ended.set()
        else:
            assert char_has_ended.wait(30)
            time.sleep(0.2)
        return rollouts

    monkeypatch.setattr(TransformersEngine, "runs_concurrently", True)
    monkeypatch.setattr(TransformersEngine, "generate", waiting)
    run = runs("char", "pair", steps=1)
    seconds = json.loads((run.result.folder / "timings.jsonl").read_text())
    assert seconds["rollout/char"] < seconds["rollout/pair"] < seconds["whole"]


@pytest.mark.parametrize(
    ("method", "learning", "updates"),
    [
        (HACPO, {"updates_per_source": 2}, 4),
        (HACPO, {"updates_per_source": 1, "epochs": 3}, 6),
        (GSPO, {"updates_per_source": 2}, 2),
        (GSPO, {"updates_per_source": 2, "epochs": 2}, 4),
        (HACPO, {"updates_per_source": 2, "epochs": 2, "updates_per_step": 3}, 3),
        (GSPO, {"updates_per_step": 3}, 3),
    ],
)
def test_number_of_updates_and_uses(runs: Runs, method, learning: dict[str, int], updates: int) -> None:
    run = runs("char", "pair", method=method, learning=learning, steps=1)
    assert run.result.updates == {"char": updates, "pair": updates}
    sources = 2 if method is HACPO else 1
    for name in ("char", "pair"):
        learnt = run.of(name)[0]["learning"]
        assert learnt["updates"] == updates
        assert name not in learnt["dropped"]
        dropped = dropped_rollouts(learnt)
        assert dropped < 8
        # 4 prompts, 4 responses of each source, each once a pass, with an advantage or without
        used = sum(source["used"] for source in learnt["sources"].values()) + learnt["skipped"]
        assert used == (16 * sources - dropped) * learning.get("epochs", 1)


def dropped_rollouts(learnt) -> int:
    """Random agents say "<unk>" now and then, the name of a control token, which others cannot write."""
    return sum(sum(reasons.values()) for reasons in learnt["dropped"].values())


def test_unequal_rollouts(runs: Runs) -> None:
    run = runs(
        runs.agent("char", rollouts_per_prompt=6), runs.agent("pair", rollouts_per_prompt=3), "twin", steps=2
    )
    # 4 prompts times 6, 3 and the general 4
    expected = {"char": 24, "pair": 12, "twin": 16}
    assert run.result.rollouts == {name: 2 * count for name, count in expected.items()}
    for step in (1, 2):
        for name, count in expected.items():
            assert run.of(name)[step - 1]["rollout"]["rollouts"] == count
            per_problem = Counter(v.rollout.problem.id for v in run.watcher.rollouts[step, name])
            assert set(per_problem.values()) == {count // 4}
            learnt = run.of(name)[step - 1]["learning"]
            used = sum(source["used"] for source in learnt["sources"].values()) + learnt["skipped"]
            assert used == 52 - dropped_rollouts(learnt)


def test_a_lone_response_teaches_only_among_others(runs: Runs) -> None:
    alone = runs("char", "pair", method=GSPO, steps=2, rollout={"rollouts_per_prompt": 1})
    assert_same_weights(alone.weights("char"), runs.initial_weights("char"))
    assert [report["learning"]["skipped"] for report in alone.of("char")] == [4, 4]
    shared = runs(runs.agent("char", rollouts_per_prompt=1), "pair", steps=2)
    assert_moved(shared.weights("char"), runs.initial_weights("char"))


def test_reported_rollouts_are_those_of_the_step(runs: Runs) -> None:
    run = runs("char", "pair")
    for step in (1, 2, 3):
        for name in ("char", "pair"):
            seen = run.watcher.rollouts[step, name]
            assert [v.reward for v in seen] == [float("7" in v.rollout.text) for v in seen]
            report = run.of(name)[step - 1]["rollout"]
            assert report["reward"] == sum(v.reward for v in seen) / 16
            assert report["verdicts"].get("correct", 0) == sum("7" in v.rollout.text for v in seen)
            assert report["response_tokens"] == sum(len(v.rollout.token_ids) for v in seen) / 16
            assert report["stopped"] == sum(v.rollout.token_ids[-1] == 1 for v in seen) / 16


def test_capability_is_the_mean_of_the_last_steps(runs: Runs) -> None:
    method = replace(HACPO, capability_window=2)
    run = runs("char", "pair", method=method, steps=4)
    for name in ("char", "pair"):
        means = [
            sum(v.reward for v in run.watcher.rollouts[step, name]) / len(run.watcher.rollouts[step, name])
            for step in (1, 2, 3, 4)
        ]
        assert len(set(means)) > 1
        floored = [max(mean, 1e-8) for mean in means]
        # the step's own rewards count at once; a window of 2 forgets what is older
        expected = [
            floored[0],
            (floored[0] + floored[1]) / 2,
            (floored[1] + floored[2]) / 2,
            (floored[2] + floored[3]) / 2,
        ]
        assert [report["capability"] for report in run.of(name)] == pytest.approx(expected, rel=1e-12)


def test_every_step_asks_the_next_problems(runs: Runs) -> None:
    run = runs("char", method=GSPO)
    asked = [[v.rollout.problem.id for v in run.watcher.rollouts[step, "char"]] for step in (1, 2, 3)]
    # 12 training problems in 3 steps of 4: a whole pass, each problem in one step only
    assert sorted(problem for step in asked for problem in set(step)) == sorted(
        p.id for p in SevensTask().train
    )


def test_when_and_on_what_agents_are_evaluated(runs: Runs) -> None:
    evaluation = {"problems": 3, "samples_per_problem": 2, "every": 2}
    run = runs("char", "pair", steps=5, evaluation=evaluation, learning={"lr": 2e-2})
    assert list(run.result.accuracies) == [0, 2, 4, 5]
    for accuracies in run.result.accuracies.values():
        assert {name: (a.problems, a.samples) for name, a in accuracies.items()} == {
            "char": (3, 2),
            "pair": (3, 2),
        }
    assert list(runs("char", steps=2, evaluation={"problems": 3}).result.accuracies) == [0, 2]
    assert runs("char", steps=1).result.accuracies == {}


def test_evaluation_asks_held_out_problems_and_training_does_not(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HeldOut(SevensTask):
        def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
            held_out = [rollout.problem in self.test for rollout in rollouts]
            return [Verdict(1.0, "correct") if out else Verdict(0.0, "wrong") for out in held_out]

    monkeypatch.setitem(TASKS, "sevens", HeldOut)
    run = runs("char", evaluation={"problems": 5})
    assert [accuracies["char"].mean for accuracies in run.result.accuracies.values()] == [1.0, 1.0]
    assert run.result.rewards == {"char": [0.0, 0.0, 0.0]}


def test_evaluation_is_of_the_agent_alone(runs: Runs) -> None:
    evaluation = {"problems": 4, "samples_per_problem": 30, "temperature": 0.5}
    run = runs("char", "pair", steps=0, seed=3, evaluation=evaluation)
    task = SevensTask()
    for name in ("char", "pair"):
        engine = TransformersEngine(Agent.load(runs.agent(name), "cpu"))
        seed = derive_seed(3, "evaluate", name)
        said = sample_rollouts(engine, task.test[:4], 30, Sampling(4, temperature=0.5), seed)
        alone = accuracy_by_problem(verify_rollouts(task, said), 30)
        assert run.result.accuracies == {0: {**run.result.accuracies[0], name: alone}}


def test_evaluation_repeats_its_draws(runs: Runs) -> None:
    """With weights that stay, before and after are the same number."""
    evaluation = {"problems": 5, "samples_per_problem": 8}
    still = runs("char", method=GSPO, steps=2, evaluation=evaluation, learning={"lr": 1e-12})
    assert still.result.accuracies[0] == still.result.accuracies[2]
    assert 0 < still.result.accuracies[0]["char"].mean < 1


@pytest.mark.parametrize(
    "method", [GrpoSettings(), GSPO, NaiveSettings(clip_low=0.2, clip_high=0.28), HACPO], ids=lambda m: m.name
)
def test_agents_learn(runs: Runs, method) -> None:
    """Four random tokens hold a seven in a fifth (characters) or half (pairs) of the cases; then mostly."""
    run = runs(
        "char", "pair", method=method, steps=12, learning={"lr": 1e-2}, rollout={"rollouts_per_prompt": 8}
    )
    assert run.result.rewards.keys() == {"char", "pair"}
    for rewards in run.result.rewards.values():
        start, end = sum(rewards[:2]) / 2, sum(rewards[-2:]) / 2
        assert end > max(0.8, start + 0.2)


def test_rewards_below_the_lowest_are_pointed_out_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    class Punishing(SevensTask):
        def judge(self, response: str) -> Verdict:
            return Verdict(-1.0, "wrong")

    monkeypatch.setitem(TASKS, "sevens", Punishing)

    def notes(run: Run) -> list[str]:
        lines = (run.result.folder / "notes.txt").read_text().splitlines()
        return [line for line in lines if "the mean reward of" in line]

    told = notes(runs("char", "pair"))
    assert [line.split(" is ")[0] for line in told] == [
        "step 1: the mean reward of char",
        "step 1: the mean reward of pair",
    ]
    assert "is -1, below the lowest reward of 0:" in told[0]
    lower = replace(HACPO, reward_range=(-1.0, None))
    assert notes(runs("char", "pair", method=lower)) == []
    assert notes(runs("char", method=GSPO)) == []  # no ratio is taken
