"""An agent's replicas: start them, connect them for broadcasts, and give up those that are lost."""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hacrl.config.schema import AgentSettings
from hacrl.engines.replicas.connection import Message, greeted
from hacrl.engines.replicas.handle import ReplicaHandle, ReplicaLostError
from hacrl.engines.replicas.placement import END_SECONDS, START_SECONDS, ReplicaPlacement
from hacrl.engines.replicas.replica import ReplicaArguments
from hacrl.engines.replicas.weight_broadcast import GroupSettings, WeightGroup, transport_between
from hacrl.engines.sync_check import EngineError
from hacrl.errors import HacrlError, WorkerLostError
from hacrl.models.rank_group import Meeting, is_lost_connection, listen

MAX_LOSSES = 3  # of each replica in a run
ACCEPT_SECONDS = 0.2  # between looks at the processes that have not connected yet
GREETING_SECONDS = 5.0
FAILURE_SECONDS = 2.0  # from a broadcast that broke off until it is known who is gone
PING_SECONDS = 10.0


@dataclass(frozen=True)
class FleetSettings:
    """What replicas are made from."""

    agent: AgentSettings  # with the precision of the weights
    stop_ids: tuple[int, ...]
    context_length: int | None
    learner: torch.device
    devices: tuple[torch.device, ...]  # one per replica
    max_batch: int
    compiles: bool | None
    timeout: float  # seconds


class Fleet:
    """Replicas by number. ``events``: what they report of jobs, and None for one whose connection ended."""

    def __init__(self, settings: FleetSettings, placement: ReplicaPlacement) -> None:
        self.settings = settings
        self.restarts = 0
        self.is_syncing = False  # then replicas sample nothing
        self.notes: list[str] = []
        self.events: queue.SimpleQueue[tuple[ReplicaHandle, Message | None]] = queue.SimpleQueue()
        self._placement = placement
        self._replicas: dict[int, ReplicaHandle] = {}
        self._losses = [0] * len(settings.devices)
        self._changing = threading.Lock()  # of the replicas
        self._token = secrets.token_urlsafe(24)
        self._listener: socket.socket | None = None
        self._store: Any = None
        self._group: WeightGroup | None = None
        self._groups = 0  # made so far

    @property
    def agent(self) -> str:
        """The agent's name."""
        return self.settings.agent.name

    @property
    def replicas(self) -> list[ReplicaHandle]:
        """The replicas that are not lost, in order."""
        with self._changing:
            return [self._replicas[number] for number in sorted(self._replicas)]

    def start_missing(self) -> None:
        """Start the replicas that do not run, and wait until all are connected."""
        missing = [number for number in range(len(self.settings.devices)) if number not in self._replicas]
        if not missing:
            return
        if self._listener is None:
            host = self._placement.host
            self._listener = socket.create_server((host, 0))
            self._listener.settimeout(ACCEPT_SECONDS)
            processes = 1 + len(self.settings.devices)
            self._store = listen(Meeting(host, 0, 0, processes), self.settings.timeout)
        started = {number: self._launch(number) for number in missing}
        try:
            self._accept(started)
        except BaseException:
            for replica in started.values():
                replica.end()
            raise
        with self._changing:
            self._replicas |= started
            self._group = None
        self.restarts += sum(self._losses[number] > 0 for number in missing)

    def _launch(self, number: int) -> ReplicaHandle:
        settings, device = self.settings, self.settings.devices[number]
        assert self._listener is not None
        threads = torch.get_num_threads()
        arguments = ReplicaArguments(
            host=self._placement.host,
            port=self._listener.getsockname()[1],
            store_port=self._store.port,
            token=self._token,
            number=number,
            agent=asdict(settings.agent),
            stop_ids=list(settings.stop_ids),
            context_length=settings.context_length,
            device=str(device),
            max_batch=settings.max_batch,
            compiles=settings.compiles,
            threads=max(1, threads // len(settings.devices)) if device.type == "cpu" else threads,
            timeout=settings.timeout,
        )
        process = self._placement.start(arguments.name, number, asdict(arguments))
        return ReplicaHandle(arguments.name, device, process, self.events)

    def _accept(self, started: dict[int, ReplicaHandle]) -> None:
        """Wait until all have connected; raise EngineError for one that ends or takes too long."""
        assert self._listener is not None
        deadline = time.monotonic() + START_SECONDS
        while waiting := [replica for replica in started.values() if not replica.is_connected]:
            for replica in waiting:
                if not replica.process.is_alive():
                    raise EngineError(f"{replica.name} does not start: {replica.process.why_ended()}")
            if time.monotonic() > deadline:
                names = ", ".join(replica.name for replica in waiting)
                raise EngineError(
                    f"{names}: not connected to {self._placement.host} after {START_SECONDS:g} s"
                )
            with suppress(TimeoutError):
                end, _ = self._listener.accept()
                found = greeted(end, self._token, GREETING_SECONDS)
                if found is not None and found[0] in started:
                    started[found[0]].connect(found[1])

    def group(self) -> WeightGroup:
        """Return the group of the learner and all replicas; connect it anew if a replica was replaced."""
        if self._group is not None:
            return self._group
        replicas, settings = self.replicas, self.settings
        self._groups += 1
        transport = transport_between(settings.learner, [replica.device for replica in replicas])
        own = GroupSettings(self._groups, transport, 0, 1 + len(replicas), settings.timeout)
        replies = [
            replica.ask({"do": "join", "group": asdict(replace(own, rank=rank))})
            for rank, replica in enumerate(replicas, start=1)
        ]
        try:
            self._group = WeightGroup(own, self._store, self._placement.host, settings.learner)
        except RuntimeError as error:
            raise self.explained(error) from error
        for reply in replies:
            reply.result(settings.timeout)
        return self._group

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Return which replica is to blame for a broadcast that broke off, or the error itself."""
        self._group = None
        if not is_lost_connection(error):
            return error
        replicas, deadline = self.replicas, time.monotonic() + FAILURE_SECONDS
        while time.monotonic() < deadline:
            for replica in replicas:
                if not (replica.is_connected and replica.process.is_alive()):
                    return ReplicaLostError(replica, replica.why_lost())
            time.sleep(0.05)
        pings = [replica.ask({"do": "ping"}) for replica in replicas]
        for ping in pings:
            try:
                ping.result(PING_SECONDS)
            except ReplicaLostError as lost:
                return lost
        return EngineError(
            f"agent {self.agent!r}: its weights did not reach all of its {len(replicas)} replicas "
            f"({str(error).splitlines()[0][:200]}); is the network between them slow or blocked?"
        )

    def lose(self, error: ReplicaLostError) -> None:
        """Give up a replica: end its process. Raise EngineError if it was lost too often."""
        with self._changing:
            found = [number for number, one in self._replicas.items() if one is error.replica]
            for number in found:
                del self._replicas[number]
            self._group = None
        error.replica.end()
        for number in found:  # at most one; none if another thread was faster
            self._losses[number] += 1
            if self._losses[number] > MAX_LOSSES:
                raise EngineError(f"{error}. It was lost {self._losses[number]} times in this run") from error
            self.notes.append(
                f"{error}. The others sample its prompts until the next weight sync starts it again"
            )

    def all_lost(self) -> HacrlError:
        """Return the error of an agent without replicas: its executor may place the agent anew."""
        why = f"all of its replicas are lost; {self.notes[-1] if self.notes else 'none was started'}"
        if self._placement.replaces_agent:
            return WorkerLostError({self.agent: why})
        return EngineError(f"agent {self.agent!r}: {why}")

    def post(self, replicas: Sequence[ReplicaHandle], message: Message) -> None:
        """Send a message to several replicas."""
        for replica in replicas:
            replica.post(message)

    def close(self) -> None:
        """End all replicas. They may be started again."""
        replicas = self.replicas
        with self._changing:
            self._replicas, self._group = {}, None
        self.post(replicas, {"do": "end"})
        for replica in replicas:
            replica.end(END_SECONDS)
        if self._listener is not None:
            self._listener.close()
        self._listener, self._store = None, None
