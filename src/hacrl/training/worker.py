"""One agent with everything it needs to answer and to learn: the unit that an executor places.

Only plain records go in and come out, so that a worker can live in another process or on another host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from hacrl.algorithms.alignment import TrustTracker
from hacrl.algorithms.capability import Capabilities
from hacrl.algorithms.context import StepContext
from hacrl.engines.answering import Answers
from hacrl.engines.base import Engine, Sampler, SyncReport
from hacrl.engines.episodes import make_answerer
from hacrl.errors import EngineMismatchError
from hacrl.models.agent import Agent
from hacrl.rollouts.groups import PromptGroup
from hacrl.seeding import derive_seed
from hacrl.tasks.base import Task
from hacrl.training.learner import Learner
from hacrl.training.lr_schedule import LearningRateSchedule
from hacrl.training.metrics import LearnReport, learn_report
from hacrl.training.reporter import AgentReporter, Reporter
from hacrl.training.samples import LearnerSamples, SampleBuilder
from hacrl.training.tensor_files import TensorStream
from hacrl.types import Problem, Rollout, Sampling, VerifiedRollout


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker takes from the run's settings."""

    seed: int  # the run's
    rollouts_per_prompt: int
    rollout_sampling: Sampling
    evaluation_samples: int  # per problem
    evaluation_sampling: Sampling
    updates_per_step: int
    # By the number of trusted partners: updates of a step. Empty: the method does not ask for trust.
    updates_by_trust: tuple[int, ...] = ()
    trust_window: int = 5
    steps: int = 1  # of the whole run
    lr_schedule: LearningRateSchedule = field(default_factory=LearningRateSchedule)


@dataclass(frozen=True)
class Assignment:
    """Problems to answer, and how."""

    phase: Literal["rollout", "evaluate"]
    problems: Sequence[Problem]
    step: int
    round: int = 0  # of the step: above 0 with rollout.resample
    # "current": the engine first gets the learner's weights. "published": it samples with those that it got
    # last, and nothing reads the learner's weights, which may be in the middle of an update.
    weights: Literal["current", "published"] = "current"


@dataclass(frozen=True)
class Answer:
    """One agent's verified rollouts, problem by problem."""

    rollouts: list[VerifiedRollout]
    sync: SyncReport | None  # how its engine got the weights; None if it shares the learner's
    notes: tuple[str, ...] = ()  # sentences of the engine for the user


class SamplingWorker:
    """Generates one agent's verified rollouts."""

    def __init__(self, name: str, sampler: Sampler, answers: Answers, settings: WorkerSettings) -> None:
        self.name = name
        self.sampler = sampler
        self.settings = settings
        self._answerer = answers
        self._published: SyncReport | None = None  # what the engine got last by publish

    def answer(self, assignment: Assignment, reporter: AgentReporter | None = None) -> Answer:
        """Generate responses to the problems with the current policy, and verify them."""
        reporter = reporter or Reporter().agent(self.name)
        try:
            with reporter.generating():
                rollouts = self.generate(assignment, reporter)
                sync, notes = self.end_generation(assignment)
                return Answer(self.verify(assignment, rollouts, reporter), sync, notes)
        finally:
            self.abandon_answer()

    def generate(self, assignment: Assignment, reporter: AgentReporter) -> list[Rollout]:
        """Return responses that are not yet verified. May run in any thread if the engine may."""
        settings, published = self.settings, None
        if assignment.weights == "published":
            assert self._published is not None, "nothing was published"
            self.sampler.follows_policy, published = False, self._published.policy_version
        elif not self.sampler.shares_weights:
            self.sampler.follows_policy = True
            with reporter.phase("sync"):
                self.sampler.sync(proven=False)  # the first responses prove it
        if assignment.phase == "rollout":
            samples, sampling = settings.rollouts_per_prompt, settings.rollout_sampling
            seed = derive_seed(settings.seed, "rollout", self.name, assignment.step)
            if assignment.round:
                seed = derive_seed(seed, "round", assignment.round)
        else:  # the same random draws in every evaluation
            samples, sampling = settings.evaluation_samples, settings.evaluation_sampling
            seed = derive_seed(settings.seed, "evaluate", self.name)
        with reporter.phase(assignment.phase):
            return self._answerer.generate(
                assignment.problems, samples, sampling, seed, reporter.responses, published
            )

    def end_generation(self, assignment: Assignment) -> tuple[SyncReport | None, tuple[str, ...]]:
        """Free memory that only generation needs; return the weight sync's report and the engine's notes."""
        notes = tuple(self._answerer.take_notes())
        if assignment.weights == "published":
            return self._published, (*self.sampler.take_notes(), *notes)
        sync = self.sampler.sync()  # a new report if the engine died meanwhile
        notes = (*self.sampler.take_notes(), *notes)
        self.sampler.sleep()
        return sync, notes

    def publish(self) -> SyncReport:
        """Send the policy's weights to the engine; return when they are proven to have arrived.

        Call it where the learner is between two steps. If the engine can be updated while it generates, every
        token that it samples from now on comes from these weights. Otherwise it must be idle.
        """
        self.sampler.follows_policy = False
        report = self.sampler.sync()
        assert report is not None, "an engine that shares the learner's weights gets none"
        self._published = report
        return report

    def verify(
        self, assignment: Assignment, rollouts: Sequence[Rollout], reporter: AgentReporter
    ) -> list[VerifiedRollout]:
        """Return the generated rollouts with their verdicts."""
        if assignment.phase == "evaluate":  # an evaluation is one phase, verdicts included
            return self._answerer.verify(rollouts)
        with reporter.phase("verify"):
            return self._answerer.verify(rollouts)

    def abandon_answer(self) -> None:
        """Stop verifying the responses of an answer that was interrupted."""
        self._answerer.abandon()

    def close(self) -> None:
        """End the engine, and the environments if there are any."""
        try:
            self._answerer.close()
        finally:
            self.sampler.close()


class AgentWorker(SamplingWorker):
    """Generates one agent's verified rollouts, and trains the agent on all agents' rollouts."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        learner: Learner,
        builder: SampleBuilder,
        task: Task,
        settings: WorkerSettings,
        verify_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(agent.name, engine, make_answerer(agent, engine, task, verify_lock), settings)
        self.agent = agent
        self.engine = engine
        self.learner = learner
        self.builder = builder
        self.trust = TrustTracker(settings.trust_window)

    @property
    def device(self) -> str:
        """The device of the learner."""
        return str(self.agent.device)

    @property
    def policy_version(self) -> int:
        """The number of updates that the agent has made."""
        return self.agent.policy_version

    def learn(
        self,
        groups: Sequence[PromptGroup],
        capabilities: Capabilities,
        step: int,
        reporter: AgentReporter | None = None,
    ) -> LearnReport:
        """Update the policy with all agents' rollouts of one step."""
        reporter = reporter or Reporter().agent(self.name)
        with reporter.phase("learn"):
            return self.update(self.build_samples(groups, capabilities, step), step)

    def build_samples(
        self, groups: Sequence[PromptGroup], capabilities: Capabilities, step: int
    ) -> LearnerSamples:
        """Write all rollouts in the agent's tokens, with its advantages. Needs no device."""
        seed = derive_seed(self.settings.seed, "choose", self.name, step)
        progress = (step - 1) / max(1, self.settings.steps)
        present = frozenset(name for group in groups for name in group.responses)  # not paused
        context = StepContext(progress, capabilities.values, self.trust.trusted & present)
        return self.builder.build(groups, capabilities.ratio, seed, context)

    def update(self, samples: LearnerSamples, step: int) -> LearnReport:
        """Make the step's parameter updates."""
        settings = self.settings
        seed = derive_seed(settings.seed, "learn", self.name, step)
        updates = settings.updates_per_step
        if settings.updates_by_trust:
            updates = settings.updates_by_trust[len(samples.trusted)]
        try:
            stats = self.learner.learn(samples.samples, updates, seed, settings.lr_schedule.factor(step))
        except EngineMismatchError as error:
            error.agent = self.name
            raise
        for source, measured in stats.alignments.items():
            self.trust.record(source, measured, samples.is_stronger.get(source, False))
        return learn_report(self.name, stats, samples)

    def state_dict(self) -> dict[str, Any]:
        """Return what lasts from step to step, but for tensors; JSON-ready."""
        return {
            "policy_version": self.agent.policy_version,
            "learner": self.learner.state_dict(),
            "engine": self.engine.state_dict(),
            "trust": self.trust.state_dict(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained weights and the optimizer's moments, wherever they are, not copied."""
        return self.learner.optimizer.tensors()

    def tensor_stream(self) -> TensorStream:
        """Return the same tensors, to be read one by one, in the order of a file."""
        return self.learner.optimizer.tensor_stream()

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` and :meth:`tensors` returned."""
        self.agent.policy_version = state["policy_version"]
        self.learner.load_state_dict(state["learner"])
        self.engine.load_state_dict(state["engine"])
        self.trust.load_state_dict(state["trust"])
        self.learner.optimizer.load_tensors(tensors)

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder."""
        self.agent.save(folder)
