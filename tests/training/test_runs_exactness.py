"""Which changes of a config leave a run equal to the bit, and which do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hacrl.config.schema import GrpoSettings, NaiveSettings
from hacrl.training.learner import Learner
from tests.training.runs import GSPO, HACPO, Runs, assert_moved, assert_same_weights

METHODS = {
    "grpo": GrpoSettings(),
    "gspo": GSPO,
    "naive": NaiveSettings(clip_low=0.2, clip_high=0.28),
    "hacpo": HACPO,
}


@pytest.mark.parametrize("method", METHODS)
def test_equal_configs_give_equal_runs(runs: Runs, method: str) -> None:
    first, second = (runs("char", "pair", method=METHODS[method]) for _ in range(2))
    assert first.metrics_text == second.metrics_text
    assert len(first.steps) == 3
    for name in ("char", "pair"):
        assert_same_weights(first.weights(name), second.weights(name))
        assert_moved(first.weights(name), runs.initial_weights(name))


def test_another_seed_gives_another_run(runs: Runs) -> None:
    first, second = runs("char", "pair", seed=0), runs("char", "pair", seed=1)
    assert first.metrics_text != second.metrics_text
    asked = [{v.rollout.problem.id for v in run.watcher.rollouts[1, "char"]} for run in (first, second)]
    assert asked[0] != asked[1]
    for name in ("char", "pair"):
        assert_moved(first.weights(name), second.weights(name))


def test_agents_differ_in_their_draws(runs: Runs) -> None:
    """Two agents with equal weights sample different responses: draws are keyed by the agent's name."""
    clone = runs.agent("char")
    run = runs("char", type(clone)(name="clone", model=clone.model), steps=1)
    said = {name: [v.rollout.text for v in run.watcher.rollouts[1, name]] for name in ("char", "clone")}
    assert sum(one != other for one, other in zip(said["char"], said["clone"], strict=True)) > 8
    # the prompts are the same for all
    asked = {name: [v.rollout.problem for v in run.watcher.rollouts[1, name]] for name in said}
    assert asked["char"] == asked["clone"]


def test_steps_differ_in_their_draws(runs: Runs) -> None:
    """With the only problem there is, and weights that hardly move, step 2 draws anew."""
    rollout = {"prompts_per_step": 1, "rollouts_per_prompt": 8}
    run = runs("char", method=GSPO, steps=2, learning={"lr": 1e-12}, rollout=rollout, problems=1)
    first, second = (run.watcher.rollouts[step, "char"] for step in (1, 2))
    assert {v.rollout.problem.id for v in first} == {v.rollout.problem.id for v in second}
    assert sum(a.rollout.text != b.rollout.text for a, b in zip(first, second, strict=True)) > 4


def test_minibatches_are_shuffled_by_run_agent_and_step(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    learn = Learner.learn

    def watched(self: Learner, samples, updates: int, seed: int, lr_factor: float):
        seeds.append(seed)
        return learn(self, samples, updates, seed, lr_factor)

    monkeypatch.setattr(Learner, "learn", watched)
    for seed in (0, 1):
        runs("char", "pair", seed=seed, steps=2)
    assert len(set(seeds)) == len(seeds) == 8  # 2 runs, 2 agents, 2 steps


@pytest.mark.parametrize("method", ["naive", "hacpo"])
def test_order_of_agents_changes_nothing(runs: Runs, method: str) -> None:
    orders = [("char", "pair", "twin"), ("twin", "char", "pair"), ("pair", "twin", "char")]
    first, *others = (runs(*order, method=METHODS[method], steps=2) for order in orders)
    for other in others:
        for name in orders[0]:
            assert other.of(name) == first.of(name)
            assert_same_weights(other.weights(name), first.weights(name))


def test_hacpo_of_one_agent_is_gspo(runs: Runs) -> None:
    for name in ("char", "pair"):
        alone, gspo = runs(name, method=HACPO), runs(name, method=GSPO)
        assert alone.metrics_text == gspo.metrics_text
        assert_same_weights(alone.weights(name), gspo.weights(name))
        assert_moved(alone.weights(name), runs.initial_weights(name))


@pytest.mark.parametrize("method", ["gspo", "grpo"])
def test_gspo_agents_do_not_influence_each_other(runs: Runs, method: str) -> None:
    together = runs("char", "pair", method=METHODS[method])
    for name in ("char", "pair"):
        alone = runs(name, method=METHODS[method])
        reported = together.of(name)
        for step in reported:
            step["capability_ratios"] = {}  # the one thing that is said about others
        assert alone.of(name) == reported
        assert_same_weights(alone.weights(name), together.weights(name))


def test_hacpo_agents_influence_each_other(runs: Runs) -> None:
    together, alone = runs("char", "pair"), runs("char")
    assert_moved(together.weights("char"), alone.weights("char"))
    assert together.of("char")[0]["rollout"] == alone.of("char")[0]["rollout"]  # before anything is learnt
    assert together.of("char")[0]["learning"]["sources"].keys() == {"char", "pair"}


def test_capabilities_influence_the_update(runs: Runs) -> None:
    """Agents differ in capability: without omega in baseline and discrepancy the weights differ."""
    blind = replace(HACPO, capability_baseline=False, discrepancy=False)
    seeing, unseeing = runs("char", "pair", steps=1), runs("char", "pair", steps=1, method=blind)
    assert seeing.of("char")[0]["capability"] < seeing.of("pair")[0]["capability"]
    assert seeing.of("char")[0]["rollout"] == unseeing.of("char")[0]["rollout"]
    for name in ("char", "pair"):
        assert_moved(seeing.weights(name), unseeing.weights(name))


def test_evaluation_changes_nothing(runs: Runs) -> None:
    plain = runs("char", "pair")
    watched = runs("char", "pair", evaluation={"problems": 5, "samples_per_problem": 3, "every": 1})
    assert watched.metrics_text == plain.metrics_text
    assert_same_weights(watched.weights("pair"), plain.weights("pair"))


def test_learn_stop_token_changes_the_weights(runs: Runs) -> None:
    learnt, unlearnt = (
        runs("char", method=replace(GSPO, learn_stop_token=stop), steps=1) for stop in (True, False)
    )
    assert any(v.rollout.finish_reason == "stop" for v in learnt.watcher.rollouts[1, "char"])
    assert learnt.of("char")[0]["rollout"] == unlearnt.of("char")[0]["rollout"]
    assert_moved(learnt.weights("char"), unlearnt.weights("char"))


def test_own_learning_rate_of_an_agent(runs: Runs) -> None:
    mixed = runs(runs.agent("char", lr=1e-3), "pair", method=GSPO)
    slow, fast = runs("char", method=GSPO, learning={"lr": 1e-3}), runs("pair", method=GSPO)
    assert_same_weights(mixed.weights("char"), slow.weights("char"))
    assert_same_weights(mixed.weights("pair"), fast.weights("pair"))
