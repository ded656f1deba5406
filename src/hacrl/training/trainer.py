"""The loop of HACRL (algorithm 1): all agents generate, and every agent learns from all verified rollouts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hacrl.algorithms.capability import Capabilities, CapabilityTracker
from hacrl.config.schema import RunConfig
from hacrl.errors import EngineMismatchError, TrainingError, WorkerLostError
from hacrl.rollouts.groups import PromptGroup, group_by_prompt
from hacrl.rollouts.log import RolloutLog
from hacrl.tasks.stream import ProblemStream
from hacrl.training.executor import Executor
from hacrl.training.health.collapse import CollapseDetector
from hacrl.training.health.monitor import HealthMonitor
from hacrl.training.metrics import (
    NOTHING_LEARNT,
    Accuracy,
    AgentReport,
    LearnReport,
    StepReport,
    accuracy_by_problem,
    rollout_report,
)
from hacrl.training.recovery import Recovery, no_recovery
from hacrl.training.reporter import Reporter
from hacrl.training.resampling import Resampler
from hacrl.training.state import StepProgress
from hacrl.training.tensor_files import WrittenFile, tensor_file
from hacrl.training.worker import Assignment
from hacrl.types import Problem, VerifiedRollout

Result = TypeVar("Result")


class Trainer:
    """Trains any number of agents, together or each alone, as the method defines."""

    def __init__(
        self,
        config: RunConfig,
        executor: Executor,
        stream: ProblemStream,
        test_problems: Sequence[Problem] = (),
        log: RolloutLog | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        names = [agent.name for agent in config.agents]
        self.config = config
        self.executor = executor
        self.reporter = reporter or Reporter()
        self.capabilities = CapabilityTracker.of(names, config.method)
        self.steps_done = 0  # whole steps, those of an earlier process included
        self.after_step: Callable[[], None] = lambda: None  # called after each step and its evaluation
        self.recovery: Recovery | None = None  # what brings lost agents back; None: a loss ends the run
        # The agents' accuracies before the first step, if another run has measured the same
        self.start_accuracies: Mapping[str, Accuracy] | None = None
        self.stream = stream
        self._resampler = Resampler(config, stream)
        self._test_problems = test_problems
        self._log = log
        self._collapse = CollapseDetector(names, pauses=config.pause_collapsed)
        self._health = HealthMonitor(config)
        self._progress: StepProgress | None = None  # of a step that is under way
        self._capabilities_before = self.capabilities.state_dict()  # before the step under way
        self._evaluated_at = -1  # the step after which the agents were evaluated last
        self._notes_logged_rollouts = True
        self._frozen = {agent.name for agent in config.agents if agent.frozen}
        # an endpoint leaves out what it cannot answer
        self._may_miss_answers = {agent.name for agent in config.agents if agent.endpoint is not None}
        self._frozen_accuracies: dict[str, Accuracy] = {}  # a frozen agent is evaluated once
        self._dropped: set[str] = set()  # agents that were lost and are not rebuilt
        self._is_stopping = False

    def train(self, steps: int) -> None:
        """Evaluate, make ``steps`` steps in all, evaluate; in between as often as the settings say."""
        self._evaluate_if_due(steps)
        while self.steps_done < steps and not self._is_stopping:
            self.step(self.steps_done + 1)
            self._evaluate_if_due(steps)
            self.after_step()

    def stop(self) -> None:
        """End after the step under way. A run that is stopped is evaluated and saved like any other."""
        self._is_stopping = True

    def interrupt(self) -> None:
        """Raise :class:`TrainingInterrupted` after the phase under way. May be called by a signal."""
        self.reporter.interrupt()

    def step(self, step: int) -> StepReport:
        """Make one step, or finish one that was interrupted."""
        progress = self._begin(step)
        asked = self._ask(self.stream.batch(step - 1), progress)
        groups = self._resampler.chosen(asked)
        capabilities = self._update_capabilities(asked)
        reports = self._learn(groups, capabilities, progress)
        return self._end(progress, reports, replaced=len(asked) - len(groups))

    def evaluate(self, step: int) -> dict[str, Accuracy]:
        """Evaluate every agent alone, on the same held-out problems with the same random draws every time."""
        if not self._test_problems:
            return {}
        self.reporter.check_interrupted()
        self.reporter.step = step
        samples = self.config.evaluation.samples_per_problem
        assignment = Assignment("evaluate", self._test_problems, step)
        found: dict[str, Accuracy] = dict(self.start_accuracies or {}) if step == 0 else {}
        found |= self._frozen_accuracies
        for name, answer in self._from_all(
            lambda: self.remaining,
            found,
            lambda names: self.executor.answer(assignment, names, self.reporter),
        ):
            self.reporter.notes(answer.notes)
            found[name] = accuracy_by_problem(answer.rollouts, samples)
        self._frozen_accuracies = {name: found[name] for name in self._frozen & found.keys()}
        accuracies = {name: found[name] for name in self.remaining}
        self._evaluated_at = step
        self.reporter.observer.on_evaluation(step, accuracies)
        return accuracies

    @property
    def remaining(self) -> list[str]:
        """All agents but those that were lost and dropped."""
        return [agent.name for agent in self.config.agents if agent.name not in self._dropped]

    @property
    def learners(self) -> list[str]:
        """The remaining agents that are trained: all but the frozen ones."""
        return [name for name in self.remaining if name not in self._frozen]

    @property
    def active(self) -> list[str]:
        """The agents that take part: the remaining ones that are not paused."""
        return [name for name in self.remaining if name not in self._collapse.paused]

    @property
    def phases_done(self) -> int:
        """Number of agents' phases that are done of the step under way, if there is one."""
        return 0 if self._progress is None else self._progress.phases

    def _begin(self, step: int) -> StepProgress:
        """Return an empty progress, or what an interrupted run had done of the step."""
        if not set(self.active) - self._frozen:
            raise TrainingError(
                f"there is no agent left to train: all are paused or lost since step {self.steps_done}"
            )
        self.reporter.check_interrupted()
        self.reporter.begin_step(step)
        if self._progress is None:
            self._progress = StepProgress(step)
            self._capabilities_before = self.capabilities.state_dict()
        else:  # the interrupted attempt may have added the step's rewards already
            self.capabilities.load_state_dict(self._capabilities_before)
        assert self._progress.step == step, f"step {self._progress.step} is under way, not {step}"
        return self._progress

    def _ask(self, problems: Sequence[Problem], progress: StepProgress) -> list[PromptGroup]:
        """Return all agents' responses to the step's problems, and to those of further rounds."""
        asked = group_by_prompt(self._answer(problems, progress))
        for number, others in self._resampler.further_rounds(progress.step, asked):
            asked += group_by_prompt(self._answer(others, progress, number))
        return asked

    def _answer(
        self, problems: Sequence[Problem], progress: StepProgress, number: int = 0
    ) -> dict[str, list[VerifiedRollout]]:
        """Return every active agent's verified rollouts of a round; all are in the rollout log then."""
        answered = progress.round(number)
        self._read_logged(problems, progress, number)
        assignment = Assignment("rollout", problems, progress.step, round=number)
        if self._log is not None and any(name not in answered for name in self.active):
            self._log.discard_rounds_after(progress.step, number)
        for name, answer in self._from_all(
            lambda: self.active,
            answered,
            lambda names: self.executor.answer(assignment, names, self.reporter),
        ):
            if self._log is not None:
                self._log.append(progress.step, name, answer.rollouts, number)
            progress.syncs[name] = answer.sync
            self._add_rollouts(progress, name, answer.rollouts, number)
            self.reporter.notes(answer.notes)
        self.reporter.check_interrupted()  # also if the executor has announced no phase
        return {name: answered[name] for name in self.active}

    def _update_capabilities(self, groups: Sequence[PromptGroup]) -> Capabilities:
        """Add the step's rewards, and return all agents' capabilities."""
        rewards = {
            name: [reward for group in groups for reward in group.rewards.get(name, ())]
            for name in self.active
        }
        earning = {name: values for name, values in rewards.items() if values}  # not all episodes failed
        absent = {agent.name for agent in self.config.agents} - earning.keys()
        self.capabilities.record(earning, absent=absent)
        return self.capabilities.current

    def _learn(
        self, groups: Sequence[PromptGroup], capabilities: Capabilities, progress: StepProgress
    ) -> dict[str, LearnReport]:
        """Let every active agent learn from all rollouts; return what each reports."""
        learnt = self._from_all(
            lambda: [name for name in self.active if name not in self._frozen],
            progress.reports,
            lambda names: self.executor.learn(groups, capabilities, progress.step, names, self.reporter),
        )
        try:
            for name, report in learnt:
                if self._log is not None:
                    self._log.append_learnt(progress.step, name, report.learnt)
                progress.reports[name] = replace(report, learnt=())
                self.reporter.notes(report.notes)
        except EngineMismatchError as error:
            if self._log is not None and error.agent is not None:  # a resumed run samples them again
                self._log.discard(progress.step, error.agent)
            raise
        return progress.reports

    def _end(self, progress: StepProgress, reports: Mapping[str, LearnReport], replaced: int) -> StepReport:
        """Report the step to the observers, and return the report.

        ``replaced``: prompts without variance that other prompts replaced.
        """
        rollouts = progress.rollouts
        versions, capabilities = self.executor.policy_versions, self.capabilities.current
        min_reward = self.config.method.min_reward
        prompts = len({one.rollout.problem.id for found in rollouts.values() for one in found})
        asked = {name: prompts * count for name, count in self.executor.rollouts_per_prompt.items()}
        report = StepReport(
            progress.step,
            {
                name: AgentReport(
                    capability=self.capabilities.capability(name),
                    policy_version=versions[name],
                    rollout=rollout_report(rollouts[name], min_reward, replaced, asked[name]),
                    learning=NOTHING_LEARNT if name in self._frozen else reports[name],
                    engine=progress.syncs.get(name),
                    capability_ratios={
                        other: capabilities.ratio(name, other) for other in self.active if other != name
                    },
                )
                for name in self.active
            },
        )
        self.reporter.notes([*self._health.update(report), *self._collapse.update(rollouts)])
        self.steps_done, self._progress = progress.step, None
        self.reporter.observer.on_step(report, self.reporter.end_step())
        return report

    def _evaluate_if_due(self, steps: int) -> None:
        """Evaluate before the first step, after the last one, every so often, and where training stops."""
        step, every = self.steps_done, self.config.evaluation.every
        is_due = step in (0, steps) or self._is_stopping or (every and step % every == 0)
        if is_due and self._evaluated_at != step and self._progress is None:
            self.evaluate(step)

    def _read_logged(self, problems: Sequence[Problem], progress: StepProgress, number: int) -> None:
        """Take rollouts that an earlier process sampled with the same policies from the log."""
        if self._log is None:
            return
        for name in self.active:
            if name in progress.round(number) or not self._log.has(progress.step, name, number):
                continue
            rollouts = self._log.load(progress.step, name, problems, number)
            expected = len(problems) * self.executor.rollouts_per_prompt[name]
            versions = {verified.rollout.policy_version for verified in rollouts}
            current = self.executor.policy_versions[name]
            is_whole = len(rollouts) == expected or name in self._may_miss_answers
            if is_whole and versions <= {current}:
                self._add_rollouts(progress, name, rollouts, number)
                if self._notes_logged_rollouts:
                    self._notes_logged_rollouts = False
                    note = "rollouts that the log holds already are read from it, not sampled again"
                    self.reporter.notes([note])
            else:
                note = (
                    f"the log's rollouts of {name} are sampled again: the log has {len(rollouts)} of "
                    f"{expected}, of policy versions {sorted(versions)}, and the agent is at version "
                    f"{current}"
                )
                self.reporter.notes([note])

    def _add_rollouts(
        self, progress: StepProgress, name: str, rollouts: list[VerifiedRollout], number: int
    ) -> None:
        progress.round(number)[name] = rollouts
        self.reporter.observer.on_rollouts(progress.step, name, rollouts)

    def _from_all(
        self,
        wanted: Callable[[], Collection[str]],
        done: Mapping[str, object],
        ask: Callable[[Sequence[str]], Iterable[tuple[str, Result]]],
    ) -> Iterator[tuple[str, Result]]:
        """Yield the results of all wanted agents that are not done, as they come.

        An agent that is lost meanwhile is brought back and asked again, or not wanted any more.
        """
        while missing := [name for name in wanted() if name not in done]:
            try:
                yield from ask(missing)
                return
            except WorkerLostError as error:
                self._recover(error)

    def _in_spite_of_losses(self, call: Callable[[], Result]) -> Result:
        """Return the call's result; bring lost agents back and call again as often as necessary."""
        while True:
            try:
                return call()
            except WorkerLostError as error:
                self._recover(error)

    def _recover(self, error: WorkerLostError) -> None:
        """Bring lost agents back to where the run is, or go on without them, as the recipe says."""
        if self.recovery is None:
            raise error
        if self.recovery.on_loss == "stop":
            raise no_recovery(error) from error
        self.reporter.notes([f"lost: {error}"])
        if self.recovery.on_loss == "drop":
            self._drop(error.lost)
            return
        versions = self.executor.policy_versions  # before any agent is placed again

        def rebuild(agent: str) -> None:
            assert self.recovery is not None
            steps = self.steps_done + (self._progress is not None and agent in self._progress.reports)
            self.recovery.rebuild(self.executor, agent, steps, versions[agent], self.reporter)

        self.recovery.bring_back(error.lost, rebuild)

    def _drop(self, agents: Iterable[str]) -> None:
        for agent in agents:
            self.executor.drop(agent)
            self._dropped.add(agent)
            note = (
                f"agent {agent!r} is dropped (ray.on_loss: drop): the run goes on with "
                f"{', '.join(self.remaining) or 'no agent'}. Its last checkpoint stays in the run's folder"
            )
            self.reporter.notes([note])

    def save_agent(self, agent: str, folder: Path) -> None:
        """Write one agent as a plain Hugging Face folder."""
        self._in_spite_of_losses(lambda: self.executor.save(agent, folder))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the rest of the run depends on, without tensors; JSON-ready.

        Random draws are derived from names and steps, so there is no random state.
        """
        progress = self._progress
        return {
            "steps_done": self.steps_done,
            "evaluated": self._evaluated_at,
            "capabilities": self._capabilities_before if progress else self.capabilities.state_dict(),
            "health": self._health.state_dict(),
            "collapse": self._collapse.state_dict(),
            "agents": self._in_spite_of_losses(self.executor.state_dict),
            "dropped": sorted(self._dropped),
            "frozen_accuracies": {name: asdict(found) for name, found in self._frozen_accuracies.items()},
            "under_way": progress.as_json() if progress else None,
        }

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return every agent's trained weights and optimizer moments, not copied."""
        return self._in_spite_of_losses(self.executor.tensors)

    @property
    def writes_tensors(self) -> bool:
        """Whether :meth:`write_tensors` saves memory: it takes no copy of all tensors, but training waits."""
        return bool(getattr(self.executor, "writes_tensors", False))

    def write_tensors(self, folder: Path) -> dict[str, WrittenFile]:
        """Write every agent's tensors into a file of the folder; return the files by name."""

        def write() -> dict[str, WrittenFile]:
            for begun in folder.glob(tensor_file("*")):  # before an agent was lost
                begun.unlink()
            return self.executor.write_tensors(folder)

        return self._in_spite_of_losses(write)

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what :meth:`state_dict` and :meth:`tensors` returned."""
        self.steps_done, self._evaluated_at = state["steps_done"], state["evaluated"]
        self.capabilities.load_state_dict(state["capabilities"])
        self._capabilities_before = state["capabilities"]
        self._progress = None
        self._health.load_state_dict(state["health"])
        self._collapse.load_state_dict(state["collapse"])
        self._dropped = set(state["dropped"])
        self._frozen_accuracies = {
            name: Accuracy(**found) for name, found in state["frozen_accuracies"].items()
        }
        for agent in self._dropped:
            self.executor.drop(agent)
        self.executor.load_state_dict(state["agents"], tensors)
        if state["under_way"] is not None:
            problems = self.stream.problems if self._resampler.rounds else self.stream.batch(self.steps_done)
            self._progress = StepProgress.from_json(state["under_way"], problems, self._log)

    def report_restored_rollouts(self) -> None:
        """Show observers the rollouts of a step that an earlier process began."""
        if self._progress is not None:
            for answered in self._progress.rounds:
                for agent, rollouts in answered.items():
                    self.reporter.observer.on_rollouts(self._progress.step, agent, rollouts)
