"""``executor: ray``: agents in processes of a cluster, which all sample and learn at the same time.

The trainer, the step and the rollout log are those of every executor, in this process. A party's process
streams its events (phases, responses, results). A process or machine that is lost, or silent for too long,
becomes a :class:`WorkerLostError` that names the agents; the trainer then has them placed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from hacrl.algorithms.capability import Capabilities
from hacrl.config.schema import RunConfig
from hacrl.engines.base import SyncReport
from hacrl.errors import ConfigError, TrainingError, WorkerLostError
from hacrl.executors.rank_processes import START_SECONDS
from hacrl.executors.ray.cluster import Cluster, import_ray
from hacrl.executors.ray.events import Event, Failed, PhaseBegun, ResponsesFinished, Result
from hacrl.executors.ray.host import AgentHost, HostFacts, HostSpec, software
from hacrl.executors.ray.members import MemberActor
from hacrl.executors.ray.placement import Member, Party
from hacrl.executors.ray.state_transfer import (
    TOKEN,
    ArrivingFiles,
    pieces_of,
    send,
    shapes_of,
    share,
)
from hacrl.models.agent import Agent
from hacrl.rollouts.groups import PromptGroup
from hacrl.tasks.base import CheckedTask
from hacrl.training.metrics import LearnReport
from hacrl.training.reporter import Reporter
from hacrl.training.tensor_files import WrittenFile
from hacrl.training.worker import Answer, Assignment

LOOK_SECONDS = 1.0  # between two looks at the time while no event comes
CALLS_AT_ONCE = 4  # of one process: an asynchronous agent answers, learns and publishes at the same time
CLOSE_SECONDS = 20.0  # for a process to end its engines and ranks
# Options of a verb: events come one by one, and a process waits if too many of them have not been read.
_STREAMING = {"num_returns": "streaming", "_generator_backpressure_num_objects": 16}


@dataclass
class _Placed:
    """A party with its processes."""

    party: Party
    group: Any  # Ray's placement group
    host: Any  # the actor of rank 0
    members: dict[Member, Any] = field(default_factory=dict)  # the actors of further processes
    facts: HostFacts | None = None  # once its agents are loaded

    @property
    def agents(self) -> list[str]:
        return [agent.name for agent in self.party.agents]

    @property
    def where(self) -> str:
        assert self.facts is not None, "its agents are loaded"
        return f"{self.facts.machine} (process {self.facts.pid})"


class RayExecutor:
    """Drives all agents' processes."""

    replaces_lost = True

    def __init__(
        self, config: RunConfig, checked: CheckedTask, cluster: Cluster, parties: Sequence[Party]
    ) -> None:
        """Place all parties and load their agents, all at the same time."""
        self._ray = import_ray()
        self._config = config
        self._cluster = cluster
        self._patience = config.ray.patience
        self._devices = dict(checked.devices)
        names = tuple(agent.name for agent in config.agents)
        self._spec = self._ray.put(
            HostSpec(
                config,
                self._devices,
                list(checked.train),
                list(checked.test),
                checked.task if checked.is_object else None,
            )
        )
        self._versions = dict.fromkeys(names, 0)
        self._known = tuple(parties)
        self._placed: dict[str, _Placed] = {}  # by agent
        self._ending = threading.Lock()  # in an asynchronous run two calls notice that a process is gone
        self.notes: tuple[str, ...] = ()
        self._is_released = False
        try:
            self._place(parties)
        except WorkerLostError as error:
            self.release()
            raise TrainingError(f"executor: ray: {error}, before training could begin") from error
        except BaseException:
            self.release()
            raise

    def _place(self, parties: Sequence[Party]) -> None:
        """Give parties rooms and processes, and load their agents."""
        groups = self._cluster.reserve(list(parties))
        placed = []
        for party in parties:
            found = self._start(party, groups[party.name])
            placed.append(found)
            self._placed |= dict.fromkeys(found.agents, found)
        self._check_software(placed)
        streams = {
            one.agents[0]: one.host.load.options(**_STREAMING).remote(self._spec, one.agents, one.members)
            for one in placed
        }
        notes = list(self.notes)
        for result in self._results(streams, None):
            facts: HostFacts = result.value
            self._placed[result.agent].facts = facts
            self._versions |= facts.policy_versions
            notes += [note for note in facts.notes if note not in notes]
        places = [f"{' and '.join(one.agents)} on {one.where}" for one in placed]
        self.notes = (f"placed by Ray: {', '.join(places)}", *notes)

    def _start(self, party: Party, group: Any) -> _Placed:
        """Start the party's processes in its rooms, without waiting."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = party.bundles

        def options(bundle: int) -> dict[str, Any]:
            asked = dict(bundles[bundle])
            return {
                "num_cpus": asked.pop("CPU", 0),
                "num_gpus": asked.pop("GPU", 0),
                "resources": asked,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
                "max_concurrency": CALLS_AT_ONCE,
                "max_restarts": 0,  # a process that starts again by itself would have the first weights
            }

        host = self._ray.remote(AgentHost).options(**options(0)).remote()
        members = {
            member: self._ray.remote(MemberActor).options(**options(bundle)).remote()
            for bundle, member in enumerate(party.members, start=1)
        }
        return _Placed(party, group, host, members)

    def _check_software(self, placed: Sequence[_Placed]) -> None:
        """Raise unless all processes have the same versions of what decides numbers."""
        from ray.exceptions import GetTimeoutError

        own = software()
        limit = max(START_SECONDS, self._config.ray.placement_timeout)
        for one in placed:
            try:
                found = self._ray.get(one.host.software.remote(), timeout=limit)
            except Exception as error:  # Ray's errors have no common base that is documented
                why = f"is not ready after {limit:g} s (ray.placement_timeout); is its machine overloaded?"
                if not isinstance(error, GetTimeoutError):
                    why = f"does not start: {_first_line(error)}"
                raise WorkerLostError(dict.fromkeys(one.agents, f"its process {why}")) from error
            if found != own:
                raise ConfigError(
                    f"executor: ray: the process of {' and '.join(one.agents)} has {_versions(found)}, "
                    f"this one has {_versions(own)}; install the same versions on all machines"
                )

    @property
    def agents(self) -> dict[str, Agent]:
        """None: no agent lives in this process."""
        return {}

    @property
    def processes(self) -> dict[str, HostFacts]:
        """The process of every agent that has one, by agent."""
        return {name: one.facts for name, one in self._placed.items() if one.facts is not None}

    @property
    def devices(self) -> dict[str, str]:
        """The kind of device of every agent."""
        return dict(self._devices)

    @property
    def policy_versions(self) -> dict[str, int]:
        """The number of updates by agent, as its process said last."""
        return dict(self._versions)

    @property
    def rollouts_per_prompt(self) -> dict[str, int]:
        """The number of responses to each prompt by agent."""
        return {agent.name: self._config.rollouts_per_prompt(agent) for agent in self._config.agents}

    @property
    def updates_while_generating(self) -> dict[str, bool]:
        """Whether each agent's engine takes new weights while it generates."""
        found: dict[str, bool] = {}
        for facts in self.processes.values():
            found |= facts.updates_while_generating
        return found

    def publish(self, agent: str) -> SyncReport:
        """Send an agent's weights to its engine."""
        ((_, report),) = self._all("publish", [agent], None)
        found: SyncReport = report
        return found

    def answer(
        self, assignment: Assignment, agents: Sequence[str], reporter: Reporter
    ) -> Iterator[tuple[str, Answer]]:
        """Yield each agent's verified rollouts as soon as they are there."""
        yield from self._all("answer", agents, reporter, assignment)

    def learn(
        self,
        groups: Sequence[PromptGroup],
        capabilities: Capabilities,
        step: int,
        agents: Sequence[str],
        reporter: Reporter,
    ) -> Iterator[tuple[str, LearnReport]]:
        """Yield each agent's report as soon as it has learnt."""
        yield from self._all("learn", agents, reporter, list(groups), capabilities, step)

    def _all(
        self, verb: str, agents: Sequence[str], reporter: Reporter | None, *arguments: Any
    ) -> Iterator[tuple[str, Any]]:
        """Call a verb of all agents at once; yield what it returns for each."""
        if reporter is not None:
            reporter.check_interrupted()
        shared = [self._ray.put(argument) for argument in arguments]  # once for all processes
        streams = {}
        for one in self._parties(agents):
            own = [name for name in agents if name in one.agents]
            streams[own[0]] = getattr(one.host, verb).options(**_STREAMING).remote(*shared, own)
        for result in self._results(streams, reporter):
            self._versions[result.agent] = result.policy_version
            yield result.agent, result.value

    def _parties(self, agents: Sequence[str]) -> list[_Placed]:
        """Return the agents' parties, each once. Raise for agents without processes."""
        if self._is_released:
            raise TrainingError(
                "the run is closed, and its agents have left the cluster; `hacrl eval "
                f"{self._config.output}` evaluates the saved ones"
            )
        missing = [name for name in agents if name not in self._placed]
        if missing:
            raise WorkerLostError(dict.fromkeys(missing, "it has no process"))
        return list({id(one): one for one in (self._placed[name] for name in agents)}.values())

    def _results(self, streams: Mapping[str, Any], reporter: Reporter | None) -> Iterator[Result]:
        """Yield the results of streams (by one agent of the party), and report their other events.

        Raise WorkerLostError for lost parties after the others' streams have ended, or at once what another
        error says.
        """
        running = {stream: agent for agent, stream in streams.items()}
        heard = dict.fromkeys(running.values(), time.monotonic())
        lost: dict[str, str] = {}
        failure: Exception | None = None
        while running:
            ready, _ = self._ray.wait(list(running), num_returns=1, timeout=LOOK_SECONDS)
            for stream in ready:
                agent = running[stream]
                try:
                    event: Event = self._ray.get(next(stream))
                except StopIteration:
                    del running[stream]
                    continue
                except Exception as error:
                    del running[stream]
                    if not _is_loss(error):
                        failure = failure or error
                        continue
                    lost |= self._lose(agent, f"its process is gone: {_first_line(error)}")
                    continue
                heard[agent] = time.monotonic()
                if isinstance(event, Result):
                    if reporter is not None:
                        reporter.seconds |= event.seconds
                    yield event
                elif isinstance(event, Failed):
                    if isinstance(event.error, WorkerLostError):
                        reason = event.error.lost.get(agent, str(event.error))
                        lost |= self._lose(agent, reason)
                    else:
                        failure = failure or event.error
                elif reporter is not None:
                    _report(event, reporter)
            for stream, agent in list(running.items()):
                silent = time.monotonic() - heard[agent]
                if silent > self._patience:
                    del running[stream]
                    lost |= self._lose(
                        agent, f"it has made no progress for {silent:.0f} s (ray.patience={self._patience:g})"
                    )
        if failure is not None:
            raise failure
        if lost:
            raise WorkerLostError(lost)

    def _lose(self, agent: str, reason: str) -> dict[str, str]:
        """End what is left of an agent's party; return all its agents with the reason."""
        with self._ending:
            one = self._placed.get(agent)
            if one is None:
                return {agent: reason}
            self._end(one)
        return dict.fromkeys(one.agents, reason)

    def _end(self, one: _Placed) -> None:
        for actor in (one.host, *one.members.values()):
            with suppress(Exception):  # it may be gone already
                self._ray.kill(actor)
        self._cluster.free(one.group)
        for name in one.agents:
            self._placed.pop(name, None)

    def place_again(self, agent: str) -> None:
        """Give a lost agent, and those that share its process, new processes and the first weights."""
        if agent in self._placed:
            return  # it came with another one of its party
        self._place([party for party in self._known if agent in [one.name for one in party.agents]])

    def drop(self, agent: str) -> None:
        """Free what the agent takes, if nobody shares its process."""
        one = self._placed.pop(agent, None)
        if one is not None and not any(name in self._placed for name in one.agents):
            self._end(one)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return every agent's state."""
        return dict(self._all("state_dict", list(self._placed), None))

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return every agent's tensors, copied into this machine's memory."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self._placed}
        for agent, (name, packed) in self._all("tensors", list(self._placed), None):
            found[agent][name] = packed.unpack()
        return found

    writes_tensors = True

    def write_tensors(self, folder: Path) -> dict[str, WrittenFile]:
        """Write every agent's tensors into a file of the folder.

        Processes that see the folder write into it themselves. Others send their files in pieces.
        """
        token = share(folder)
        arriving = ArrivingFiles(folder)
        try:
            for agent, value in self._all("write_tensors", list(self._placed), None, str(folder), token):
                arriving.add(agent, value)
            return arriving.files()
        finally:
            arriving.close()
            (folder / TOKEN).unlink(missing_ok=True)

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Restore the agents that are named."""
        for agent in state:
            (one,) = self._parties([agent])
            own = tensors.get(agent, {})  # a frozen agent has none
            self._finish(agent, one.host.expect.remote(agent, shapes_of(own)))
            calls = (partial(one.host.take.remote, agent, *piece) for piece in pieces_of(own))
            send(calls, partial(self._finish, agent))
            stream = one.host.load_state.options(**_STREAMING).remote(agent, state[agent])
            for result in self._results({agent: stream}, None):
                self._versions[agent] = result.policy_version

    def _finish(self, agent: str, call: Any) -> None:
        """Wait for a call of an agent's process. Raise WorkerLostError if the process is gone or silent."""
        from ray.exceptions import GetTimeoutError

        try:
            self._ray.get(call, timeout=self._patience)
        except GetTimeoutError as error:
            reason = f"it has taken nothing for {self._patience:g} s (ray.patience)"
            raise WorkerLostError(self._lose(agent, reason)) from error
        except Exception as error:
            if not _is_loss(error):
                raise
            raise WorkerLostError(self._lose(agent, f"its process is gone: {_first_line(error)}")) from error

    def save(self, agent: str, folder: Path) -> None:
        """Write one agent's files, which its process sends in pieces: no disk need be shared."""
        (one,) = self._parties([agent])
        begun: set[str] = set()
        for result in self._results({agent: one.host.save.options(**_STREAMING).remote(agent)}, None):
            name, piece = result.value
            path = folder / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab" if name in begun else "wb") as file:
                file.write(piece)
            begun.add(name)

    def release(self) -> None:
        """End all processes, and the cluster if hacrl started it."""
        placed = list({id(one): one for one in self._placed.values()}.values())
        closing = [one.host.close.remote() for one in placed]
        with suppress(Exception):  # processes that are gone need no closing
            self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        for one in placed:
            self._end(one)
        self._is_released = True
        self._cluster.disconnect()


def _report(event: PhaseBegun | ResponsesFinished, reporter: Reporter) -> None:
    if isinstance(event, PhaseBegun):
        reporter.observer.on_phase(reporter.step, event.phase, event.agent)
    else:
        for _ in range(event.count):
            reporter.observer.on_response(event.agent)


def _is_loss(error: Exception) -> bool:
    """Return whether Ray says that a process or machine is gone, or what it kept."""
    from ray import exceptions

    return isinstance(
        error,
        exceptions.RayActorError
        | exceptions.WorkerCrashedError
        | exceptions.NodeDiedError
        | exceptions.ObjectLostError
        | exceptions.OwnerDiedError,
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in found.items())
