"""A taskset written with verifiers' own classes, and some that hacrl cannot play."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    size: int = 3
    instruction: str = ""


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(task.answer))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterable[SumTask]:
        for number in range(self.config.size):
            system = self.config.instruction or None
            data = SumData(prompt=f"{number} + 10 =", answer=number + 10, system_prompt=system)
            yield SumTask(data, self.config.task)


class EndlessSums(Sums):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        for number in count():
            yield SumTask(SumData(prompt=f"{number} + 1 =", answer=number + 1), self.config.task)


class BoxedTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    NEEDS_CONTAINER = True


class Boxed(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self) -> Iterable[BoxedTask]:
        yield BoxedTask(SumData(prompt="?", answer=0), self.config.task)


class PreparedTask(SumTask):
    async def setup(self, trace: vf.Trace, runtime: object) -> None:
        return None


class Prepared(vf.Taskset[PreparedTask, vf.TasksetConfig]):
    def load(self) -> Iterable[PreparedTask]:
        yield PreparedTask(SumData(prompt="?", answer=0), self.config.task)


class RunTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def tests_pass(self, trace: vf.Trace, runtime: object) -> float:
        return 1.0


class Run(vf.Taskset[RunTask, vf.TasksetConfig]):
    def load(self) -> Iterable[RunTask]:
        yield RunTask(SumData(prompt="?", answer=0), self.config.task)
