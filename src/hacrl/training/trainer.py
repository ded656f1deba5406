"""The loop of HACRL: ask everyone, judge, exchange, and let everyone learn from everyone (algorithm 1)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.methods import Method
from hacrl.config.schema import CollapseSettings, EvaluationSettings
from hacrl.engines.base import EngineReport, Finished
from hacrl.engines.concurrent import There, answers, at_once
from hacrl.engines.judging import Judging
from hacrl.errors import ForeignRolloutsError, TrainingError
from hacrl.memory.residency import Residency
from hacrl.rollouts.groups import PromptGroup, group_by_prompt
from hacrl.rollouts.log import RolloutLog
from hacrl.seeding import derive_seed
from hacrl.tasks.base import Task
from hacrl.tasks.splits import ProblemStream
from hacrl.training.health import CollapseDetector
from hacrl.training.metrics import (
    Accuracy,
    AgentReport,
    LearnReport,
    StepReport,
    accuracy_by_problem,
    learn_report,
    rollout_report,
)
from hacrl.training.observer import Observer, Phase
from hacrl.training.prefetch import Ahead
from hacrl.training.samples import LearnerSamples
from hacrl.training.state import StepUnderWay, TrainerState
from hacrl.training.worker import Participant, Questions
from hacrl.types import Problem, Rollout, Sampling, VerifiedRollout


class TrainingInterrupted(Exception):  # noqa: N818 - not an error
    """Training was asked to leave off and has, between two phases; its state is whole."""


class Trainer:
    """Trains any number of agents together, or each alone: the method says which."""

    def __init__(
        self,
        participants: Sequence[Participant],
        method: Method,
        task: Task,
        train_stream: ProblemStream,
        test_problems: Sequence[Problem],
        sampling: Sampling,
        evaluation: EvaluationSettings,
        updates_per_step: int,
        seed: int,
        observer: Observer | None = None,
        collapse: CollapseSettings | None = None,
        residency: Residency | None = None,
        log: RolloutLog | None = None,
    ) -> None:
        self.participants = list(participants)
        names = [participant.name for participant in participants]
        self.capabilities = CapabilityTracker(names, method.settings.capability)
        self.residency = residency or Residency()
        self.after_step: Callable[[], None] = lambda: None  # a step and its evaluation are done
        self._task = task
        self._stream = train_stream
        self._test_problems = test_problems
        self._log = log
        self._reads_log = False  # whether the user was told that rollouts come from the log
        self._sampling = sampling
        self._evaluation = evaluation
        self._updates_per_step = updates_per_step
        self._seed = seed
        self._observer = observer or Observer()
        self._collapse = CollapseDetector(names, collapse or CollapseSettings())
        self._capability = method.settings.capability if method.settings.shares_rollouts else None
        self._engines: dict[str, EngineReport | None] = {}
        self._seconds: dict[str, float] = {}  # of the step under way
        self._began = 0.0
        self._state = TrainerState(self.participants, self.capabilities, self._collapse)
        self._stop_asked = self._interrupt_asked = False
        self._is_answering = False  # somebody's responses are generated or judged

    def train(self, steps: int) -> None:
        """Evaluate, make ``steps`` steps in all, evaluate; in between as often as the settings say."""
        self._evaluate_if_due(steps)
        while self.steps_done < steps and not self._stop_asked:
            self.step(self.steps_done + 1)
            self._evaluate_if_due(steps)
            self.after_step()

    def stop(self) -> None:
        """End after the step under way; a run that is stopped is evaluated and saved like any other."""
        self._stop_asked = True

    def interrupt(self) -> None:
        """Leave off after the phase under way, by :class:`TrainingInterrupted`. May come from a signal."""
        self._interrupt_asked = True

    def step(self, step: int) -> StepReport:
        """All agents answer the same problems with frozen policies; then each learns from all answers."""
        done = self._begin(step)
        questions = self._questions(step)
        self._take_logged(done, questions.problems)
        for together in self._turns([one for one in self.active if one.name not in done.rollouts]):
            answered = self._ask(together, questions, step)
            for participant in together:
                self._take(done, participant, answered[participant.name], is_logged=False)
        groups = group_by_prompt({one.name: done.rollouts[one.name] for one in self.active})
        rewards = _rewards_by_agent(groups)
        self.capabilities.record(rewards, absent=self._collapse.paused)
        self._note_rewards_without_ratio(step, rewards)
        learners = [participant for participant in self.active if participant.name not in done.learnt]
        # a learner's samples are written in its tokens while the one before it learns
        with Ahead([partial(self._samples, learner, groups, step) for learner in learners]) as samples:
            for learner in learners:
                done.learnt[learner.name] = self._teach(learner, samples, step)
        report = self._report(step, groups, done.learnt)
        self._end(done)
        self._observer.on_step(report, dict(self._seconds))  # theirs to keep: an evaluation adds to ours
        return report

    @property
    def steps_done(self) -> int:
        """Whole steps, those of an earlier process included."""
        return self._state.steps_done

    @property
    def phases_done(self) -> int:
        """Of the step under way, if there is one."""
        return 0 if self._state.under_way is None else self._state.under_way.phases

    @property
    def active(self) -> list[Participant]:
        """Those that take part: all but the paused."""
        return [one for one in self.participants if one.name not in self._collapse.paused]

    def _begin(self, step: int) -> StepUnderWay:
        if not self.active:
            raise TrainingError(
                f"nobody is left to train: all agents are paused since step {self.steps_done}"
            )
        self._seconds, self._began = {}, time.perf_counter()
        return self._state.begin(step)

    def _end(self, done: StepUnderWay) -> None:
        for note in self._collapse.update(done.rollouts):
            self._observer.on_note(done.step, note)
        self._state.end()
        self._seconds["whole"] = time.perf_counter() - self._began

    def _evaluate_if_due(self, steps: int) -> None:
        """Before the first step, after the last one, every so often, and where it was interrupted."""
        step, every = self.steps_done, self._evaluation.every
        is_due = step in (0, steps) or self._stop_asked or (every and step % every == 0)
        if is_due and self._state.evaluated != step and self._state.under_way is None:
            self.evaluate(step)

    def evaluate(self, step: int) -> dict[str, Accuracy]:
        """Every agent alone on the same held-out problems, with the same random draws every time."""
        if not self._test_problems:
            return {}
        samples = self._evaluation.samples_per_problem
        questions = Questions(
            phase="evaluate",
            problems=self._test_problems,
            sampling=self._evaluation.sampling(self._sampling.max_new_tokens),
            samples=lambda _: samples,
            seed=lambda one: derive_seed(self._seed, "evaluate", one.name),
        )
        verified: dict[str, list[VerifiedRollout]] = {}
        for together in self._turns(self.participants):
            verified.update(self._ask(together, questions, step))
        accuracies = {one.name: accuracy_by_problem(verified[one.name], samples) for one in self.participants}
        self._state.evaluated = step
        self._observer.on_evaluation(step, accuracies)
        return accuracies

    def state_dict(self) -> dict[str, Any]:
        """See :class:`TrainerState`, as for the next two."""
        return self._state.state_dict()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Of every agent."""
        return self._state.tensors()

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._state.load_state_dict(state, tensors, self._stream, self._log)

    def tell_what_is_restored(self) -> None:
        """Whoever watches has not seen the rollouts of a step that another process began."""
        begun = self._state.under_way
        if begun is not None:
            for agent, rollouts in begun.rollouts.items():
                self._observer.on_rollouts(begun.step, agent, rollouts)

    def _turns(self, participants: Sequence[Participant]) -> list[list[Participant]]:
        """Who is asked at a time: all whose engines compute apart together, then the others one by one."""
        apart = [
            one for one in participants if one.engine.is_apart and self.residency.keeps_weights(one.name)
        ]
        taken = {one.name for one in apart}
        one_by_one = [[one] for one in participants if one.name not in taken]
        return [apart, *one_by_one] if apart else one_by_one

    def _questions(self, step: int) -> Questions:
        return Questions(
            phase="rollout",
            problems=self._stream.batch(step - 1),
            sampling=self._sampling,
            samples=lambda one: one.rollouts_per_prompt,
            seed=lambda one: derive_seed(self._seed, "rollout", one.name, step),
        )

    def _ask(
        self, together: Sequence[Participant], questions: Questions, step: int
    ) -> dict[str, list[VerifiedRollout]]:
        """All answer at the same time, each once its engine is ready, and are judged while they do."""

        def on_finished(agent: str, place: int, rollout: Rollout) -> None:
            judging.take(agent, place, rollout)
            self._observer.on_response(agent)

        for one in together:
            self.residency.to_generate(one.name)
        verified = {}
        try:
            with Judging(self._task) as judging:
                said = answers(
                    {one.name: partial(self._answer, one, questions, step) for one in together}, on_finished
                )
                for one in together:
                    self._engines[one.name] = one.engine.prepare()  # otherwise than before if it died
                    self._pass_on(step, one.engine.take_notes())
                    one.engine.rest()  # it gives back what learning could use
                for name, rollouts in said.items():
                    # an evaluation is one phase, verdicts and all
                    own_phase = questions.phase == "rollout"
                    with self._phase(step, "verify", name) if own_phase else nullcontext():
                        verified[name] = judging.verdicts(name, rollouts)
        finally:
            self._is_answering = False
        return verified

    def _answer(
        self, asked: Participant, questions: Questions, step: int, on_finished: Finished, there: There
    ) -> list[Rollout]:
        """One agent's responses, at the policy it has now. May run in a thread of its own."""
        if not asked.engine.shares_weights:
            with self._phase(step, "sync", asked.name, there):
                asked.engine.prepare(proven=False)  # its first responses prove it
        samples, seed = questions.samples(asked), questions.seed(asked)
        with self._phase(step, questions.phase, asked.name, there):
            return asked.engine.generate(questions.problems, samples, questions.sampling, seed, on_finished)

    def _take_logged(self, done: StepUnderWay, problems: Sequence[Problem]) -> None:
        """Read what an earlier process sampled with the same policies: it is never sampled again."""
        if self._log is None:
            return
        for one in self.active:
            if one.name in done.rollouts or not self._log.has(done.step, one.name):
                continue
            rollouts = self._log.load(done.step, one.name, problems)
            expected = len(problems) * one.rollouts_per_prompt
            versions = {verified.rollout.policy_version for verified in rollouts}
            if len(rollouts) == expected and versions == {one.agent.policy_version}:
                self._take(done, one, rollouts, is_logged=True)
                if not self._reads_log:
                    self._reads_log = True
                    self._observer.on_note(
                        done.step, "rollouts that the log holds already are read from it, not sampled again"
                    )
            else:
                self._observer.on_note(
                    done.step,
                    f"the log's rollouts of {one.name} are sampled again: the log has {len(rollouts)} of "
                    f"{expected}, of policy versions {sorted(versions)}, and the agent is at version "
                    f"{one.agent.policy_version}",
                )

    def _take(
        self,
        done: StepUnderWay,
        participant: Participant,
        rollouts: list[VerifiedRollout],
        is_logged: bool,
    ) -> None:
        """Write one agent's rollouts to the log, then show them to whoever watches."""
        if self._log is not None and not is_logged:
            self._log.append(done.step, participant.name, rollouts)
        done.rollouts[participant.name] = rollouts
        self._observer.on_rollouts(done.step, participant.name, rollouts)

    def _samples(self, learner: Participant, groups: Sequence[PromptGroup], step: int) -> LearnerSamples:
        seed = derive_seed(self._seed, "choose", learner.name, step)
        return learner.builder.build(groups, self.capabilities.ratio, seed)

    def _teach(self, participant: Participant, made: Ahead[LearnerSamples], step: int) -> LearnReport:
        with self._phase(step, "learn", participant.name):
            self.residency.to_learn(participant.name)
            samples = made.fetch()
            seed = derive_seed(self._seed, "learn", participant.name, step)
            try:
                stats = participant.learner.learn(samples.samples, self._updates_per_step, seed)
            except ForeignRolloutsError:
                if self._log is not None:  # a resumed run samples them again
                    self._log.discard(step, participant.name)
                raise
            self._pass_on(step, stats.notes)
            return learn_report(stats, samples)

    def _report(self, step: int, groups: Sequence[PromptGroup], learnt: dict[str, LearnReport]) -> StepReport:
        reports = {}
        for participant in self.active:
            name = participant.name
            reports[name] = AgentReport(
                capability=self.capabilities.capability(name),
                policy_version=participant.agent.policy_version,
                rollout=rollout_report([v for group in groups for v in group.responses[name]]),
                learning=learnt[name],
                engine=self._engines.get(name),
            )
        return StepReport(step, reports)

    def _pass_on(self, step: int, notes: Iterable[str]) -> None:
        for note in notes:
            self._observer.on_note(step, note)

    def _note_rewards_without_ratio(self, step: int, rewards: Mapping[str, Sequence[float]]) -> None:
        """A capability below the lowest reward is floored, and its ratio means nothing: say so once."""
        if self._capability is None or self._capability.measure != "mean_reward":
            return
        for agent, values in rewards.items():
            mean = math.fsum(values) / len(values)
            if mean < self._capability.reward_min and agent not in self._state.noted:
                self._state.noted.add(agent)
                self._observer.on_note(
                    step,
                    f"the mean reward of {agent} is {mean:.3g}, below method.capability.reward_min="
                    f"{self._capability.reward_min:g}: its capability counts as nothing. If rewards can be "
                    "negative, set reward_min to the lowest one",
                )

    @contextmanager
    def _phase(self, step: int, phase: Phase, agent: str, there: There = at_once) -> Iterator[None]:
        there(partial(self._begin_phase, step, phase, agent))
        start = time.perf_counter()
        yield
        self._seconds[f"{phase}/{agent}"] = time.perf_counter() - start

    def _begin_phase(self, step: int, phase: Phase, agent: str) -> None:
        if self._interrupt_asked and not self._is_answering:  # what is being generated is judged first
            raise TrainingInterrupted
        self._is_answering |= phase in ("rollout", "evaluate")
        self._observer.on_phase(step, phase, agent)


def _rewards_by_agent(groups: Sequence[PromptGroup]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for group in groups:
        for agent, values in group.rewards.items():
            rewards.setdefault(agent, []).extend(values)
    return rewards
