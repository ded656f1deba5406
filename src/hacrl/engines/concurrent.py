"""Engines that compute apart from each other, asked at the same time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from hacrl.engines.base import Finished
from hacrl.types import Rollout

There = Callable[[Callable[[], None]], None]  # has something done in the thread that asks, and waits for it
# Asks an engine. Told of each response that has ended, and given a way to the thread that asks.
Question = Callable[[Finished, There], list[Rollout]]
LEAVE_SECONDS = 10.0  # in which the others leave off when something went wrong


class _Left(Exception):  # noqa: N818 - not an error
    """Nobody listens any more."""


def answers(
    questions: Mapping[str, Question], on_finished: Callable[[str, int, Rollout], None]
) -> dict[str, list[Rollout]]:
    """What each agent's engine answers. ``on_finished`` hears, in this thread alone, whose response it was.

    If one fails, or whoever listens does, the others leave off with the next thing they have to say.
    """
    if len(questions) == 1:
        ((agent, question),) = questions.items()
        return {agent: question(partial(on_finished, agent), at_once)}
    to_do: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # in this thread
    said: dict[str, list[Rollout]] = {}
    errors: dict[str, BaseException] = {}
    is_left = threading.Event()
    was_done: dict[str, queue.SimpleQueue[bool]] = {agent: queue.SimpleQueue() for agent in questions}

    def tell(agent: str, place: int, rollout: Rollout) -> None:
        if is_left.is_set():
            raise _Left
        to_do.put(partial(on_finished, agent, place, rollout))

    def there(agent: str, what: Callable[[], None]) -> None:
        to_do.put(what)
        to_do.put(partial(was_done[agent].put, True))
        if not was_done[agent].get():
            raise _Left

    def ask(agent: str, question: Question) -> None:
        try:
            answer = question(partial(tell, agent), partial(there, agent))
            to_do.put(partial(said.__setitem__, agent, answer))
        except _Left:
            pass
        except BaseException as error:
            errors[agent] = error
            to_do.put(partial(_fail, error))

    threads = [
        threading.Thread(target=ask, args=(agent, question), name=f"hacrl-ask-{agent}", daemon=True)
        for agent, question in questions.items()
    ]
    try:
        for thread in threads:
            thread.start()
        while len(said) < len(questions):
            to_do.get()()
    except BaseException as error:
        is_left.set()
        for waiting in was_done.values():
            waiting.put(False)
        deadline = time.monotonic() + LEAVE_SECONDS
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))
        for agent, other in list(errors.items()):
            if other is not error:
                error.add_note(f"The engine of agent {agent!r} failed, too: {other}")
        raise
    return {agent: said[agent] for agent in questions}


def at_once(what: Callable[[], None]) -> None:
    """The way to the thread that asks, in that thread."""
    what()


def _fail(error: BaseException) -> None:
    raise error
