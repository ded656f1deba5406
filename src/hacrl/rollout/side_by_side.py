"""Engines that compute apart from each other, asked at the same time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial

from hacrl.rollout.engine import Finished
from hacrl.types import Rollout

Question = Callable[[Finished], list[Rollout]]  # asks an engine; to be told of each response that has ended


def answers(
    questions: Mapping[str, Question], on_finished: Callable[[str, int, Rollout], None]
) -> dict[str, list[Rollout]]:
    """What each agent's engine answers. ``on_finished`` hears, in this thread alone, whose response it was.

    If one fails the others are waited for: what they are at cannot be broken off.
    """
    if len(questions) == 1:
        ((agent, question),) = questions.items()
        return {agent: question(partial(on_finished, agent))}
    to_do: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # in this thread
    said: dict[str, list[Rollout]] = {}
    errors: dict[str, BaseException] = {}

    def ask(agent: str, question: Question) -> None:
        try:
            rollouts = question(lambda place, rollout: to_do.put(partial(on_finished, agent, place, rollout)))
            to_do.put(partial(said.__setitem__, agent, rollouts))
        except BaseException as error:  # raised again where the answers are waited for
            to_do.put(partial(errors.__setitem__, agent, error))

    for agent, question in questions.items():
        threading.Thread(target=ask, args=(agent, question), name=f"hacrl-ask-{agent}", daemon=True).start()
    while len(said) + len(errors) < len(questions):
        to_do.get()()
    for error in errors.values():
        raise error
    return {agent: said[agent] for agent in questions}
