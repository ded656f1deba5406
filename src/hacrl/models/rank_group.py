"""The ranks of one agent: processes that hold a share of its weights each and make every update together.

All ranks run the same code on the same plain records, so they meet in the same collectives. Whatever one rank
alone can know (a loss, memory that ran out) is gathered before anything is decided by it. Rank 0 leads: it
has the agent's engine, and announces through the group's store what comes next. The other ranks follow
(``hacrl.training.follower``).

A rank that fails writes its error to the store, so that the others can name it. No rank waits in a collective
for longer than the group's time limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from hacrl.errors import HacrlError, TrainingError, WorkerLostError

LONGEST_PAUSE = 0.1  # seconds between two looks at the store
MEETING_SECONDS = 3600.0  # until all ranks have done what takes some of them much longer: loading weights
FAILURE_SECONDS = 2.0  # for the error that a lost rank may still write to the store

Arguments = Callable[[], dict[str, Any]]  # makes the JSON-ready keywords of a call, if they are needed


class Ranks(Protocol):
    """What a learner needs of the processes that learn with it."""

    rank: int
    world: int  # number of ranks
    is_group: bool  # whether weights are sharded, so that every pass is a collective

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's data, in the order of ranks, on every rank."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Return a block in which ranks meet in collectives: the error of one rank is explained on all."""
        ...

    def announce(self, verb: str, arguments: Arguments = dict) -> None:
        """Let the other ranks call what this process is about to call, if it leads a group."""
        ...


class OneRank:
    """An agent that is whole in one process: there is nobody to exchange anything with."""

    rank = 0
    world = 1
    is_group = False

    def gather(self, data: bytes) -> list[bytes]:
        """Return this process's data."""
        return [data]

    def together(self) -> AbstractContextManager[None]:
        """Return a block that changes nothing."""
        return nullcontext()

    def announce(self, verb: str, arguments: Arguments = dict) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Meeting:
    """Where processes meet, and which of them this one is. Process 0 listens at the address."""

    host: str
    port: int  # 0: any free one, for process 0
    process: int
    processes: int


def listen(meeting: Meeting, timeout: float) -> Any:
    """Return the store of the processes that meet; process 0 makes it, the others connect to it."""
    return dist.TCPStore(  # type: ignore[attr-defined, unused-ignore]
        meeting.host,
        meeting.port,
        is_master=meeting.process == 0,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


def join(store: Any, meeting: Meeting, device: str, timeout: float) -> None:
    """Join the processes that meet. All of them call this; ``device``: where they compute."""
    if dist.is_initialized():
        raise TrainingError(
            "this process belongs to a torch.distributed group already, so it cannot join the ranks of an "
            "agent; start hacrl without torchrun, and say with agents.NAME.ranks how many ranks there are"
        )
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group(
        "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:nccl",
        store=dist.PrefixStore("hacrl/world", store),  # type: ignore[attr-defined, unused-ignore]
        rank=meeting.process,
        world_size=meeting.processes,
        timeout=timedelta(seconds=timeout),
    )


def make_groups(
    store: Any,
    members: Mapping[str, Sequence[int]],
    timeouts: Mapping[str, float],
    explain_loss: Callable[[str], str] = lambda _: "",
) -> dict[str, RankGroup]:
    """Return the groups of all agents that this process belongs to. All processes that meet call this.

    ``members``: agent -> the processes that are its ranks, the leader first.
    """
    found = {}
    for agent, processes in members.items():
        timeout = timedelta(seconds=timeouts[agent])
        group = dist.new_group(list(processes), timeout=timeout)
        if dist.get_rank() in processes:
            found[agent] = RankGroup(agent, group, store, has_followers=True, explain_loss=explain_loss)
    return found


def leave() -> None:
    """Leave the processes that meet."""
    if dist.is_initialized():
        dist.destroy_process_group()


class LeaderLostError(HacrlError, RuntimeError):
    """The process of rank 0 is gone, so its followers have nothing more to do."""


class RankGroup:
    """The ranks of one agent, over torch.distributed.

    ``members`` is the process group, of which rank 0 is the leader. ``store`` is shared by its processes.
    ``has_followers``: the other ranks wait for announcements; otherwise every rank makes all calls by itself.
    ``explain_loss`` says how other processes of an agent have ended, where that is known.
    """

    is_group = True

    def __init__(
        self,
        agent: str,
        members: dist.ProcessGroup,
        store: Any,
        *,
        has_followers: bool,
        explain_loss: Callable[[str], str] = lambda _: "",
    ) -> None:
        self.agent = agent
        self.members = members
        self.rank = members.rank()
        self.world = members.size()
        self._store = dist.PrefixStore(f"hacrl/agent/{agent}", store)  # type: ignore[attr-defined, unused-ignore]
        self._has_followers = has_followers
        self._explain_loss = explain_loss
        self._commands = 0  # announced or received
        self._meetings = 0
        self._problem: TrainingError | None = None  # why the group cannot be used any more

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's data, in the order of ranks, on every rank."""
        with self.together():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self.members)
            longest = max(1, *(int(size) for size in sizes))
            own = torch.zeros(longest, dtype=torch.uint8)
            if data:
                own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
            dist.all_gather(parts, own, group=self.members)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def meet(self) -> None:
        """Wait until all ranks are here. Some may have loaded weights for much longer than others."""
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        with self.together():
            self._store.set(f"{key}/{self.rank}", "here")
            everybody = [f"{key}/{rank}" for rank in range(self.world)]
            for waited in _until(lambda: self._store.check(everybody)):
                lost = self._known_losses()
                if lost or waited > MEETING_SECONDS:
                    lost = lost or f"another rank is not ready after {MEETING_SECONDS:g} s"
                    self._problem = self._loss(lost)
                    raise self._problem

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite the tensor with rank 0's, on every rank, and return it."""
        with self.together():
            dist.broadcast(tensor, group=self.members, group_src=0)
        return tensor

    def announce(self, verb: str, arguments: Arguments = dict) -> None:
        """Tell the followers to call ``verb``. They have finished the call before: it was a collective."""
        if self.rank or not self._has_followers:
            return
        with self.together():
            self._commands += 1
            message = json.dumps([verb, arguments()])
            self._store.set(f"command/{self._commands}", message)
            self._store.delete_key(f"command/{self._commands - 2}")

    def next_command(self) -> tuple[str, dict[str, Any]]:
        """Wait for what rank 0 announces next, for as long as rank 0 lives."""
        self._commands += 1
        key = f"command/{self._commands}"
        try:
            for _ in _until(lambda: self._store.check([key])):
                pass
            verb, arguments = json.loads(self._store.get(key))
            return verb, arguments
        except RuntimeError as error:
            raise LeaderLostError(
                f"agent {self.agent!r}: rank 0 is gone, rank {self.rank} ends ({error})"
            ) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within the block, explain why a collective failed, and let other ranks explain this one's error."""
        if self._problem is not None:
            raise self._problem
        try:
            yield
        except BaseException as error:
            if is_lost_connection(error):
                self._problem = self._explanation(error)
                raise self._problem from error
            self.report_failure(error)
            raise

    def report_failure(self, error: BaseException) -> None:
        """Let the other ranks know why this one cannot go on."""
        if self._problem is None:
            self._problem = TrainingError(
                f"agent {self.agent!r}: rank {self.rank} of {self.world} failed before: {_described(error)}"
            )
            with suppress(RuntimeError):  # the store is gone if rank 0 is
                self._store.set(f"failure/{self.rank}", _described(error))

    def close(self) -> None:
        """Let no call reach the other ranks from now on: they have ended."""
        self._problem = self._problem or TrainingError(
            f"agent {self.agent!r}: its {self.world} ranks have ended with the run, so it cannot be used any "
            "more; load the saved agent instead"
        )

    def _explanation(self, error: BaseException) -> TrainingError:
        """Return an error that says why the other ranks did not answer."""
        for waited in _until(lambda: bool(self._known_losses())):
            if waited > FAILURE_SECONDS:
                break
        lost = self._known_losses()
        if not lost:
            what = "did not answer in time" if "imed out" in str(error) else "is gone"
            lost = f"another rank {what} ({str(error).splitlines()[0][:200]})"
        return self._loss(lost)

    def _known_losses(self) -> str:
        """Return the errors that other ranks wrote, or how their processes ended; empty if not known."""
        return self._reported_failures() or self._explain_loss(self.agent)

    def _reported_failures(self) -> str:
        """Return the errors that other ranks wrote to the store."""
        found = []
        with suppress(RuntimeError):  # the store is gone if rank 0 is
            for rank in range(self.world):
                if rank != self.rank and self._store.check([f"failure/{rank}"]):
                    text = self._store.get(f"failure/{rank}").decode(errors="replace")
                    found.append(f"rank {rank} failed: {text}")
        return "; ".join(found)

    def _loss(self, lost: str) -> TrainingError:
        """Return the error for a rank that has failed, or WorkerLostError for one that is gone or silent."""
        sentence = (
            f"rank {self.rank} of {self.world} cannot go on: {lost}. What was under way is lost: resume from "
            "the last checkpoint (hacrl resume)"
        )
        if self._reported_failures():  # the error would come again
            return TrainingError(f"agent {self.agent!r}: {sentence}")
        return WorkerLostError({self.agent: sentence})


def _until(is_done: Callable[[], bool]) -> Iterator[float]:
    """Look again and again, more and more seldom; yield the seconds waited after each look in vain."""
    start, pause = time.monotonic(), 0.001
    while not is_done():
        yield time.monotonic() - start
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


# Texts of errors that torch's backends raise when another rank is gone or silent.
_CONNECTION_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "timed out",
    "Socket closed",
    "gloo",
    "NCCL",
    "Watchdog",
)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because of another rank."""
    if isinstance(error, HacrlError) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return False
    is_distributed = isinstance(error, dist.DistError)
    return is_distributed or any(text in str(error) for text in _CONNECTION_TEXTS)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
