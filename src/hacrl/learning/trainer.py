"""The loop of HACRL: ask everyone, judge, exchange, and let everyone learn from everyone (algorithm 1)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hacrl.agents.agent import Agent
from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.methods import Method
from hacrl.evaluation.accuracy import Accuracy, evaluate
from hacrl.evaluation.settings import EvaluationSettings
from hacrl.exchange.base import Exchange, PromptGroup
from hacrl.learning.learner import Learner
from hacrl.learning.observer import Observer, Phase
from hacrl.learning.reports import AgentReport, LearnReport, StepReport, learn_report, rollout_report
from hacrl.learning.samples import SampleBuilder
from hacrl.rollout.engine import EngineReport, RolloutEngine
from hacrl.rollout.verified import Judging
from hacrl.seeding import derive_seed
from hacrl.tasks.base import Task
from hacrl.tasks.stream import ProblemStream
from hacrl.types import Problem, Sampling, VerifiedRollout


@dataclass(frozen=True)
class Participant:
    """One agent and how it takes part: how it answers, sees others' answers, and learns."""

    agent: Agent
    engine: RolloutEngine
    builder: SampleBuilder
    learner: Learner
    rollouts_per_prompt: int

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.agent.name


class Trainer:
    """Trains any number of agents together, or each alone: the method says which."""

    def __init__(
        self,
        participants: Sequence[Participant],
        method: Method,
        task: Task,
        train_stream: ProblemStream,
        test_problems: Sequence[Problem],
        exchange: Exchange,
        sampling: Sampling,
        evaluation: EvaluationSettings,
        updates_per_step: int,
        seed: int,
        observer: Observer | None = None,
    ) -> None:
        self.participants = list(participants)
        self.capabilities = CapabilityTracker([p.name for p in participants], method.settings.capability)
        self._task = task
        self._stream = train_stream
        self._test_problems = test_problems
        self._exchange = exchange
        self._sampling = sampling
        self._evaluation = evaluation
        self._updates_per_step = updates_per_step
        self._seed = seed
        self._observer = observer or Observer()
        self._seconds: dict[str, float] = {}
        self._stop_asked = False
        self._capability = method.settings.capability if method.settings.shares_rollouts else None
        self._noted: set[str] = set()  # agents a user was told about
        self._engines: dict[str, EngineReport | None] = {}
        self.steps_done = 0

    def train(self, steps: int) -> None:
        """Evaluate, make ``steps`` steps, evaluate; in between as often as the settings say."""
        self.evaluate(step=0)
        for step in range(1, steps + 1):
            if self._stop_asked:
                return
            self.step(step)
            every = self._evaluation.every
            last = step == steps or self._stop_asked
            if last or (every and step % every == 0):
                self.evaluate(step)

    def stop(self) -> None:
        """End after the step under way; a run that is stopped is evaluated and saved like any other."""
        self._stop_asked = True

    def step(self, step: int) -> StepReport:
        """All agents answer the same problems with frozen policies; then each learns from all answers."""
        self._seconds = {}
        problems = self._stream.batch(step - 1)
        for participant in self.participants:
            self._exchange.publish(step, participant.name, self._ask(participant, problems, step))
        groups = self._exchange.collect(step)
        rewards = _rewards_by_agent(groups)
        self.capabilities.record(rewards)
        self._note_rewards_without_ratio(step, rewards)
        learnt = {
            participant.name: self._teach(participant, groups, step) for participant in self.participants
        }
        report = self._report(step, groups, learnt)
        self.steps_done = step
        self._observer.on_step(report, dict(self._seconds))  # theirs to keep: an evaluation adds to ours
        return report

    def evaluate(self, step: int) -> dict[str, Accuracy]:
        """Every agent alone on the same held-out problems, with the same random draws every time."""
        if not self._test_problems:
            return {}
        sampling = self._evaluation.sampling(self._sampling.max_new_tokens)
        accuracies = {}
        for participant in self.participants:
            seed = derive_seed(self._seed, "evaluate", participant.name)
            samples = self._evaluation.samples_per_problem
            with self._engine(participant, step) as engine, self._phase(step, "evaluate", participant.name):
                accuracies[participant.name] = evaluate(
                    engine, self._task, self._test_problems, samples, sampling, seed
                )
        self._observer.on_evaluation(step, accuracies)
        return accuracies

    def _ask(self, participant: Participant, problems: Sequence[Problem], step: int) -> list[VerifiedRollout]:
        seed = derive_seed(self._seed, "rollout", participant.name, step)
        samples = participant.rollouts_per_prompt
        with Judging(self._task) as judging:
            with self._engine(participant, step) as engine, self._phase(step, "rollout", participant.name):
                rollouts = engine.generate(problems, samples, self._sampling, seed, judging.take)
            with self._phase(step, "verify", participant.name):
                verified = judging.verdicts(rollouts)
        self._observer.on_rollouts(step, participant.name, verified)
        return verified

    def _teach(self, participant: Participant, groups: Sequence[PromptGroup], step: int) -> LearnReport:
        with self._phase(step, "learn", participant.name):
            samples = participant.builder.build(groups, self.capabilities.ratio)
            seed = derive_seed(self._seed, "learn", participant.name, step)
            stats = participant.learner.learn(samples.samples, self._updates_per_step, seed)
            return learn_report(stats, samples)

    def _report(self, step: int, groups: Sequence[PromptGroup], learnt: dict[str, LearnReport]) -> StepReport:
        reports = {}
        for participant in self.participants:
            name = participant.name
            reports[name] = AgentReport(
                capability=self.capabilities.capability(name),
                policy_version=participant.agent.policy_version,
                rollout=rollout_report([v for group in groups for v in group.responses[name]]),
                learning=learnt[name],
                engine=self._engines.get(name),
            )
        return StepReport(step, reports)

    def _note_rewards_without_ratio(self, step: int, rewards: Mapping[str, Sequence[float]]) -> None:
        """A capability below the lowest reward is floored, and its ratio means nothing: say so once."""
        if self._capability is None or self._capability.measure != "mean_reward":
            return
        for agent, values in rewards.items():
            mean = math.fsum(values) / len(values)
            if mean < self._capability.reward_min and agent not in self._noted:
                self._noted.add(agent)
                self._observer.on_note(
                    step,
                    f"the mean reward of {agent} is {mean:.3g}, below method.capability.reward_min="
                    f"{self._capability.reward_min:g}: its capability counts as nothing. If rewards can be "
                    "negative, set reward_min to the lowest one",
                )

    @contextmanager
    def _engine(self, participant: Participant, step: int) -> Iterator[RolloutEngine]:
        """The agent's engine at the agent's policy; afterwards it gives back what learning could use."""
        engine = participant.engine
        if not engine.shares_weights:
            with self._phase(step, "sync", participant.name):
                self._engines[participant.name] = engine.prepare()
        yield engine
        engine.rest()

    @contextmanager
    def _phase(self, step: int, phase: Phase, agent: str) -> Iterator[None]:
        self._observer.on_phase(step, phase, agent)
        start = time.perf_counter()
        yield
        self._seconds[f"{phase}/{agent}"] = time.perf_counter() - start


def _rewards_by_agent(groups: Sequence[PromptGroup]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for group in groups:
        for agent, values in group.rewards.items():
            rewards.setdefault(agent, []).extend(values)
    return rewards
