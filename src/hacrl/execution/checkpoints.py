"""When a run's state is written down, and how little the run waits for it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import fmean
from typing import Any

from hacrl.checkpoint.content import CheckpointContent
from hacrl.checkpoint.settings import CheckpointSettings
from hacrl.checkpoint.store import CheckpointId, CheckpointStore
from hacrl.evaluation.accuracy import Accuracy
from hacrl.execution.run_folder import RunFolder
from hacrl.execution.snapshots import NoRoomError, Snapshots
from hacrl.learning.observer import Observer
from hacrl.learning.reports import StepReport
from hacrl.learning.trainer import Trainer
from hacrl.types import Problem

CHECKPOINTS = "checkpoints"  # in the run's folder


def data_fingerprint(train: Sequence[Problem], test: Sequence[Problem]) -> str:
    """Equal if the same problems come in the same order."""
    total = hashlib.sha256()
    for problems in (train, test):
        for problem in problems:
            said = f"{problem.id}\x1f{problem.prompt}\x1f{problem.answer}\x1e"
            total.update(said.encode(errors="backslashreplace"))
        total.update(b"\x1d")
    return total.hexdigest()


class Checkpointer(Observer):
    """Keeps the run's files and its state in step. Watches after the folder has written its lines.

    ``note`` takes a sentence for the user.
    """

    def __init__(self, folder: RunFolder, settings: CheckpointSettings, note: Callable[[str], None]) -> None:
        self.store = CheckpointStore(folder.path / CHECKPOINTS)
        self.stalled: list[float] = []  # seconds the run waited, per checkpoint
        self.data = ""  # fingerprint of the problems
        self._folder = folder
        self._settings = settings
        self._note = note
        self._has_noted = False
        self._positions: dict[str, int] = {}
        self._score: float | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hacrl-checkpoint")
        self._pending: Future[None] | None = None
        self._snapshots = Snapshots()

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """A step's lines are written: from here on they belong to what is done."""
        self.mark()
        self._score = None

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """So do an evaluation's."""
        self.mark()
        self._score = fmean(accuracy.mean for accuracy in accuracies.values())

    def mark(self) -> None:
        """What the files hold now belongs to what is done."""
        self._positions = self._folder.positions()

    def after_step(self, trainer: Trainer) -> None:
        """Write a checkpoint if it is time for one; an earlier one that failed is told of now."""
        self._settle(wait=False)
        if self._settings.every and trainer.steps_done % self._settings.every == 0:
            self.save(trainer)

    def save(self, trainer: Trainer, wait: bool = False) -> None:
        """Write the state as it is, in the middle of a step too. Waits for what was being written before."""
        start = time.perf_counter()
        self._settle(wait=True)
        state = trainer.state_dict()
        under_way = state.pop("under_way")
        run = {"positions": self._positions, "data": self.data}
        documents: dict[str, Any] = {"run": run, "trainer": state}
        if under_way is not None:
            documents["under_way"] = under_way
        content = CheckpointContent(
            documents, {f"agent-{name}": tensors for name, tensors in trainer.tensors().items()}
        )
        which = CheckpointId(trainer.steps_done, trainer.phases_done)
        snapshot = self._snapshot(content) if self._settings.background and not wait else None
        if snapshot is not None:
            self._pending = self._writer.submit(self._write, which, snapshot, self._score)
        else:
            self._write(which, content, self._score)
        self.stalled.append(time.perf_counter() - start)

    def _snapshot(self, content: CheckpointContent) -> CheckpointContent | None:
        """A copy to write in the background; None: there is no memory for it, and the run has to wait."""
        assert self._pending is None, "what is being written lies where the next copy goes"
        try:
            return self._snapshots.take(content)
        except NoRoomError as error:
            if not self._has_noted:
                self._has_noted = True
                self._note(f"checkpoint.background: {error}, so training waits while checkpoints are written")
            return None

    def _write(self, which: CheckpointId, content: CheckpointContent, score: float | None) -> None:
        self.store.write(which, content, score)
        self.store.prune(self._settings.keep_last, self._settings.keep_best)

    def _settle(self, wait: bool) -> None:
        pending = self._pending
        if pending is not None and (wait or pending.done()):
            try:
                pending.result()  # raises what writing raised
            finally:
                if pending.done():  # else a signal came while waiting, and it is still being written
                    self._pending = None

    def close(self) -> None:
        """Finish what is being written."""
        try:
            self._settle(wait=True)
        finally:
            self._writer.shutdown()
            self._snapshots.let_go()


def trainer_state(content: CheckpointContent) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A checkpoint's part that the trainer takes: its state, and tensors by agent."""
    state = {**content.documents["trainer"], "under_way": content.documents.get("under_way")}
    tensors = {name.removeprefix("agent-"): dict(group) for name, group in content.tensors.items()}
    return state, tensors
