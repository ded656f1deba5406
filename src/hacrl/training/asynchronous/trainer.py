"""The loop of an asynchronous run: every agent samples while it learns, and all learn from each other.

Each agent's lanes (``schedule.py``) run its verbs in threads (``jobs.py``). Everything else happens here, in
one thread: what may start next, the rollout log, reports, checkpoints. Rollouts are in the log before any
agent learns from them.

A step is finished when all agents have learnt it. Then it is reported as in a synchronous run, with the
capabilities after it, and the agents may be ahead of it by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from hacrl.algorithms.capability import Capabilities, CapabilityTracker
from hacrl.config.schema import RunConfig
from hacrl.engines.base import SyncReport
from hacrl.errors import (
    CheckpointError,
    ConfigError,
    EngineMismatchError,
    TrainingError,
    WorkerLostError,
)
from hacrl.rollouts.log import RolloutLog
from hacrl.tasks.stream import ProblemStream
from hacrl.training.asynchronous.jobs import Ended, Jobs, LaneThreads
from hacrl.training.asynchronous.ledger import Ledger, Lesson, rewards_of
from hacrl.training.asynchronous.schedule import AgentState, Job, Schedule
from hacrl.training.executor import Executor
from hacrl.training.metrics import (
    NOTHING_LEARNT,
    Accuracy,
    AgentReport,
    LearnReport,
    StepReport,
    accuracy_by_problem,
    rollout_report,
)
from hacrl.training.observer import Observer
from hacrl.training.recovery import no_recovery
from hacrl.training.reporter import Reporter, TrainingInterrupted
from hacrl.training.trainer import Trainer
from hacrl.training.worker import Answer, Assignment
from hacrl.types import Problem, VerifiedRollout

POLL_SECONDS = 0.5  # between looks at requests to stop: a signal cannot wake the loop
NOTED_SECONDS = 60.0  # a learner that waits longer for other agents' rollouts is noted

Lessons = dict[str, tuple[Lesson, Capabilities]]


class AsynchronousTrainer(Trainer):
    """Trains agents that sample while they learn. ``make_jobs`` decides in which order their jobs run."""

    def __init__(
        self,
        config: RunConfig,
        executor: Executor,
        stream: ProblemStream,
        test_problems: Sequence[Problem] = (),
        log: RolloutLog | None = None,
        reporter: Reporter | None = None,
        make_jobs: Callable[[Observer], Jobs] = LaneThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, executor, stream, test_problems, log, reporter)
        if not hasattr(executor, "publish"):
            raise ConfigError(
                f"executor: {config.executor!r} has no publish, which asynchronous runs need "
                "(hacrl.training.executor.Executor); use executor: local, or asynchronous.max_staleness=0"
            )
        names = [agent.name for agent in config.agents]
        staleness = config.asynchronous.max_staleness
        self._names = names
        self._ledger = Ledger(names, executor.policy_versions, staleness)
        self._schedule = Schedule({name: AgentState() for name in names}, staleness, last_step=0)
        self._make_jobs = make_jobs
        self._clock = clock
        self._jobs: Jobs = LaneThreads(Observer())  # of the present training
        self._running: set[Job] = set()
        self._unhandled: list[Ended] = []  # that ended while a lost agent was brought back
        self._lessons: Lessons = {}  # of learners that are at a step
        self._seconds: dict[int, dict[str, float]] = {}  # of steps that are not finished
        self._noted_waits: set[tuple[str, int]] = set()  # learner and step
        self._last_missing: dict[str, frozenset[str]] = {}  # learner -> agents it did not wait for last
        self._paused_accuracies: dict[str, Accuracy] = {}

    def train(self, steps: int) -> None:
        """Evaluate, make ``steps`` steps in all, evaluate; in between as often as the settings say."""
        self._open(steps)
        jobs = self._jobs = self._make_jobs(self.reporter.observer)
        try:
            while self._running or self._unhandled or not self._has_finished:
                self._loop_once(jobs)
        except BaseException as error:
            self._abandon(jobs, error)
            raise
        jobs.close()

    def _abandon(self, jobs: Jobs, error: BaseException) -> None:
        """Give the jobs under way a moment to end, keep what they have sampled, and name those that hang."""
        for ended in jobs.close():
            job, agent = ended.job, ended.job.agent
            if ended.error is not None:
                error.add_note(f"Agent {agent!r} failed, too ({job.kind} {job.step}): {ended.error}")
            elif job.kind == "sample" and self._log is not None:
                self._log.append(job.step, agent, ended.result.rollouts)
        for job in jobs.running:
            error.add_note(f"Agent {job.agent!r} was still at work ({job.kind} {job.step}) and was abandoned")
        self._running.clear()

    def step(self, step: int) -> StepReport:
        """Refuse: the steps of an asynchronous run overlap."""
        raise TrainingError(
            "an asynchronous run makes no single steps: call train, or set asynchronous.max_staleness=0"
        )

    @property
    def phases_done(self) -> int:
        """Number of agents' phases that are done after the last step that all agents have finished."""
        return sum(
            state.learnt + state.sampled - 2 * self.steps_done for state in self._schedule.agents.values()
        )

    @property
    def _has_finished(self) -> bool:
        """Whether all steps are made and reported."""
        return self._schedule.is_finished and self.steps_done >= self._schedule.last_step

    def _open(self, steps: int) -> None:
        """Prepare the schedule; take what an earlier process has sampled from the log."""
        schedule = self._schedule
        schedule.last_step = max(steps, self.steps_done)
        schedule.patience = self.config.asynchronous.patience
        schedule.shares_rollouts = self.config.method.shares_rollouts
        schedule.updates_while_generating = self.executor.updates_while_generating
        schedule.evaluation_due = self._is_evaluation_due
        for name in (self._collapse.paused | self._dropped) & schedule.agents.keys():
            schedule.pause(name)
        for state in schedule.agents.values():
            state.published = -1  # also after an earlier call: an evaluation may have sent other weights
        self._read_log()
        self.reporter.begin_step(self.steps_done + 1)

    def _loop_once(self, jobs: Jobs) -> None:
        """Start what may start, then wait a little for what is under way."""
        schedule = self._schedule
        self._look_at_requests()
        for job in schedule.start(self._clock()):
            self._running.add(job)
            jobs.start(job, self._work(job))
        if not self._running and schedule.next_deadline() is None:
            self._explain_standstill()
        ended = self._unhandled.pop(0) if self._unhandled else jobs.next(self._seconds_to_wait())
        if ended is not None:
            self._running.discard(ended.job)
            self._end_job(ended)
        self._note_long_waits()
        self._finish_steps()

    def _look_at_requests(self) -> None:
        """Stop or interrupt the run, if that was asked for. Jobs under way end first."""
        if self._is_stopping:
            self._schedule.last_step = min(self._schedule.last_step, self._schedule.furthest)
        try:
            self.reporter.check_interrupted()
        except TrainingInterrupted:
            self._schedule.is_stopping = True
            if not self._running:
                self._schedule.is_stopping = False  # the trainer can go on
                raise

    def _explain_standstill(self) -> None:
        if not self._schedule.agents.keys() - self._frozen and not self._has_finished:
            raise TrainingError(
                f"there is no agent left to train: all are paused or lost since step {self.steps_done}"
            )
        waits = self._schedule.is_stopping or self._schedule.is_holding or self._schedule.is_finished
        assert waits or self._unhandled, f"no agent can go on: {self._schedule}"

    def _seconds_to_wait(self) -> float:
        deadline = self._schedule.next_deadline()
        if not self._running and deadline is None:
            return 0.0
        return POLL_SECONDS if deadline is None else min(POLL_SECONDS, max(0.0, deadline - self._clock()))

    # ---- jobs: what runs in a thread, and what its end means

    def _work(self, job: Job) -> Callable[[Observer], Any]:
        """Return what the job's thread does. All of the run's state that it needs is read here, now."""
        match job.kind:
            case "evaluate" if job.agent in self._frozen_accuracies:
                return lambda _: None
            case "learn" if job.agent in self._frozen:
                lesson = self._ledger.lesson(job, self._expected)
                self._lessons[job.agent] = lesson, self._capabilities_at(job.step)
                return lambda _: NOTHING_LEARNT
            case "sample" | "evaluate":
                is_rollout = job.kind == "sample"
                problems = self.stream.batch(job.step - 1) if is_rollout else self._test_problems
                phase: Literal["rollout", "evaluate"] = "rollout" if is_rollout else "evaluate"
                assignment = Assignment(phase, problems, job.step, weights="published")
                return partial(self._answer_job, job, assignment)
            case "learn":
                lesson = self._ledger.lesson(job, self._expected)
                self._lessons[job.agent] = lesson, self._capabilities_at(job.step)
                self._note_missing(job)
                return partial(self._learn_job, job, *self._lessons[job.agent])
            case _:
                return partial(self._publish_job, job)

    def _answer_job(self, job: Job, assignment: Assignment, events: Observer) -> Answer:
        reporter = self._reporter_of(job, events)
        ((_, answer),) = self.executor.answer(assignment, [job.agent], reporter)
        return answer

    def _learn_job(
        self, job: Job, lesson: Lesson, capabilities: Capabilities, events: Observer
    ) -> LearnReport:
        reporter = self._reporter_of(job, events)
        learnt = self.executor.learn(lesson.groups, capabilities, job.step, [job.agent], reporter)
        ((_, report),) = learnt
        return report

    def _publish_job(self, job: Job, events: Observer) -> SyncReport:
        with self._reporter_of(job, events).agent(job.agent).phase("sync"):
            return self.executor.publish(job.agent)

    def _reporter_of(self, job: Job, events: Observer) -> Reporter:
        """Return a reporter for one job; its times are added to those of the job's step."""
        reporter = Reporter(events)
        reporter.step = job.step
        if job.kind != "evaluate":
            step = job.step + 1 if job.kind == "publish" else job.step
            reporter.seconds = self._seconds.setdefault(step, {})
        return reporter

    def _end_job(self, ended: Ended) -> None:
        job = ended.job
        if isinstance(ended.error, WorkerLostError):
            self._recover(ended.error)
            return
        if ended.error is not None:
            if isinstance(ended.error, EngineMismatchError) and self._log is not None and job.kind == "learn":
                self._log.discard(job.step, job.agent)  # a resumed run samples them again
            raise ended.error
        match job.kind:
            case "sample":
                self._end_sampling(job, ended.result)
            case "evaluate":
                self._end_evaluation(job, ended.result)
            case "learn":
                self._end_learning(job, ended.result)
        self._schedule.finish(job, self._clock())

    def _recover(self, error: WorkerLostError) -> None:
        """Bring lost agents back to where they were, or go on without them, as the recipe says.

        The rebuilt agent learns logged steps again, from all rollouts that are in the log by now. So its
        weights are not exactly those that were lost if it had gone on without slower agents.
        """
        if self.recovery is None:
            raise error
        if self.recovery.on_loss == "stop":
            raise no_recovery(error) from error
        self.reporter.notes([f"lost: {error}"])
        lost = self._end_lanes(error.lost)
        if self.recovery.on_loss == "drop":
            self._drop(lost)
            for name in lost.keys() & self._schedule.agents.keys():
                self._schedule.pause(name)
            return
        self.recovery.bring_back(lost, self._rebuild)

    def _end_lanes(self, lost: Mapping[str, str]) -> dict[str, str]:
        """Wait until all calls of lost agents have ended; return all that are lost by then."""
        found = dict(lost)
        while any(job.agent in found for job in self._running):
            ended = self._jobs.next(POLL_SECONDS)
            if ended is None:
                continue
            self._running.discard(ended.job)
            if isinstance(ended.error, WorkerLostError):
                found |= ended.error.lost
            elif ended.job.agent in found:  # it ended before the loss
                self._end_job(ended)
            else:
                self._unhandled.append(ended)
        return found

    def _rebuild(self, agent: str) -> None:
        assert self.recovery is not None
        history = self._ledger.histories[agent]
        version = history.version_after(history.steps)
        self.recovery.rebuild(self.executor, agent, history.steps, version, self.reporter)
        self._lessons.pop(agent, None)
        self._ledger.late.forget(agent)  # the steps that were learnt again had them in time
        if agent in self._schedule.agents:
            state = self._schedule.agents[agent]
            state.engine = state.learner = None
            state.published = -1

    def _end_sampling(self, job: Job, answer: Answer) -> None:
        if self._log is not None:
            self._log.append(job.step, job.agent, answer.rollouts)
        self._ledger.add(job.step, job.agent, answer.rollouts)
        if answer.sync is not None:
            self._ledger.syncs.setdefault(job.step, {})[job.agent] = answer.sync
        self.reporter.notes(answer.notes)

    def _end_evaluation(self, job: Job, answer: Answer | None) -> None:
        """Record an agent's accuracy. None: the agent is frozen, and was evaluated before."""
        found = self._ledger.accuracies.setdefault(job.step, {})
        if answer is None:
            found[job.agent] = self._frozen_accuracies[job.agent]
            return
        self.reporter.notes(answer.notes)
        samples = self.config.evaluation.samples_per_problem
        found[job.agent] = accuracy_by_problem(answer.rollouts, samples)
        if job.agent in self._frozen:
            self._frozen_accuracies[job.agent] = found[job.agent]

    def _end_learning(self, job: Job, report: LearnReport) -> None:
        lesson, capabilities = self._lessons.pop(job.agent)
        ledger, history = self._ledger, self._ledger.histories[job.agent]
        if self._log is not None:
            self._log.append_learnt(job.step, job.agent, report.learnt)
        self.reporter.notes(report.notes)
        history.finish_step(report.updates)
        others = [name for name in self.active if name != job.agent]
        ledger.reports.setdefault(job.step, {})[job.agent] = AgentReport(
            capability=capabilities.values[job.agent],
            policy_version=history.version_after(job.step),
            rollout=rollout_report(
                ledger.rollouts[job.step][job.agent],
                self.config.method.min_reward,
                asked=self._expected[job.agent],
            ),
            learning=replace(report, learnt=(), notes=()),
            engine=ledger.syncs.get(job.step, {}).get(job.agent),
            capability_ratios={other: capabilities.ratio(job.agent, other) for other in others},
            asynchronous=lesson.report,
        )

    # ---- steps that all agents have finished

    def _finish_steps(self) -> None:
        """Report every step that all agents have finished, and save if it is time to.

        A checkpoint is a cut between the learners' updates. So no learner starts before it is made; engines
        go on generating.
        """
        self._report_evaluations()
        while self._schedule.agents and self.steps_done < self._schedule.steps_done:
            step, every = self.steps_done + 1, self.config.checkpoint.every
            if every and step % every == 0 and not self._schedule.learners_are_idle:
                self._schedule.is_holding = True
                return
            self._finish_step(step)
            self._report_evaluations()
            self.after_step()
        self._schedule.is_holding = False

    def _finish_step(self, step: int) -> None:
        rollouts = self._ledger.rollouts[step]
        answered = {name: rollouts[name] for name in self._names if name in rollouts}
        for name, verified in answered.items():
            self.reporter.observer.on_rollouts(step, name, verified)
        self._record(self.capabilities, answered)
        report = StepReport(step, self._ledger.finish_step(step))
        learners = {name: answered[name] for name in report.agents}
        self.reporter.step = step
        self.reporter.notes([*self._health.update(report), *self._collapse.update(learners)])
        for name in self._collapse.paused & self._schedule.agents.keys():
            self._schedule.pause(name)
        self.steps_done = step
        self.reporter.seconds = self._seconds.pop(step, {})
        self.reporter.observer.on_step(report, self.reporter.end_step())
        self.reporter.begin_step(step + 1)
        self._ledger.forget(step)
        self._schedule.forget(step + 1)

    def _report_evaluations(self) -> None:
        """Report the evaluations after steps that all agents have finished.

        Paused agents are evaluated here: they do not change any more, and have ended what was under way.
        """
        at_work = {job.agent for job in self._running}
        for step in sorted(self._ledger.accuracies):
            found = self._ledger.accuracies[step]
            paused = self._collapse.paused - found.keys() - self._dropped
            is_complete = set(self.remaining) <= found.keys() | paused
            if step > self.steps_done or not is_complete or paused & at_work:
                return
            accuracies = {
                name: found[name] if name in found else self._evaluate_paused(name, step)
                for name in self.remaining
            }
            del self._ledger.accuracies[step]
            self._evaluated_at = step
            self.reporter.observer.on_evaluation(step, accuracies)

    def _evaluate_paused(self, name: str, step: int) -> Accuracy:
        if name not in self._paused_accuracies:
            assignment = Assignment("evaluate", self._test_problems, step)
            ((_, answer),) = self.executor.answer(assignment, [name], Reporter(self.reporter.observer))
            samples = self.config.evaluation.samples_per_problem
            self._paused_accuracies[name] = accuracy_by_problem(answer.rollouts, samples)
        return self._paused_accuracies[name]

    def _is_evaluation_due(self, step: int) -> bool:
        every = self.config.evaluation.every
        is_due = step in (0, self._schedule.last_step) or bool(every and step % every == 0)
        return bool(self._test_problems) and is_due

    def _capabilities_at(self, step: int) -> Capabilities:
        """Return the capabilities from all rollouts of batches up to ``step`` that are there."""
        ahead = CapabilityTracker.of(self._names, self.config.method)
        ahead.load_state_dict(self.capabilities.state_dict())
        for batch in range(self.steps_done + 1, step + 1):
            self._record(ahead, self._ledger.rollouts.get(batch, {}))
        return ahead.current

    def _record(self, tracker: CapabilityTracker, rollouts: Mapping[str, Sequence[VerifiedRollout]]) -> None:
        rewards = rewards_of(rollouts)
        tracker.record(rewards, absent=set(self._names) - rewards.keys())

    @property
    def _expected(self) -> dict[str, int]:
        """Number of rollouts of every agent in a batch."""
        prompts = self.config.rollout.prompts_per_step
        return {name: prompts * count for name, count in self.executor.rollouts_per_prompt.items()}

    # ---- notes

    def _note_missing(self, job: Job) -> None:
        """Note that a learner goes on without others, unless it did so in its last step."""
        is_new = job.without - self._last_missing.get(job.agent, frozenset())
        self._last_missing[job.agent] = job.without
        if is_new:
            self.reporter.notes(
                [
                    f"agent {job.agent} learns step {job.step} without the rollouts of "
                    f"{', '.join(sorted(job.without))}, after it has waited for them for "
                    f"{self.config.asynchronous.patience:g} s (asynchronous.patience). Metrics count what is "
                    "missing in every step"
                ]
            )

    def _note_long_waits(self) -> None:
        now = self._clock()
        for wait in self._schedule.waits():
            key = wait.agent, wait.step
            if now - wait.since < NOTED_SECONDS or key in self._noted_waits:
                continue
            self._noted_waits.add(key)
            self.reporter.notes(
                [
                    f"agent {wait.agent} has waited {NOTED_SECONDS:g} s in step {wait.step} for the rollouts "
                    f"of {', '.join(sorted(wait.missing))}; asynchronous.patience=SECONDS lets agents go on "
                    "without slower ones"
                ]
            )

    # ---- resume

    def _read_log(self) -> None:
        """Take the rollouts that an earlier process has sampled, in the order of batches, from the log."""
        oldest_late = self._ledger.late.oldest_batch()
        first = self.steps_done + 1 if oldest_late is None else min(self.steps_done + 1, oldest_late)
        was_read = False
        for name, state in self._schedule.agents.items():
            for batch in range(first, self._schedule.last_step + 1):
                is_needed = self.steps_done < batch <= state.learnt
                is_there = name in self._ledger.rollouts.get(batch, {}) or self._read_batch(
                    name, batch, is_needed
                )
                if batch > state.learnt:
                    if not is_there:
                        break
                    state.sampled, was_read = max(state.sampled, batch), True
        if was_read:
            self.reporter.notes(["rollouts that the log holds already are read from it, not sampled again"])

    def _read_batch(self, name: str, batch: int, is_needed: bool) -> bool:
        """Read one agent's rollouts of a batch, if the log holds them; return whether it does."""
        log, problems = self._log, self.stream.batch(batch - 1)
        if log is None or not log.has(batch, name):
            if is_needed:
                raise CheckpointError(
                    f"the rollouts of {name} in step {batch} are missing from the run's rollouts folder: "
                    "other agents have not learnt from them yet, so the run cannot go on without them"
                )
            return False
        rollouts = log.load(batch, name, problems)
        expected = self._expected[name]
        if len(rollouts) != expected and name not in self._may_miss_answers:
            self.reporter.notes(
                [
                    f"the log's rollouts of {name} in step {batch} are sampled again: the log has "
                    f"{len(rollouts)} of {expected}"
                ]
            )
            return False
        self._ledger.add_logged(batch, name, rollouts)
        self._schedule.record_answer(name, batch, self._clock())
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the rest of the run depends on, without tensors; JSON-ready.

        No learner may be under way. Generation may: its rollouts are in the log when it has ended.
        """
        assert self._schedule.learners_are_idle, "a learner is under way"
        done = {
            name: {"learnt": state.learnt, "evaluated": state.evaluated}
            for name, state in self._schedule.agents.items()
        }
        return {**super().state_dict(), "asynchronous": {"agents": done, **self._ledger.as_json()}}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what :meth:`state_dict` and :meth:`tensors` returned."""
        super().load_state_dict(state, tensors)
        found = state["asynchronous"]
        self._ledger.load_json(found)
        self._schedule.agents = {
            name: AgentState(found["agents"][name]["learnt"], 0, found["agents"][name]["evaluated"])
            for name in self._names
            if name in found["agents"]
        }
        for agent in self._schedule.agents.values():
            agent.sampled = agent.learnt
