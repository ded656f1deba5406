"""Ask and judge: the step from an engine to verified rollouts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

from hacrl.engines.base import RolloutEngine
from hacrl.tasks.base import Task
from hacrl.types import Problem, Rollout, Sampling, Verdict, VerifiedRollout

_Place = tuple[str, int]  # agent, and place in its engine's answer


def verify_rollouts(task: Task, rollouts: Sequence[Rollout]) -> list[VerifiedRollout]:
    """Every rollout with the task's verdict."""
    verdicts = task.verify(rollouts)
    return [VerifiedRollout(rollout, verdict) for rollout, verdict in zip(rollouts, verdicts, strict=True)]


def ask_and_judge(
    engine: RolloutEngine,
    task: Task,
    problems: Sequence[Problem],
    samples: int,
    sampling: Sampling,
    seed: int,
) -> list[VerifiedRollout]:
    """What an agent's engine answers, judged as it comes."""
    agent = "the only one"
    with Judging(task) as judging:
        rollouts = engine.generate(problems, samples, sampling, seed, partial(judging.take, agent))
        return judging.verdicts(agent, rollouts)


class Judging:
    """Judges responses while others are still being generated, if the task judges each by itself.

    Tell it of each response that an engine has finished, then ask for the verdicts, agent by agent. A reward
    function sees all responses of an agent at once, as its author expects, so nothing is judged before the
    last one is there.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._ahead = bool(getattr(task, "independent_verdicts", False))
        self._waiting: queue.SimpleQueue[tuple[_Place, Rollout] | None] = queue.SimpleQueue()
        self._verdicts: dict[_Place, Verdict] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def take(self, agent: str, place: int, rollout: Rollout) -> None:
        """A response of an agent has ended; its place is that in the engine's answer."""
        if not self._ahead:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._judge, name="hacrl-judging", daemon=True)
            self._thread.start()
        self._waiting.put(((agent, place), rollout))

    def verdicts(self, agent: str, rollouts: Sequence[Rollout]) -> list[VerifiedRollout]:
        """All of an agent's, in order; what is not judged yet is judged now. Nothing is taken any more."""
        self._finish()
        if self._error is not None:
            raise self._error
        if (agent, 0) not in self._verdicts:  # a reward function's, or the engine told of none
            return verify_rollouts(self._task, rollouts)
        return [
            VerifiedRollout(rollout, self._verdicts[agent, place]) for place, rollout in enumerate(rollouts)
        ]

    def _judge(self) -> None:
        try:
            while (first := self._waiting.get()) is not None:
                batch = [first]
                ended = False
                while not self._waiting.empty():  # whatever else has come meanwhile, in one go
                    item = self._waiting.get()
                    if item is None:
                        ended = True
                        break
                    batch.append(item)
                found = self._task.verify([rollout for _, rollout in batch])
                self._verdicts.update(zip((place for place, _ in batch), found, strict=True))
                if ended:
                    return
        except BaseException as error:  # raised again where the verdicts are asked for
            self._error = error

    def _finish(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()

    def __enter__(self) -> Judging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # nobody will ask for verdicts
            with suppress(queue.Empty):
                while True:
                    self._waiting.get_nowait()
        self._finish()
