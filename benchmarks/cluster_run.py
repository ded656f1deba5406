"""A run of n agents on a cluster, simulated: who samples, waits, prepares, learns and syncs when.

What is simulated is the order of work of hacrl's trainer. Every agent's engines sample, its verifier judges
responses as they end, and the driver collects the rollouts and writes them to the log. Every learner fetches
all agents' rollouts, puts them into its own tokens, learns, reports to the driver (which logs what was
learnt), and sends its weights to its engines.

- Synchronous: learning begins when all agents' rollouts are in the log, the next step when all have learnt.
- Asynchronous: an agent samples the batch of a step when its last one is in the log and its learner is at
  most max_staleness steps behind. Its learner waits for its own rollouts of a step, then at most ``patience``
  seconds for those of the others. Later ones are learnt from in a following step, unless they are more than
  max_staleness steps old by then. New weights reach an engine in mid-generation; it pauses for the sync.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
from cluster_costs import Costs, Plan, Times, times_of
from cluster_events import Batch, Clock, Condition, Decoding, Engine, Process, Queue, Wait

PHASES = ("sampling", "verifying", "waiting", "communication", "preparing", "learning", "weight sync")


@dataclass(frozen=True)
class Mode:
    """How agents wait for each other."""

    max_staleness: int = 0  # steps; 0: synchronous
    patience: float = math.inf  # seconds

    @property
    def is_synchronous(self) -> bool:
        """Whether all agents make a step together."""
        return self.max_staleness == 0


@dataclass(frozen=True)
class Sharing:
    """What learners take from other agents."""

    cross: bool = True  # False: every agent alone, as GSPO
    cap: int | None = None  # learning.max_cross_rollouts: others' responses per prompt that are learnt


@dataclass
class Spent:
    """Seconds of one agent's learner in all steps, by phase, and what it learnt from."""

    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    learnt_responses: float = 0.0
    taken: int = 0  # other agents' batches that it learnt from
    dropped: int = 0  # other agents' batches that came too late
    staleness: float = 0.0  # sum over steps: versions between sampling and learning
    end: float = 0.0


def draw_lengths(draw: numpy.random.Generator, plan: Plan) -> numpy.ndarray[Any, Any]:
    """Return response lengths, prompts x responses."""
    lengths, shape = plan.lengths, (plan.prompts, plan.responses)
    drawn = lengths.median * numpy.exp(lengths.sigma * draw.standard_normal(shape))
    return numpy.clip(drawn, 1, lengths.longest).round().astype(int)


def end_of_verifying(ends: Sequence[float], plan: Plan) -> float:
    """Return when the last response is judged.

    Workers take responses in the order they end, and all take equally long. So response i of N begins a busy
    stretch of its worker of at most ceil((N - i) / workers) responses.
    """
    ordered = numpy.sort(numpy.asarray(ends))
    queued = -(-numpy.arange(len(ordered), 0, -1) // plan.verifiers)
    return float((ordered + queued * plan.verify).max())


class Agent:
    """One agent's state in the simulation."""

    def __init__(self, plan: Plan, times: Times, clock: Clock) -> None:
        self.plan, self.times = plan, times
        self.engines = [
            Engine(Decoding(times, plan.slots, plan.prompt_tokens), clock) for _ in range(plan.engines)
        ]
        self.version = 0  # steps that the learner has made
        self.changed = Condition()
        self.sampled: dict[int, float] = {}  # step -> seconds at which sampling, verifying, logging ended
        self.verified: dict[int, float] = {}
        self.logged: dict[int, float] = {}
        self.tokens: dict[int, int] = {}
        self.sampled_by: dict[int, int] = {}  # step -> version
        self.used_until: dict[str, int] = {}  # other agent -> next of its steps to learn from
        self.spent = Spent()


Source = tuple[Agent, int]  # an agent, and the step of its batch


class Run:
    """Simulate ``steps`` steps of all agents."""

    def __init__(
        self,
        plans: Sequence[Plan],
        steps: int,
        mode: Mode | None = None,
        sharing: Sharing | None = None,
        costs: Costs | None = None,
        gpus_per_host: int = 8,
        seed: int = 0,
        times: Sequence[Times] | None = None,
    ) -> None:
        self.steps, self.mode, self.sharing = steps, mode or Mode(), sharing or Sharing()
        self.costs, self.seed, self.clock = costs or Costs(), seed, Clock()
        times = times or [times_of(plan, self.costs, gpus_per_host) for plan in plans]
        self.agents = [Agent(plan, one, self.clock) for plan, one in zip(plans, times, strict=True)]
        self.driver = Queue(self.clock)
        self.logged = Condition()  # another batch is in the log
        self.done = [0] * (steps + 1)  # step -> agents that have learnt it
        self.step_done = Condition()
        self._gpus = {plan.device: Queue(self.clock) for plan in plans if plan.colocated}

    def run(self) -> list[Spent]:
        """Return what every agent spent its time on."""
        for number, agent in enumerate(self.agents):
            self.clock.start(self._sample(number, agent))
            self.clock.start(self._learn(agent))
        self.clock.run()
        unfinished = [agent.plan.name for agent in self.agents if agent.version < self.steps]
        assert not unfinished, f"agents wait for ever: {unfinished}"
        return [agent.spent for agent in self.agents]

    def _sample(self, number: int, agent: Agent) -> Process:
        """Sample every step's responses, with weights as new as the mode demands."""
        plan = agent.plan
        draw = numpy.random.default_rng([self.seed, number])
        for step in range(self.steps):
            while agent.version < step - self.mode.max_staleness:
                yield agent.changed, math.inf
            while self.mode.is_synchronous and step and self.done[step - 1] < len(self.agents):
                yield self.step_done, math.inf
            gpus = self._gpus.get(plan.device) if plan.colocated else None
            if gpus:
                yield from gpus.enter()
            lengths = draw_lengths(draw, plan)
            agent.tokens[step], agent.sampled_by[step] = int(lengths.sum()), agent.version
            batch = Batch(step, lengths.size)
            for place, engine in enumerate(agent.engines):
                part = lengths[place :: plan.engines]
                if part.size:
                    engine.submit(batch, part.ravel().tolist(), len(part))
            while batch.left:
                yield batch.is_sampled, math.inf
            if gpus:
                gpus.leave()
            yield from self._collect(agent, batch)

    def _collect(self, agent: Agent, batch: Batch) -> Process:
        """Verify what is sampled, and bring it to the driver, which writes the log."""
        agent.sampled[batch.step] = self.clock.now
        agent.verified[batch.step] = end_of_verifying(batch.ends, agent.plan)
        yield None, agent.verified[batch.step]
        costs, tokens = self.costs, agent.tokens[batch.step]
        yield None, self.clock.now + tokens * costs.record_bytes / costs.network
        put = costs.record_put if self.sharing.cross else 0.0
        yield from self.driver.use(tokens * (costs.record_get + costs.log_write + put))
        agent.logged[batch.step] = self.clock.now
        self.clock.notify(self.logged)

    def _learn(self, agent: Agent) -> Process:
        """Make every step's updates."""
        clock, spent = self.clock, agent.spent
        for step in range(self.steps):
            yield from self._wait_for_rollouts(agent, step)
            sources = self._take(agent, step)
            learnt = yield from self._update(agent, step, sources)
            report = self.driver.use(learnt * (self.costs.record_get + self.costs.learnt_write))
            if not self.mode.is_synchronous:
                clock.start(report)  # the learner goes on meanwhile
            else:
                yield from self._timed(spent, "communication", report)
            spent.staleness += agent.version - agent.sampled_by[step]
            agent.version += 1
            self.done[step] += 1
            clock.notify(agent.changed)
            clock.notify(self.step_done)
            yield from self._timed(spent, "waiting", self._wait_for_others(step))
        spent.end = clock.now

    def _wait_for_rollouts(self, agent: Agent, step: int) -> Process:
        """Wait for the agent's own rollouts, then for those of the others as long as the mode says."""
        began = self.clock.now
        while step not in agent.logged:
            yield self.logged, math.inf
        ends = (agent.sampled[step], agent.verified[step], agent.logged[step])
        for phase, end in zip(("sampling", "verifying", "communication"), ends, strict=True):
            agent.spent.phases[phase] += max(0.0, end - began)
            began = max(began, end)
        deadline = self.clock.now + self.mode.patience
        while not self._all_logged(step) and self.clock.now < deadline:
            yield self.logged, deadline
        agent.spent.phases["waiting"] += self.clock.now - began

    def _wait_for_others(self, step: int) -> Process:
        """Wait until all agents have learnt a step, if the mode is synchronous."""
        while self.mode.is_synchronous and self.done[step] < len(self.agents):
            yield self.step_done, math.inf

    def _update(self, agent: Agent, step: int, sources: Sequence[Source]) -> Generator[Wait, None, float]:
        """Fetch and prepare the rollouts, learn, and sync the weights; return the tokens learnt from."""
        clock, costs, times, plan, spent = self.clock, self.costs, agent.times, agent.plan, agent.spent
        own, others = agent.tokens[step], sum(other.tokens[at] for other, at in sources)
        foreign = sum(other.tokens[at] for other, at in sources if other.plan.tokenizer != plan.tokenizer)
        responses = sum(other.plan.responses for other, _ in sources)
        share = 1.0 if self.sharing.cap is None or not responses else min(1.0, self.sharing.cap / responses)
        learnt = own + share * (others + (costs.foreign_length - 1) * foreign)
        fetching = (own + others) * (costs.record_bytes / costs.network + costs.record_get)
        preparing = learnt * costs.prepare + share * foreign * costs.retokenise
        computed = learnt + plan.prompts * plan.prompt_tokens
        learning = computed * times.learn + plan.updates * times.update
        gathering = max(plan.updates, math.ceil(computed / times.micro_batch)) * times.gather
        exposed = max(0.0, gathering - learning)
        yield None, clock.now + fetching + preparing
        gpus = self._gpus.get(plan.device) if plan.colocated else None
        if gpus:
            yield from self._timed(spent, "waiting", gpus.enter())
        yield None, clock.now + learning + exposed
        for engine in agent.engines:
            engine.pause(times.sync)
        yield None, clock.now + times.sync
        if gpus:
            gpus.leave()
        for phase, seconds in (
            ("communication", fetching + exposed),
            ("preparing", preparing),
            ("learning", learning),
            ("weight sync", times.sync),
        ):
            spent.phases[phase] += seconds
        spent.learnt_responses += plan.prompts * (plan.responses + share * responses)
        return learnt

    def _timed(self, spent: Spent, phase: str, process: Iterable[Wait]) -> Process:
        """Run a part of a process, and count its seconds."""
        began = self.clock.now
        yield from process
        spent.phases[phase] += self.clock.now - began

    def _all_logged(self, step: int) -> bool:
        return not self.sharing.cross or all(step in other.logged for other in self.agents)

    def _take(self, agent: Agent, step: int) -> list[Source]:
        """Return the other agents' batches that the learner has not used and that are not too old."""
        if not self.sharing.cross:
            return []
        found = []
        for other in self.agents:
            if other is agent:
                continue
            name = other.plan.name
            for at in range(agent.used_until.get(name, 0), step + 1):
                if at not in other.logged:
                    break
                agent.used_until[name] = at + 1
                if step - other.sampled_by[at] <= self.mode.max_staleness:
                    found.append((other, at))
                    agent.spent.taken += 1
                else:
                    agent.spent.dropped += 1
        return found
