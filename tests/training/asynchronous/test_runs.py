"""Whole asynchronous runs of tiny agents: nothing is lost or learnt twice, and the bound holds."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hacrl.config.schema import RunConfig
from hacrl.errors import TrainingError
from hacrl.executors.local import LocalExecutor
from hacrl.runs.run import LocalRun
from hacrl.training.asynchronous.schedule import Job
from hacrl.training.health.collapse import CollapseDetector
from hacrl.training.observer import Observer
from hacrl.training.trainer import Trainer
from tests.support.chaos import differing_files
from tests.training.asynchronous.orders import (
    Order,
    asynchronous,
    delayed,
    finish,
    lines,
    logged,
    oldest_first,
    open_run,
    random_order,
)
from tests.training.runs import GSPO, Runs

AGENTS = ("char", "pair")


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, step: int, note: str) -> None:
        self.notes.append(note)


def check_all_learnt_once(config: RunConfig, without: set[tuple[str, str, int]] = frozenset()) -> None:
    """Check that each learner learnt from every rollout of every agent in its own step, and only once.

    ``without``: learner, source and step of rollouts that came late, or never.
    """
    names = [agent.name for agent in config.agents]
    for step in range(1, config.steps + 1):
        rollouts = {
            (row["agent"], row["problem"], row["sample"])
            for name in names
            for row in logged(config, step, name)
        }
        assert len(rollouts) == 16 * len(names)  # 4 prompts, 4 responses of each agent
        for learner in names:
            seen = Counter(
                (row["agent"], row["problem"], row["sample"])
                for row in logged(config, step, learner, learnt=True)
                if "late_from" not in row
            )
            assert set(seen.values()) == {1}
            assert set(seen) == {key for key in rollouts if (learner, key[0], step) not in without}


def check_staleness(config: RunConfig, updates: int = 4) -> list[int]:
    """Compare the reported staleness with the log's versions; return the steps that own rollouts were old.

    In these runs every step makes equally many updates: the policy after step n has version n * updates.
    """
    found = []
    for line in lines(config.output, "metrics.jsonl"):
        step = line["step"]
        for learner, report in line["agents"].items():
            assert report["learning"]["updates"] == updates
            assert report["policy_version"] == updates * step
            for source, staleness in report["asynchronous"]["staleness"].items():
                rows = logged(config, step, source)
                ages, tokens = [], 0
                for row in rows:
                    (segment,) = row["segments"]
                    spans = segment.get("versions") or [[row["policy_version"], row["tokens"]]]
                    ages += [(step - 1 - version // updates, count) for version, count in spans]
                    tokens += row["tokens"]
                assert (
                    max(age for age, _ in ages) == staleness["steps_max"] <= config.asynchronous.max_staleness
                )
                mean = sum(age * count for age, count in ages) / tokens
                assert staleness["steps_mean"] == pytest.approx(mean)
                assert staleness["versions_mean"] == pytest.approx(updates * mean)
                assert staleness["versions_max"] == updates * staleness["steps_max"]
                if source == learner:
                    found.append(staleness["steps_max"])
    return found


@pytest.mark.parametrize(("staleness", "seed"), [(1, 0), (1, 1), (2, 2), (3, 3)])
def test_in_any_order_every_rollout_is_learnt_once_and_in_time(runs: Runs, staleness: int, seed: int) -> None:
    config = asynchronous(runs, *AGENTS, staleness=staleness, steps=4, evaluation={"problems": 3, "every": 2})
    order = Order(random_order(seed))
    run = finish(config, order)
    check_all_learnt_once(config)
    ages = check_staleness(config)
    assert max(ages) > 0
    assert set(Counter(order.ran).values()) == {1}
    assert run.trainer.steps_done == 4
    assert [line["step"] for line in lines(config.output, "evaluations.jsonl")] == [0, 2, 4]


def test_one_order_gives_one_result(runs: Runs) -> None:
    folders = []
    for _ in range(2):
        config = asynchronous(runs, *AGENTS, steps=3, evaluation={"problems": 3})
        finish(config, Order(random_order(5)))
        folders.append(Path(config.output))
    assert differing_files(*folders) == []


def test_threads_do_the_same_work_in_whatever_order(runs: Runs) -> None:
    config = asynchronous(runs, *AGENTS, steps=3, evaluation={"problems": 3, "every": 2}, every=2)
    with LocalRun(config) as run:
        run.train()
        run.save()
    check_all_learnt_once(config)
    check_staleness(config)
    assert [line["step"] for line in lines(config.output, "evaluations.jsonl")] == [0, 2, 3]
    seconds = lines(config.output, "timings.jsonl")
    assert [line["step"] for line in seconds] == [1, 2, 3]
    for line in seconds:
        assert {
            f"{phase}/{name}" for phase in ("rollout", "verify", "learn") for name in AGENTS
        } <= line.keys()


def test_without_overlap_an_asynchronous_run_is_the_synchronous_one(runs: Runs) -> None:
    """If no batch is sampled before the weights of the last step are there, nothing is stale."""
    options = {"steps": 3, "evaluation": {"problems": 3, "every": 2}}
    synchronous = asynchronous(runs, "char", "twin", "pair", staleness=0, **options)
    with LocalRun(synchronous) as run:
        run.train()
        run.save()
    config = asynchronous(runs, "char", "twin", "pair", staleness=2, **options)

    def is_early(job: Job) -> bool:
        return job.kind == "sample" and ("publish", job.agent, job.step - 1) not in order.ran

    order = Order(delayed(is_early))
    finish(config, order)
    assert check_staleness(config, updates=6) == [0] * 9
    expected, found = (lines(one.output, "metrics.jsonl") for one in (synchronous, config))
    for line in found:
        for report in line["agents"].values():
            del report["asynchronous"]
    assert found == expected
    folders = [Path(one.output) for one in (synchronous, config)]
    assert differing_files(*folders) == ["metrics.jsonl"]  # weights, rollouts, evaluations: equal


def test_without_staleness_the_run_is_the_synchronous_one(runs: Runs) -> None:
    config = asynchronous(runs, *AGENTS, staleness=0, steps=1)
    with LocalRun(config) as run:
        assert type(run.trainer) is Trainer
        run.train()
    (line,) = lines(config.output, "metrics.jsonl")
    assert "asynchronous" not in line["agents"]["char"]
    assert "late_from" not in logged(config, 1, "char", learnt=True)[0]


def test_agents_that_learn_alone_do_not_wait(runs: Runs) -> None:
    """The agent "pair" samples nothing until "char" has made all its steps."""
    config = asynchronous(runs, *AGENTS, steps=3, method=GSPO)
    done: list[int] = []
    order = Order(delayed(lambda job: job.agent == "pair" and ("learn", "char", 3) not in order.ran))
    finish(config, order)
    assert order.ran.index(("learn", "char", 3)) < order.ran.index(("sample", "pair", 1))
    assert done == []


def test_a_slow_agent_holds_the_others_only_for_their_patience(runs: Runs) -> None:
    """Batch 2 of "pair" is there only when "char" has learnt step 2: "char" learns it a step late."""
    config = asynchronous(runs, *AGENTS, staleness=2, patience=5.0, steps=5)
    order = Order(delayed(lambda job: job.agent == "pair" and job.step == 2 and not has_learnt(2)))

    def has_learnt(step: int) -> bool:
        return ("learn", "char", step) in order.ran

    notes = Notes()
    finish(config, order, [notes])
    check_all_learnt_once(config, {("char", "pair", 2)})
    assert [note for note in notes.notes if "without the rollouts" in note] == [
        "agent char learns step 2 without the rollouts of pair, after it has waited for them for 5 s "
        "(asynchronous.patience). Metrics count what is missing in every step"
    ]
    reports = {line["step"]: line["agents"] for line in lines(config.output, "metrics.jsonl")}
    char = {step: report["char"]["asynchronous"] for step, report in reports.items()}
    assert [char[step]["missing"] for step in range(1, 6)] == [{}, {"pair": 16}, {}, {}, {}]
    assert [char[step]["late"] for step in range(1, 6)] == [{}, {}, {"pair": 16}, {}, {}]
    assert all(report["too_late"] == {} for report in char.values())
    rows = [row for row in logged(config, 3, "char", learnt=True) if "late_from" in row]
    assert len(rows) == 16
    assert {(row["agent"], row["late_from"], row["step"]) for row in rows} == {("pair", 2, 3)}
    # "pair" had learnt step 1 when it answered batch 2: in step 3, 3 - 1 - 1 = 1 step old
    assert char[3]["staleness"]["pair"] == {
        "steps_mean": 1.0,
        "steps_max": 1,
        "versions_mean": 4.0,
        "versions_max": 4,
    }
    assert reports[2]["pair"]["asynchronous"]["missing"] == {}


def test_rollouts_that_come_too_late_are_counted_and_forgotten(runs: Runs) -> None:
    """The first answers of "pair" come when "char" has learnt step 3, and one step is allowed."""
    config = asynchronous(runs, *AGENTS, staleness=1, patience=0.0, steps=4)
    order = Order(delayed(lambda job: job.agent == "pair" and ("learn", "char", 3) not in order.ran))
    finish(config, order)
    char = [line["agents"]["char"]["asynchronous"] for line in lines(config.output, "metrics.jsonl")]
    assert [report["missing"] for report in char[:3]] == [{"pair": 16}] * 3
    # batch 1 is given up in step 3, when it would be 2 steps old, and batch 2 in step 4
    assert [report["too_late"] for report in char[:4]] == [{}, {}, {"pair": 16}, {"pair": 16}]
    assert sum(sum(report["late"].values()) for report in char) <= 16  # batch 3, if it was there in time
    check_staleness(config)


def test_a_long_wait_is_noted(runs: Runs) -> None:
    config = asynchronous(runs, *AGENTS, steps=1)
    order = Order(delayed(lambda job: job.agent == "pair" and order.now < 61))
    notes = Notes()
    finish(config, order, [notes])
    assert [note for note in notes.notes if "has waited" in note] == [
        "agent char has waited 60 s in step 1 for the rollouts of pair; asynchronous.patience=SECONDS lets "
        "agents go on without slower ones"
    ]


def count_answers(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Count the batches that agents were asked to answer."""
    asked: Counter[tuple[str, int]] = Counter()
    answer = LocalExecutor.answer

    def counting(self: Any, assignment: Any, agents: Any, reporter: Any) -> Any:
        if assignment.phase == "rollout":
            asked.update((agent, assignment.step) for agent in agents)
        return answer(self, assignment, agents, reporter)

    monkeypatch.setattr(LocalExecutor, "answer", counting)
    return asked


@pytest.mark.parametrize(
    ("every", "killed"),
    [
        (1, ("learn", "char", 3)),
        (2, ("learn", "pair", 4)),
        (0, ("learn", "char", 3)),  # no checkpoint yet: from the beginning, and from the log
        (1, ("sample", "pair", 4)),
        (1, ("publish", "char", 2)),
        (2, ("evaluate", "char", 2)),
    ],
)
def test_a_killed_run_goes_on_and_samples_nothing_twice(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, every: int, killed: tuple[str, str, int]
) -> None:
    asked = count_answers(monkeypatch)
    config = asynchronous(
        runs, *AGENTS, staleness=2, steps=5, every=every, evaluation={"problems": 3, "every": 2}
    )
    order = Order(random_order(4))
    order.kill_at = killed
    with pytest.raises(KeyboardInterrupt), open_run(config, order) as run:
        run.train()
    checkpoints = [path.name for path in Path(config.output).glob("checkpoints/step-*")]
    saved = int(max(checkpoints, default="step-000000")[5:11])  # steps that all agents had made
    sampled = {(agent, step) for kind, agent, step in order.ran[:-1] if kind == "sample"}
    assert set(asked) == sampled
    again, notes = Order(oldest_first), Notes()
    run = finish(config, again, [notes])
    assert run.trainer.steps_done == 5
    check_all_learnt_once(config)
    assert {line["step"] for line in lines(config.output, "evaluations.jsonl")} == {0, 2, 4, 5}
    assert set(asked.values()) == {1}  # each batch of each agent was asked for once, in both lives together
    assert min(step for kind, _, step in again.ran if kind == "learn") == saved + 1
    if any(batch > 2 for _, batch in sampled):
        assert "rollouts that the log holds already are read from it, not sampled again" in notes.notes


def test_rollouts_of_a_policy_that_was_lost_are_not_compared_with_the_learner(runs: Runs) -> None:
    """Batch 3 was sampled after step 2, which is learnt again in another order with other weights."""
    config = asynchronous(runs, *AGENTS, staleness=1, steps=4, every=1)
    order = Order(oldest_first)
    order.kill_at = ("learn", "char", 3)
    with pytest.raises(KeyboardInterrupt), open_run(config, order) as run:
        run.train()
    newest = max(path for path in (Path(config.output) / "checkpoints").iterdir() if path.is_dir())
    assert newest.name.startswith("step-000002")
    shutil.rmtree(newest)  # as if the run had been killed before this checkpoint
    with open_run(config, Order(oldest_first)) as resumed:
        trainer = resumed.trainer
        trainer._open(4)
        assert trainer.steps_done == 1
        lost = trainer._ledger._of_lost_policies
        versions = {
            (batch, name): {v.rollout.newest_version for v in rollouts}
            for batch, by_agent in trainer._ledger.rollouts.items()
            for name, rollouts in by_agent.items()
        }
        assert lost == {key for key, found in versions.items() if max(found) > 4}
        assert lost
        resumed.train()
        resumed.save()
    check_all_learnt_once(config)


def test_an_interrupted_run_ends_its_jobs_and_goes_on(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_answers(monkeypatch)
    config = asynchronous(runs, *AGENTS, steps=4, every=2)
    order = Order(oldest_first)

    class Interrupts(Observer):
        def on_phase(self, step: int, phase: str, agent: str) -> None:
            if (step, phase, agent) == (2, "learn", "pair"):
                run.interrupt()

    with open_run(config, order, [Interrupts()]) as run:
        run.train()
        assert run.is_interrupted
        under_way = set(order.pending)
        assert not under_way  # jobs that had started have ended, and their rollouts are in the log
        run.save()
    assert ("learn", "pair", 2) in order.ran
    assert ("learn", "pair", 3) not in order.ran
    again = Order(oldest_first)
    finish(config, again)
    assert not set(order.ran) & {one for one in again.ran if one[0] in ("sample", "learn")}
    assert set(asked.values()) == {1}
    check_all_learnt_once(config)


def test_a_run_that_is_stopped_ends_with_all_agents_at_the_same_step(runs: Runs) -> None:
    config = asynchronous(runs, *AGENTS, steps=9, evaluation={"problems": 3})
    order = Order(oldest_first)

    class Stops(Observer):
        def on_phase(self, step: int, phase: str, agent: str) -> None:
            if (step, phase, agent) == (2, "learn", "char"):
                run.trainer.stop()

    with open_run(config, order, [Stops()]) as run:
        run.train()
        assert run.trainer.steps_done == 2
        run.save()
    assert [line["step"] for line in lines(config.output, "metrics.jsonl")] == [1, 2]
    assert [line["step"] for line in lines(config.output, "evaluations.jsonl")] == [0, 2]


def test_an_error_in_a_lane_ends_the_run_with_it(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    config = asynchronous(runs, *AGENTS, steps=3)
    learn = LocalExecutor.learn

    def failing(self: Any, groups: Any, capabilities: Any, step: int, agents: Any, reporter: Any) -> Any:
        if (step, agents) == (2, ["pair"]):
            raise TrainingError("the learner of pair is gone")
        return learn(self, groups, capabilities, step, agents, reporter)

    monkeypatch.setattr(LocalExecutor, "learn", failing)
    with LocalRun(config) as run, pytest.raises(TrainingError, match="the learner of pair is gone"):
        run.train()
    assert logged(config, 1, "pair", learnt=True)


def test_when_one_agent_fails_what_the_others_have_sampled_is_kept(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of "pair" to batch 1 are there, but not yet handled, when "char" fails."""
    config = asynchronous(runs, *AGENTS, steps=3)
    has_answered = threading.Event()
    answer = LocalExecutor.answer

    def failing(self: Any, assignment: Any, agents: Any, reporter: Any) -> Any:
        if agents == ["char"]:
            yield from fail_after(has_answered)
        yield from answer(self, assignment, agents, reporter)
        has_answered.set()

    monkeypatch.setattr(LocalExecutor, "answer", failing)
    with LocalRun(config) as run, pytest.raises(TrainingError, match="the engine of char is gone"):
        run.train()
    assert len(logged(config, 1, "pair")) == 16


def fail_after(event: threading.Event) -> Iterator[Any]:
    assert event.wait(60)
    raise TrainingError("the engine of char is gone")
    yield


def test_a_paused_agent_is_not_waited_for_and_is_still_evaluated(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The detector finds "pair" collapsed after step 2."""
    steps: list[int] = []

    def update(self: CollapseDetector, rollouts: Any) -> list[str]:
        steps.append(len(steps) + 1)
        if len(steps) == 2:
            self.paused.add("pair")
        return []

    monkeypatch.setattr(CollapseDetector, "update", update)
    config = asynchronous(runs, *AGENTS, steps=5, every=3, evaluation={"problems": 3, "every": 3})
    with LocalRun(config) as run:
        run.train()
        run.save()
    agents = [set(line["agents"]) for line in lines(config.output, "metrics.jsonl")]
    assert agents[:2] == [set(AGENTS)] * 2
    assert agents[4] == {"char"}  # "pair" may have been learning step 3, or 4, when it was paused
    evaluations = lines(config.output, "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 3, 5]
    assert all(set(line["agents"]) == set(AGENTS) for line in evaluations)


def test_single_steps_are_refused(runs: Runs) -> None:
    with (
        LocalRun(asynchronous(runs, *AGENTS, steps=1)) as run,
        pytest.raises(TrainingError, match=r"asynchronous.max_staleness=0"),
    ):
        run.trainer.step(1)
