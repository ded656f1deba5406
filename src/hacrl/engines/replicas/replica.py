"""One replica: a copy of an agent's model in a process of its own, which serves the engine.

The main thread generates. A second thread receives messages and weights, so that weights arrive between two
tokens of a generation.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from hacrl.config.load import build_config
from hacrl.engines.base import Sample
from hacrl.engines.hf.live_update import Cancelled, LiveUpdate
from hacrl.engines.hf.updatable import CopiedPolicy, UpdatableModel
from hacrl.engines.replicas.connection import Connection, Message, request_of, sample_message
from hacrl.engines.replicas.weight_broadcast import GroupSettings, WeightGroup, receive_bucket
from hacrl.models.device import current_device
from hacrl.models.loading import load_text_codec, make_skeleton
from hacrl.models.rank_group import Meeting, listen
from hacrl.models.sharding import Places
from hacrl.models.stop_strings import StopStrings
from hacrl.types import Sampling


@dataclass(frozen=True)
class ReplicaArguments:
    """What a replica is started with; plain JSON values."""

    host: str  # of the engine
    port: int  # of the engine's connection
    store_port: int  # of the store in which the processes meet for broadcasts
    token: str  # proves that the replica belongs to the engine
    number: int  # of the replica, from 0
    agent: dict[str, Any]  # the agent's settings, with the precision of its weights
    stop_ids: list[int]
    context_length: int | None
    device: str
    max_batch: int
    compiles: bool | None
    threads: int
    timeout: float  # seconds to wait for other processes

    @property
    def name(self) -> str:
        """The replica in messages."""
        return f"replica {self.number} of agent {self.agent['name']!r}"


class Replica:
    """Serves one engine over a connection, which ``connect`` makes when the replica is ready."""

    def __init__(self, arguments: ReplicaArguments, connect: Callable[[], Connection]) -> None:
        self._copy = _Copy(arguments)  # first: an error in it must end the program before it connects
        self._connection = connect()
        self._copy.address = self._connection.address
        self._live_update = self._copy.live_update
        self._jobs: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._has_failed = False
        self._handlers: dict[str, Callable[[Message], Any]] = {
            "join": self._copy.join,
            "update": self._update,
            "generate": self._jobs.put,
            "cancel": self._cancel,
            "ping": lambda _: {"steps": self._live_update.steps},
            "free_cache": lambda _: self._copy.free_cache(),
        }

    def serve(self) -> int:
        """Generate what is asked for until the connection ends; return the exit code."""
        threading.Thread(target=self._receive, name="hacrl-replica", daemon=True).start()
        while (job := self._jobs.get()) is not None:
            self._generate(job)
        return 1 if self._has_failed else 0

    def _receive(self) -> None:
        """Handle messages in order until the connection ends; let the program end then."""
        try:
            with current_device(self._copy.device):
                while (message := self._connection.receive()) is not None and message["do"] != "end":
                    self._handle(message)
        except BaseException:
            traceback.print_exc()
            self._has_failed = True
        self._connection.close()  # first: the engine must notice even if a generation goes on
        self._jobs.put(None)
        self._live_update.cancel()

    def _handle(self, message: Message) -> None:
        """Do what a message asks, and send the result if the message has a number."""
        self._reply(message, self._handlers[message["do"]])

    def _reply(self, message: Message, action: Callable[[Message], Any]) -> bool:
        """Send the action's result or error, if the message has a number; return whether it succeeded."""
        try:
            result = action(message)
        except Exception as error:  # whatever it is, the engine's message names the replica
            traceback.print_exc()
            self._connection.send({"reply": message.get("number"), "error": described(error)})
            return False
        if "number" in message:
            self._connection.send({"reply": message["number"], "result": result})
        return True

    def _update(self, _: Message) -> None:
        """Receive weights while no token is sampled, and send the samples that prove them.

        If a broadcast breaks off or the weights give no numbers, a generation waits until the engine starts
        the update again.
        """
        with self._live_update.update():
            is_whole = True
            while (message := self._connection.receive()) is not None:
                if message["do"] == "update":
                    is_whole = True
                elif message["do"] == "bucket":
                    is_whole = is_whole and self._copy.receive(message)
                elif message["do"] == "prove":
                    if self._reply(message, self._prove if is_whole else _refuse):
                        return
                else:
                    self._handle(message)

    def _prove(self, message: Message) -> list[Any]:
        return list(map(sample_message, self._copy.finish_update(message)))

    def _cancel(self, message: Message) -> None:
        self._cancelled.add(message["job"])
        self._live_update.cancel()

    def _generate(self, job: Message) -> None:
        """Generate one job's samples and send them as they finish."""
        number = job["job"]

        def on_finished(finished: Sequence[tuple[int, Sample]]) -> None:
            if number in self._cancelled:
                raise Cancelled
            samples = [[index, *sample_message(sample)] for index, sample in finished]
            self._connection.send({"job": number, "finished": samples})

        with suppress(OSError):  # the engine is gone, and the other thread ends the program
            try:
                if number not in self._cancelled:
                    notes = self._copy.generate(job, on_finished)
                    self._connection.send({"job": number, "done": True, **notes})
            except Cancelled:
                pass
            except OSError:
                raise
            except Exception as error:
                traceback.print_exc()
                self._connection.send({"job": number, "error": described(error)})


class _Copy:
    """The replica's model: weights without values at first, which the first update brings."""

    def __init__(self, arguments: ReplicaArguments) -> None:
        self._arguments = arguments
        self.address = ""  # where the engine reaches this process
        self.name = arguments.agent["name"]
        self.policy_version = -1  # none yet
        self.context_length = arguments.context_length
        self.stop_ids = frozenset(arguments.stop_ids)
        self.device = torch.device(arguments.device)
        self.live_update = LiveUpdate(arguments.name, self.policy_version, arguments.timeout)
        self._updatable: UpdatableModel | None = None  # when the first weights have arrived
        self._store: Any = None
        self._group: WeightGroup | None = None
        settings = build_config({"agents": [arguments.agent], "output": "-"}, arguments.name).agents[0]
        self._settings = settings
        self._known_stop_strings: StopStrings | None = None
        self._model = _without_values(make_skeleton(settings, arguments.device), self.device)
        self._targets = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        self._missing = set(self._targets)

    def join(self, message: Message) -> None:
        """Join a group with the learner and the other replicas."""
        arguments = self._arguments
        self._group = None
        if self._store is None:
            place = Meeting(arguments.host, arguments.store_port, arguments.number + 1, 0)
            self._store = listen(place, arguments.timeout)
        settings = GroupSettings(**message["group"])
        self._group = WeightGroup(settings, self._store, self.address, self.device)

    def receive(self, message: Message) -> bool:
        """Receive a bucket of weights; return False if the broadcast broke off."""
        if self._group is None:
            return False
        try:
            self._missing -= set(receive_bucket(message, self._targets, self._group))
        except RuntimeError:
            traceback.print_exc()
            self._group = None  # closes its connections, so that others notice
            return False
        return True

    def finish_update(self, message: Message) -> list[Sample]:
        """Note that weights are whole; return the samples that prove them."""
        if self._missing:
            raise RuntimeError(f"no values have arrived for {', '.join(sorted(self._missing)[:4])}")
        if self._updatable is None:
            policy = CopiedPolicy(self, self._model, self.device)
            settings = self._arguments
            self._updatable = UpdatableModel(
                policy, self.live_update, settings.max_batch, compiles=settings.compiles
            )
        self._updatable.set_version(message["version"])
        prompts = [tuple(prompt) for prompt in message["prompts"]]
        return self._updatable.probe(prompts, Sampling(message["new_tokens"]))

    def generate(
        self, job: Message, on_finished: Callable[[Sequence[tuple[int, Sample]]], None]
    ) -> dict[str, Any]:
        """Generate a job's samples; return what the engine notes of it."""
        if self._updatable is None:
            raise RuntimeError("it has no weights yet")
        self._updatable.engine.max_batch = min(self._updatable.engine.max_batch, job["max_batch"])
        request = request_of(job["request"])
        if request.sampling.stop:
            request = replace(request, stop_strings=self._stop_strings(request.sampling.stop))
        self._updatable.generate(request, on_finished)
        return {
            "notes": self._updatable.engine.take_notes(),
            "max_batch": self._updatable.engine.max_batch,
        }

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        """Return the stop strings of a request; the tokenizer that they need is loaded once."""
        if self._known_stop_strings is None or self._known_stop_strings.strings != strings:
            self._known_stop_strings = StopStrings(load_text_codec(self._settings), strings)
        return self._known_stop_strings

    def free_cache(self) -> None:
        """Free the KV cache, unless it is small or in use."""
        if self._updatable is not None:
            self._updatable.free_cache()


def _without_values(skeleton: Any, device: torch.device) -> Any:
    """Return the model with memory for all weights and buffers, whose values are undefined."""
    places = Places(skeleton)
    for tensor in [*skeleton.parameters(), *skeleton.buffers()]:
        places.fill(tensor, torch.empty_like(tensor, device=device))
    return skeleton.requires_grad_(False)


def _refuse(_: Message) -> None:
    raise RuntimeError("a broadcast of weights broke off")


def described(error: BaseException) -> str:
    """Return an error for a message."""
    return f"{type(error).__name__}: {error}"[:2000]
