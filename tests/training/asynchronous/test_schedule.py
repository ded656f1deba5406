"""Who may do what when: cases worked out by hand, and random runs in which no rule may be broken."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hacrl.training.asynchronous.schedule import AgentState, Job, Schedule


def schedule(*agents: str, staleness: int = 1, last: int = 3, live: bool = True, **settings) -> Schedule:
    return Schedule(
        {agent: AgentState() for agent in agents},
        staleness,
        last,
        updates_while_generating=dict.fromkeys(agents, live),
        **settings,
    )


def started(plan: Schedule, now: float = 0.0) -> set[tuple[str, str, int]]:
    return {(job.kind, job.agent, job.step) for job in plan.start(now)}


def end(plan: Schedule, kind: str, agent: str, step: int, now: float = 0.0) -> None:
    plan.finish(Job(kind, agent, step), now)


def test_sampling_and_learning_overlap_by_one_step() -> None:
    plan = schedule("ada")
    assert started(plan) == {("publish", "ada", 0)}  # nothing is sampled before the engine has weights
    end(plan, "publish", "ada", 0)
    assert started(plan) == {("sample", "ada", 1)}
    end(plan, "sample", "ada", 1)
    # batch 2 may be sampled by the weights after step 2 - 1 - 1 = 0, while batch 1 is learnt
    assert started(plan) == {("learn", "ada", 1), ("sample", "ada", 2)}
    end(plan, "sample", "ada", 2)
    assert started(plan) == set()  # batch 3 needs the weights after step 1
    end(plan, "learn", "ada", 1)
    assert started(plan) == {("publish", "ada", 1)}  # before the next step
    end(plan, "publish", "ada", 1)
    assert started(plan) == {("learn", "ada", 2), ("sample", "ada", 3)}
    end(plan, "sample", "ada", 3)
    end(plan, "learn", "ada", 2)
    assert started(plan) == {("publish", "ada", 2)}
    end(plan, "publish", "ada", 2)
    assert started(plan) == {("learn", "ada", 3)}  # there is no batch 4
    end(plan, "learn", "ada", 3)
    assert started(plan) == set()  # nobody needs the last weights
    assert plan.is_finished


@pytest.mark.parametrize("live", [True, False])
def test_weights_are_sent_in_mid_generation_only_where_the_engine_can_take_them(live: bool) -> None:
    plan = schedule("ada", staleness=2, last=9, live=live)
    for kind, step in (("publish", 0), ("sample", 1), ("sample", 2)):
        assert (kind, "ada", step) in started(plan)
        end(plan, kind, "ada", step)
    started(plan)  # batch 3 is sampled from now on; batch 1 is being learnt
    end(plan, "learn", "ada", 1)
    if live:
        assert started(plan) == {("publish", "ada", 1)}
        return
    assert started(plan) == {("learn", "ada", 2)}  # the engine generates: the learner goes on
    end(plan, "sample", "ada", 3)
    assert started(plan) == set()  # batch 4 needs the weights after step 1, and the learner is at work
    end(plan, "learn", "ada", 2)
    assert started(plan) == {("publish", "ada", 2)}  # before the next generation, and before step 3
    end(plan, "publish", "ada", 2)
    assert started(plan) == {("learn", "ada", 3), ("sample", "ada", 4)}


def test_a_learner_waits_for_all_and_with_patience_for_some_time() -> None:
    for patience, goes_on in ((None, False), (10.0, True)):
        plan = schedule("ada", "bob", patience=patience)
        started(plan)
        for agent in ("ada", "bob"):
            end(plan, "publish", agent, 0)
        started(plan)
        end(plan, "sample", "ada", 1, now=5.0)  # its learner was free before
        assert started(plan, now=14.9) == {("sample", "ada", 2)}
        assert [(wait.agent, wait.step, wait.missing, wait.since) for wait in plan.waits()] == [
            ("ada", 1, frozenset({"bob"}), 5.0)
        ]
        assert plan.next_deadline() == (15.0 if goes_on else None)
        jobs = plan.start(15.0)
        assert [(job.kind, job.agent, job.without) for job in jobs] == [
            ("learn", "ada", frozenset({"bob"}))
        ] * goes_on


def test_whoever_learns_alone_waits_for_nobody_and_a_paused_agent_is_not_waited_for() -> None:
    plan = schedule("ada", "bob", shares_rollouts=False)
    started(plan)
    end(plan, "publish", "ada", 0)
    started(plan)
    end(plan, "sample", "ada", 1)
    assert ("learn", "ada", 1) in started(plan)

    plan = schedule("ada", "bob")
    started(plan)
    end(plan, "publish", "ada", 0)
    started(plan)
    end(plan, "sample", "ada", 1)
    assert ("learn", "ada", 1) not in started(plan)
    plan.pause("bob")
    assert ("learn", "ada", 1) in started(plan)


def test_an_evaluation_sees_the_weights_of_its_step() -> None:
    plan = schedule("ada", evaluation_due=lambda step: step in (1, 3))
    started(plan)
    end(plan, "publish", "ada", 0)
    started(plan)
    end(plan, "sample", "ada", 1)
    started(plan)
    end(plan, "learn", "ada", 1)
    assert plan.steps_done == 0  # the evaluation belongs to the step
    assert started(plan) == {("publish", "ada", 1)}
    end(plan, "publish", "ada", 1)
    assert started(plan) == set()  # batch 2 is still sampled; nothing is learnt meanwhile
    end(plan, "sample", "ada", 2)
    assert started(plan) == {("evaluate", "ada", 1)}
    end(plan, "evaluate", "ada", 1)
    assert plan.steps_done == 1
    assert started(plan) == {("learn", "ada", 2), ("sample", "ada", 3)}


def test_no_learner_starts_while_a_checkpoint_is_due_and_engines_go_on() -> None:
    plan = schedule("ada", "bob", patience=0.0)
    started(plan)
    for agent in ("ada", "bob"):
        end(plan, "publish", agent, 0)
    started(plan)
    end(plan, "sample", "ada", 1)
    plan.is_holding = True
    assert started(plan) == {("sample", "ada", 2)}
    plan.is_holding = False
    assert started(plan) == {("learn", "ada", 1)}
    plan.is_stopping = True
    end(plan, "learn", "ada", 1)
    assert started(plan) == set()


@pytest.mark.parametrize("seed", range(200))
def test_in_random_runs_no_learner_is_further_ahead_than_allowed(seed: int) -> None:
    """Jobs end in random order. Nothing is done twice, all is done, and every rule of the table holds."""
    rng = random.Random(seed)
    staleness, last = rng.randint(1, 3), rng.randint(1, 9)
    every = rng.choice([1, 2, 4, 100])
    plan = schedule(
        *"abc"[: rng.randint(1, 3)],
        staleness=staleness,
        last=last,
        live=rng.random() < 0.5,
        patience=rng.choice([None, 0.0, 3.0]),
        evaluation_due=lambda step: step % every == 0 or step == last,
    )
    running: list[Job] = []
    done: Counter[tuple[str, str, int]] = Counter()
    # the steps whose weights an agent's engine had at the start and at the end of each batch
    oldest: dict[tuple[str, int], int] = {}
    ahead: list[int] = []
    now = 0.0
    for _ in range(10_000):
        if plan.is_finished:
            break
        now += 1.0
        plan.is_holding = rng.random() < 0.1
        for job in plan.start(now):
            running.append(job)
            state, others = plan.agents[job.agent], [other for other in running if other.agent == job.agent]
            assert len(others) <= 2
            if job.kind == "sample":
                oldest[job.agent, job.step] = state.published
            elif job.kind == "learn":
                assert done["sample", job.agent, job.step] == 1
                assert job.step == state.learnt + 1
                assert not any(other.kind == "evaluate" for other in others)
                waited_for = set(plan.agents) - {job.agent} - job.without
                assert all(done["sample", other, job.step] for other in waited_for)
                ahead.append(job.step - 1 - oldest[job.agent, job.step])
            elif job.kind == "publish":
                generates = any(other.uses_engine for other in others)
                assert not generates or plan.updates_while_generating[job.agent]
            else:
                assert state.published == state.learnt == job.step
        if running and rng.random() < 0.7:
            job = running.pop(rng.randrange(len(running)))
            done[job.kind, job.agent, job.step] += 1
            plan.finish(job, now)
    assert plan.is_finished, plan
    assert set(done.values()) == {1}
    for agent in plan.agents:
        assert all(done[kind, agent, step] for kind in ("sample", "learn") for step in range(1, last + 1))
        due = [step for step in range(last + 1) if step % every == 0 or step == last]
        assert [step for step in range(last + 1) if done["evaluate", agent, step]] == due
    assert all(0 <= steps <= staleness for steps in ahead)


def test_the_bound_is_used() -> None:
    """If engines are fast, learners are exactly as far ahead as allowed: the property above can fail."""
    for staleness in (1, 2):
        plan, first = schedule("ada", staleness=staleness, last=6), {}
        running: list[Job] = []
        while not plan.is_finished:
            for job in plan.start(0.0):
                running.append(job)
                if job.kind == "sample":
                    first[job.step] = plan.agents["ada"].published
            running.sort(key=lambda job: not job.uses_engine)
            plan.finish(running.pop(0), 0.0)
        assert [step - 1 - first[step] for step in range(1, 7)] == [
            min(step - 1, staleness) for step in range(1, 7)
        ]
