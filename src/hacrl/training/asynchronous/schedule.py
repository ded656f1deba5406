"""Which agent may do what next: the rules of an asynchronous run, without threads, models or clocks.

Batch b of the problems belongs to step b, b = 1, 2, ... An agent has two lanes, its engine and its learner,
and does at most one job at a time in each:

========  =======  ==========================================================================================
job       lane     an agent may start it when
========  =======  ==========================================================================================
sample b  engine   it has answered batches 1 ... b - 1, and its engine has the weights after step b - 1 - S
learn b   learner  its learner has finished steps 1 ... b - 1, and its own answers to batch b are there;
                   and those of all other agents, or it has waited for them as long as its patience
publish   learner  its learner has finished a step whose weights the engine does not have; an engine that
                   cannot be updated while it generates must be idle, and stays idle until the end
evaluate  engine   an evaluation after the learner's last step is due, and the engine has its weights; the
                   agent neither learns nor samples meanwhile
========  =======  ==========================================================================================

S is ``max_staleness``. So when a learner begins step b, every token of its own answers was sampled by the
weights after step b - 1 - S or later: the learner is at most S steps ahead of its sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

JobKind = Literal["publish", "evaluate", "learn", "sample"]


@dataclass(frozen=True)
class Job:
    """One call of an agent's verb."""

    kind: JobKind
    agent: str
    step: int  # of the batch, or of the weights that are published or evaluated
    without: frozenset[str] = frozenset()  # agents whose rollouts a learner does not wait for any longer

    @property
    def uses_engine(self) -> bool:
        """Whether the job generates."""
        return self.kind in ("sample", "evaluate")


@dataclass
class AgentState:
    """How far one agent is, and what it does."""

    learnt: int = 0  # steps that its learner has finished
    sampled: int = 0  # batches that it has answered; all of them are in the rollout log
    evaluated: int = -1  # step after which it was evaluated last; -1: never
    published: int = -1  # step after which its engine's weights were taken; -1: the engine has none
    engine: Job | None = None  # under way
    learner: Job | None = None  # under way
    free_since: float = 0.0  # when the learner could have begun its next step, but for rollouts

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return self.engine is None and self.learner is None


@dataclass(frozen=True)
class Wait:
    """A learner that waits for other agents' rollouts."""

    agent: str
    step: int
    missing: frozenset[str]
    since: float  # when nothing else was to wait for


@dataclass
class Schedule:
    """The state of all agents, and the jobs that may start."""

    agents: dict[str, AgentState]  # in the order of the config; paused agents are removed
    max_staleness: int
    last_step: int
    patience: float | None = None  # seconds; None: without limit
    shares_rollouts: bool = True  # whether learners use other agents' rollouts
    # by agent: whether its engine can be updated while it generates
    updates_while_generating: Mapping[str, bool] = field(default_factory=dict)
    evaluation_due: Callable[[int], bool] = lambda step: False
    is_holding: bool = False  # no learner may start: the state of all learners is about to be saved
    is_stopping: bool = False  # no job may start
    # batch -> agent -> when its answers were there; of batches that a learner may still need
    answered: dict[int, dict[str, float]] = field(default_factory=dict)

    def start(self, now: float) -> list[Job]:
        """Return all jobs that may start now, and mark them as under way."""
        started = []
        for agent, state in self.agents.items():
            for job in self._startable(agent, state, now):
                if job.uses_engine:
                    state.engine = job
                else:
                    state.learner = job
                started.append(job)
        return started

    def finish(self, job: Job, now: float) -> None:
        """Record that a job has ended successfully."""
        state = self.agents.get(job.agent)
        if state is None:  # paused while the job was under way
            return
        match job.kind:
            case "sample":
                state.engine, state.sampled = None, job.step
                self.record_answer(job.agent, job.step, now)
            case "evaluate":
                state.engine, state.evaluated, state.free_since = None, job.step, now
            case "learn":
                state.learner, state.learnt, state.free_since = None, job.step, now
            case "publish":
                state.learner, state.published, state.free_since = None, job.step, now

    def record_answer(self, agent: str, batch: int, now: float) -> None:
        """Record that an agent's answers to a batch are in the log."""
        self.answered.setdefault(batch, {})[agent] = now

    def pause(self, agent: str) -> None:
        """Leave an agent out from now on. Nobody waits for it any longer."""
        del self.agents[agent]

    @property
    def steps_done(self) -> int:
        """Steps that all agents have finished, evaluations included."""
        return min(
            (
                state.learnt - 1 if self._needs_evaluation(state) else state.learnt
                for state in self.agents.values()
            ),
            default=self.last_step,
        )

    @property
    def is_finished(self) -> bool:
        """Whether all agents have made all steps."""
        return self.steps_done >= self.last_step and self.is_idle

    @property
    def is_idle(self) -> bool:
        """Whether no job is under way."""
        return all(state.is_idle for state in self.agents.values())

    @property
    def learners_are_idle(self) -> bool:
        """Whether the weights of no agent change or are read, so that they can be saved."""
        return all(state.learner is None for state in self.agents.values())

    @property
    def furthest(self) -> int:
        """The last step that some learner has finished or is at."""
        return max(
            (
                state.learner.step if state.learner is not None else state.learnt
                for state in self.agents.values()
            ),
            default=0,
        )

    def waits(self) -> Iterator[Wait]:
        """Yield the learners that could begin a step if other agents' rollouts were there."""
        for agent, state in self.agents.items():
            step = state.learnt + 1
            missing = self._missing(agent, step)
            if state.learner is None and self._has_own(agent, state, step) and missing:
                yield Wait(agent, step, missing, self._waits_since(agent, state))

    def next_deadline(self) -> float | None:
        """Return when the first learner's patience ends; None if none waits, or all wait without limit."""
        if self.patience is None or self.is_holding or self.is_stopping:
            return None
        return min((wait.since + self.patience for wait in self.waits()), default=None)

    def _startable(self, agent: str, state: AgentState, now: float) -> Iterator[Job]:
        if self.is_stopping:
            return
        if state.learner is None and not self.is_holding and self._may_publish(agent, state):
            yield Job("publish", agent, state.learnt)  # marked before the next line is reached
        if state.engine is None and self._may_evaluate(state):
            yield Job("evaluate", agent, state.learnt)
        if state.learner is None and not self.is_holding:
            yield from self._learn(agent, state, now)
        if state.engine is None and self._may_sample(agent, state):
            yield Job("sample", agent, state.sampled + 1)

    def _may_publish(self, agent: str, state: AgentState) -> bool:
        if state.published == state.learnt or (
            state.learnt >= self.last_step and not self._needs_evaluation(state)
        ):
            return False
        return state.engine is None or self.updates_while_generating.get(agent, False)

    def _may_evaluate(self, state: AgentState) -> bool:
        is_current = state.published == state.learnt and state.learner is None
        return is_current and self._needs_evaluation(state)

    def _may_sample(self, agent: str, state: AgentState) -> bool:
        batch = state.sampled + 1
        if batch > self.last_step or self._needs_evaluation(state):
            return False
        is_receiving = state.learner is not None and state.learner.kind == "publish"
        if is_receiving and not self.updates_while_generating.get(agent, False):
            return False
        return state.published >= 0 and batch - 1 - self.max_staleness <= state.published

    def _learn(self, agent: str, state: AgentState, now: float) -> Iterator[Job]:
        step = state.learnt + 1
        if not self._has_own(agent, state, step):
            return
        missing = self._missing(agent, step)
        waited = now - self._waits_since(agent, state)
        if not missing or (self.patience is not None and waited >= self.patience):
            yield Job("learn", agent, step, missing)

    def _waits_since(self, agent: str, state: AgentState) -> float:
        """Return since when only other agents' rollouts are missing."""
        return max(self.answered[state.learnt + 1][agent], state.free_since)

    def _has_own(self, agent: str, state: AgentState, step: int) -> bool:
        """Return whether an agent's own rollouts are there, and nothing but other agents' is to wait for."""
        is_wanted = step <= self.last_step and not self._needs_evaluation(state)
        return is_wanted and agent in self.answered.get(step, {})

    def _missing(self, agent: str, step: int) -> frozenset[str]:
        if not self.shares_rollouts:
            return frozenset()
        return frozenset(self.agents).difference(self.answered.get(step, {}), {agent})

    def _needs_evaluation(self, state: AgentState) -> bool:
        return state.evaluated < state.learnt and self.evaluation_due(state.learnt)

    def forget(self, before: int) -> None:
        """Forget the answers to batches before this one."""
        for batch in [batch for batch in self.answered if batch < before]:
            del self.answered[batch]


def initial(agents: Sequence[str]) -> dict[str, AgentState]:
    """Return the states of agents that have done nothing."""
    return {agent: AgentState() for agent in agents}
