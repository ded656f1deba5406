"""Bring a lost agent back to where the run is: from its last checkpoint, and from the rollout log after it.

The other agents keep their weights and lose no rollout. Learning depends on the groups, the capabilities and
the step alone, so an agent that learns the logged steps again arrives at the weights that were lost, to the
last bit where the arithmetic is the same. Nothing is sampled again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hacrl.algorithms.capability import CapabilityTracker
from hacrl.config.schema import OnLoss, RunConfig
from hacrl.errors import CheckpointError, TrainingError, WorkerLostError
from hacrl.rollouts.groups import PromptGroup, group_by_prompt, rewards_that_count
from hacrl.rollouts.log import RolloutLog
from hacrl.tasks.stream import ProblemStream
from hacrl.training.executor import Executor
from hacrl.training.reporter import Reporter
from hacrl.training.resampling import Resampler


@dataclass(frozen=True)
class AgentCheckpoint:
    """One agent's part of a checkpoint, and the capabilities from which later steps go on."""

    steps: int  # that the agent had learnt
    capabilities_after: int  # steps that the capabilities below have seen
    capabilities: Mapping[str, Any]  # state of the tracker
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, agent: str, state: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> AgentCheckpoint:
        """Return an agent's part of what a trainer's ``state_dict`` and ``tensors`` returned."""
        done, under_way = int(state["steps_done"]), state["under_way"]
        learnt = done + (under_way is not None and agent in under_way["learnt"])
        if "asynchronous" in state:  # agents may be ahead of the last step that all have finished
            learnt = int(state["asynchronous"]["agents"][agent]["learnt"])
        return cls(learnt, done, state["capabilities"], state["agents"][agent], tensors.get(agent, {}))


# Returns the newest checkpoint's part of an agent; None if the run has no checkpoint yet.
FindCheckpoint = Callable[[str], AgentCheckpoint | None]


class Recovery:
    """Rebuilds lost agents, or takes them out of the run, as the recipe says."""

    def __init__(
        self, config: RunConfig, stream: ProblemStream, log: RolloutLog, find_checkpoint: FindCheckpoint
    ) -> None:
        self._config = config
        self._stream = stream
        self._log = log
        self._find_checkpoint = find_checkpoint
        self._resampler = Resampler(config, stream)
        self._losses: Counter[str] = Counter()

    @property
    def on_loss(self) -> OnLoss:
        """What the recipe asks for when an agent is lost."""
        return self._config.ray.on_loss

    def bring_back(self, lost: Mapping[str, str], rebuild: Callable[[str], None]) -> None:
        """Call ``rebuild`` for every lost agent, and again for those that are lost meanwhile."""
        waiting = dict(lost)
        while waiting:
            self._count(waiting)
            agents, waiting = list(waiting), {}
            for agent in agents:
                try:
                    rebuild(agent)
                except WorkerLostError as again:
                    waiting |= again.lost

    def _count(self, lost: Mapping[str, str]) -> None:
        """Count a loss of these agents. Raise TrainingError if one has been lost too often."""
        self._losses.update(lost.keys())
        limit = self._config.ray.max_rebuilds
        for agent, reason in lost.items():
            if self._losses[agent] > limit:
                raise TrainingError(
                    f"agent {agent!r} was lost for the {self._losses[agent]}th time, ray.max_rebuilds={limit}"
                    f" are allowed ({reason}). hacrl resume {self._config.output} goes on once its machine "
                    "is sound"
                )

    def rebuild(self, executor: Executor, agent: str, steps: int, version: int, reporter: Reporter) -> None:
        """Place the agent anew, with the weights it had after ``steps`` steps and ``version`` updates.

        Raise WorkerLostError if it is lost again meanwhile.
        """
        executor.place_again(agent)
        if any(one.name == agent and one.frozen for one in self._config.agents):
            reporter.notes([f"agent {agent!r} is loaded again; it is frozen and has nothing to learn"])
            return
        found = self._find_checkpoint(agent)
        if found is not None and found.steps > steps:
            raise CheckpointError(
                f"agent {agent!r}: its newest checkpoint is of step {found.steps}, the run is at step {steps}"
            )
        start, seen = 0, 0
        capabilities = CapabilityTracker.of([one.name for one in self._config.agents], self._config.method)
        if found is not None:
            executor.load_state_dict({agent: found.state}, {agent: found.tensors})
            capabilities.load_state_dict(found.capabilities)
            start, seen = found.steps, found.capabilities_after
        origin = "its first weights" if found is None else f"the checkpoint of step {start}"
        again = f"; steps {start + 1} to {steps} are learnt again from the rollout log" * (steps > start)
        reporter.notes([f"agent {agent!r} is rebuilt from {origin}{again}"])
        for step in range(seen + 1, steps + 1):
            self._learn_again(executor, agent, step, capabilities, reporter, learns=step > start)
        reached = executor.policy_versions[agent]
        if reached != version:
            raise CheckpointError(
                f"agent {agent!r} was rebuilt with {reached} updates, but had made {version}: the rollout "
                f"log in {self._log.folder} does not hold what it learnt from; hacrl resume goes on from "
                "the last checkpoint"
            )

    def _learn_again(
        self,
        executor: Executor,
        agent: str,
        step: int,
        capabilities: CapabilityTracker,
        reporter: Reporter,
        learns: bool,
    ) -> None:
        """Record a logged step's rewards; let the agent learn from it if it has not."""
        names = [one.name for one in self._config.agents]
        resampler = self._resampler
        problems = self._stream.problems if resampler.rounds else self._stream.batch(step - 1)
        asked: list[PromptGroup] = []
        rewards: dict[str, list[float]] = {}
        for number in range(1 + resampler.rounds):
            present = [name for name in names if self._log.has(step, name, number)]
            rollouts = {name: self._log.load(step, name, problems, number) for name in present}
            for name, found in rollouts.items():
                rewards.setdefault(name, []).extend(rewards_that_count(found))
            asked += group_by_prompt(rollouts)
        if agent not in rewards:
            raise CheckpointError(
                f"agent {agent!r} cannot be rebuilt: the rollouts of step {step} are not in "
                f"{self._log.folder} any more. Set keep_rollouts: all, or checkpoint.every, so that what is "
                "after the last checkpoint stays"
            )
        earning = {name: values for name, values in rewards.items() if values}
        capabilities.record(earning, absent=[name for name in names if name not in earning])
        if learns:
            groups = resampler.chosen(asked)
            for _ in executor.learn(groups, capabilities.current, step, [agent], reporter):
                pass


def no_recovery(error: WorkerLostError) -> TrainingError:
    """Return the error of a run that is to stop when an agent is lost."""
    return TrainingError(f"{error}. hacrl resume goes on from the last checkpoint")
