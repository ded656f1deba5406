"""Functions called in several processes at once, as the ranks of one agent: gloo, one CPU thread each."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hacrl.models.rank_group import Meeting, RankGroup, join, leave, listen

# Imported once, in a process that the ranks are forked from.
_PRELOADED = ["hacrl.training.learner", "hacrl.models.sharded_agent", "tests.support.tiny", "peft"]


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    timeout: float = 60.0,
    wait_for: float = 120.0,
    answers: int | None = None,
) -> list[Any]:
    """Call ``function(group, *arguments)`` as every rank; return what each returned, or its error.

    ``answers``: return what so many ranks returned, and end the others. Default: all.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    store = listen(Meeting("127.0.0.1", 0, 0, world), timeout)
    connections, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        target = (theirs, function, store.port, rank, world, timeout, arguments)
        process = context.Process(target=_serve, args=target, daemon=True)
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    try:
        found = [_receive(connection, wait_for) for connection in connections[:answers]]
        for connection in connections:
            with suppress(OSError):  # the process died
                connection.send(None)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(connection: Connection, seconds: float) -> Any:
    if not wait([connection], seconds):
        return TimeoutError(f"no result after {seconds:g} s")
    try:
        return connection.recv()
    except EOFError:
        return EOFError("the process died")


def _serve(
    connection: Connection,
    function: Callable[..., Any],
    port: int,
    rank: int,
    world: int,
    timeout: float,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    meeting = Meeting("127.0.0.1", port, rank, world)
    try:
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        join(store, meeting, "cpu", timeout)
        group = RankGroup("big", torch.distributed.group.WORLD, store, has_followers=False)
        connection.send(function(group, *arguments))
        connection.recv()  # tensors are read from this process's memory
        leave()
    except Exception as error:
        traceback.print_exc()
        connection.send(error if _is_plain(error) else RuntimeError(f"{type(error).__name__}: {error}"))


def _is_plain(error: Exception) -> bool:
    return type(error).__module__.startswith("hacrl") and error.__dict__ == {}
