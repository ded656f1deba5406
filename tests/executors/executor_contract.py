"""What every executor promises. A module that has an executor subclasses :class:`ExecutorContract`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from hacrl.algorithms.capability import Capabilities
from hacrl.config.schema import ReplicaSettings, RunConfig
from hacrl.errors import TaskError
from hacrl.rollouts.groups import PromptGroup, group_by_prompt
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.asynchronous.schedule import Job
from hacrl.training.executor import Executor
from hacrl.training.observer import Observer, Phase
from hacrl.training.reporter import Reporter, TrainingInterrupted
from hacrl.training.worker import Assignment
from hacrl.types import Rollout, Verdict, VerifiedRollout
from tests.support.chaos import chaos_config, differing_files
from tests.training.asynchronous.orders import Order, delayed, finish, lines, logged

AGENTS = ["small", "llama"]
EQUAL = Capabilities({"small": 0.5, "llama": 0.5}, 0.1, 10.0)
PER_STEP = 4 * 4  # prompts x responses to each, of one agent


class Seen(Observer):
    """Counts phases and responses."""

    def __init__(self) -> None:
        self.phases: Counter[tuple[Phase, str]] = Counter()
        self.responses: Counter[str] = Counter()

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        self.phases[phase, agent] += 1

    def on_response(self, agent: str) -> None:
        self.responses[agent] += 1


class ExecutorContract:
    """Tests of one executor. Subclasses set ``settings``: the config's fields that choose it."""

    settings: ClassVar[Mapping[str, Any]]

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
        return replace(chaos_config(tmp_path_factory.mktemp("contract") / "run", 3), **cls.settings)

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, config: RunConfig) -> Iterator[LocalRun]:
        with LocalRun(config) as run:
            yield run

    @pytest.fixture(scope="class")
    @classmethod
    def executor(cls, run: LocalRun) -> Executor:
        return run.trainer.executor

    @pytest.fixture(scope="class")
    @classmethod
    def rollouts(cls, run: LocalRun) -> dict[str, list[VerifiedRollout]]:
        """Every agent's answers to the problems of step 1, with the weights that it began with."""
        return answers(run.trainer.executor, run, Reporter())

    def test_a_whole_run_is_that_of_the_local_executor(self, config: RunConfig, tmp_path: Path) -> None:
        run_locally(chaos_config(tmp_path / "local", 2))
        run_locally(replace(chaos_config(tmp_path / "other", 2), **self.settings))
        assert len((tmp_path / "local" / "metrics.jsonl").read_text().splitlines()) == 2
        assert differing_files(tmp_path / "local", tmp_path / "other") == []

    def test_an_asynchronous_run_without_overlap_is_the_synchronous_one(self, tmp_path: Path) -> None:
        """No batch is sampled before the weights of the step before it are published."""
        run_locally(replace(asynchronous(tmp_path / "synchronous", 0), **self.settings))
        config = replace(asynchronous(tmp_path / "other", 1), **self.settings)

        def is_early(job: Job) -> bool:
            return job.kind == "sample" and ("publish", job.agent, job.step - 1) not in order.ran

        order = Order(delayed(is_early))
        finish(config, order)
        assert differing_files(tmp_path / "synchronous", tmp_path / "other") == ["metrics.jsonl"]
        expected, found = (lines(tmp_path / which, "metrics.jsonl") for which in ("synchronous", "other"))
        for line in found:
            for report in line["agents"].values():
                staleness = report.pop("asynchronous")["staleness"]
                assert {one["steps_max"] for one in staleness.values()} == {0}
        assert found == expected

    def test_an_asynchronous_run_samples_beside_learning(self, tmp_path: Path) -> None:
        config = replace(asynchronous(tmp_path / "run", 1), **self.settings)
        seen = Seen()
        run_locally(config, [seen])
        steps = lines(tmp_path / "run", "metrics.jsonl")
        assert [line["step"] for line in steps] == [1, 2, 3]
        oldest = [
            line["agents"][name]["asynchronous"]["staleness"][name]["steps_max"]
            for line in steps
            for name in AGENTS
        ]
        assert oldest[:2] == [0, 0]
        assert max(oldest) <= 1
        assert seen.phases["rollout", "small"] == seen.phases["learn", "small"] == 3
        for step in (1, 2, 3):
            for name in AGENTS:
                keys = [
                    (row["agent"], row["problem"], row["sample"])
                    for row in logged(config, step, name, learnt=True)
                ]
                assert len(set(keys)) == len(keys) == len(AGENTS) * PER_STEP

    def test_agents_answer_every_problem(
        self, executor: Executor, run: LocalRun, rollouts: dict[str, list[VerifiedRollout]]
    ) -> None:
        assert executor.rollouts_per_prompt == {"small": 4, "llama": 4}
        assert set(executor.devices.values()) == {"cpu"}
        problems = [problem.id for problem in run.trainer.stream.batch(0)]
        assert sorted(rollouts) == sorted(AGENTS)
        for name, found in rollouts.items():
            assert [one.rollout.problem.id for one in found] == [key for key in problems for _ in range(4)]
            assert {one.rollout.agent for one in found} == {name}
            assert {one.rollout.policy_version for one in found} == {0}

    def test_equal_assignments_give_equal_answers(
        self, executor: Executor, run: LocalRun, rollouts: dict[str, list[VerifiedRollout]]
    ) -> None:
        assert answers(executor, run, Reporter()) == rollouts

    def test_phases_and_responses_are_reported(self, executor: Executor, run: LocalRun) -> None:
        seen, reporter = Seen(), None
        reporter = Reporter(seen)
        reporter.begin_step(1)
        answers(executor, run, reporter)
        assert seen.responses == {"small": PER_STEP, "llama": PER_STEP}
        assert {key: seen.phases[key] for key in seen.phases} == {
            (phase, name): 1 for phase in ("rollout", "verify") for name in AGENTS
        }
        assert sorted(key for key in reporter.seconds if key.startswith("rollout/")) == [
            "rollout/llama",
            "rollout/small",
        ]

    def test_a_state_is_restored_exactly(
        self, executor: Executor, rollouts: dict[str, list[VerifiedRollout]]
    ) -> None:
        groups = group_by_prompt({name: rollouts[name] for name in AGENTS})
        state, tensors = executor.state_dict(), copied(executor.tensors())
        json.dumps(state)
        assert sorted(state) == sorted(tensors) == sorted(AGENTS)
        reports = dict(executor.learn(groups, EQUAL, 1, AGENTS, Reporter()))
        learnt = copied(executor.tensors())
        updates = {name: reports[name].updates for name in AGENTS}
        assert min(updates.values()) > 0
        assert executor.policy_versions == updates
        for name in AGENTS:
            assert not equal(learnt[name], tensors[name])
        executor.load_state_dict(state, tensors)
        assert executor.policy_versions == {"small": 0, "llama": 0}
        for name in AGENTS:
            assert equal(executor.tensors()[name], tensors[name])
        only_one = dict(executor.learn(groups, EQUAL, 1, ["llama"], Reporter()))
        assert list(only_one) == ["llama"]
        after = executor.tensors()
        assert equal(after["llama"], learnt["llama"])
        assert equal(after["small"], tensors["small"])
        executor.load_state_dict({"llama": state["llama"]}, {"llama": tensors["llama"]})

    def test_a_saved_agent_is_a_plain_folder(self, executor: Executor, tmp_path: Path) -> None:
        executor.save("llama", tmp_path / "saved")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        trained = {tensor.numpy().tobytes() for tensor in executor.tensors()["llama"].values()}
        weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
        assert len(weights) > 10
        assert all(weight in trained for weight in weights)

    def test_an_interrupted_run_begins_no_verb(self, executor: Executor, run: LocalRun) -> None:
        reporter = Reporter()
        reporter.interrupt()
        before = executor.policy_versions
        with pytest.raises(TrainingInterrupted):
            answers(executor, run, reporter)
        groups: list[PromptGroup] = []
        with pytest.raises(TrainingInterrupted):
            list(executor.learn(groups, EQUAL, 1, AGENTS, reporter))
        assert executor.policy_versions == before

    def test_an_error_of_the_task_reaches_the_run(self, tmp_path: Path) -> None:
        task = {"name": "tests.executors.executor_contract:BrokenTask"}
        base = chaos_config(tmp_path / "run", 1, task=task)
        with pytest.raises(TaskError, match="the judge is ill"):
            run_locally(replace(base, **self.settings))

    def test_a_dropped_agent_takes_part_in_nothing(self, config: RunConfig, tmp_path: Path) -> None:
        with LocalRun(replace(config, output=str(tmp_path / "run"))) as run:
            executor = run.trainer.executor
            executor.drop("small")
            assert list(executor.state_dict()) == list(executor.tensors()) == ["llama"]
            found = dict(executor.answer(assignment(run), ["llama"], Reporter()))
            assert len(found["llama"].rollouts) == PER_STEP


def asynchronous(output: Path, staleness: int) -> RunConfig:
    """Return a run whose agents sample with copies of their weights."""
    base = chaos_config(output, 3, asynchronous={"max_staleness": staleness})
    copies = ReplicaSettings(count=1)
    return replace(base, agents=tuple(replace(agent, replicas=copies) for agent in base.agents))


class BrokenTask:
    """A task whose verifier fails with an error that a user can act on."""

    def __init__(self) -> None:
        from hacrl.tasks.arithmetic import ArithmeticTask

        self._task = ArithmeticTask()
        self.name, self.max_reward = "broken", 1.0
        self.train, self.test = self._task.train, self._task.test

    def verify(self, rollouts: list[Rollout]) -> list[Verdict]:
        raise TaskError("the judge is ill")

    def close(self) -> None:
        self._task.close()


def assignment(run: LocalRun) -> Assignment:
    return Assignment("rollout", run.trainer.stream.batch(0), 1)


def answers(executor: Executor, run: LocalRun, reporter: Reporter) -> dict[str, list[VerifiedRollout]]:
    return {name: answer.rollouts for name, answer in executor.answer(assignment(run), AGENTS, reporter)}


def copied(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        agent: {name: tensor.detach().clone() for name, tensor in group.items()}
        for agent, group in tensors.items()
    }


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether the tensors of ``other`` are the same in ``one``, which may have moments besides."""
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())
