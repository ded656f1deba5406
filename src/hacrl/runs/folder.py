"""The folder of a run, which one process at a time may write to.

config.yaml       every key, defaults included
metrics.jsonl     one line per step; equal runs have equal files
evaluations.jsonl one line per evaluation
notes.txt         notes for the user, one line each
rollouts/         every verified rollout, a file per step and agent (docs/rollout_log.md)
timings.jsonl     seconds per phase and agent; the only file that differs between equal runs
agents/NAME/      each trained agent as a plain Hugging Face folder
checkpoints/      the whole state after some steps, from which ``hacrl resume`` continues
status.json       running, stopped, failed or finished, and the number of finished steps
stalls.txt        stacks of all threads and processes, if the run made no progress for long
evaluations/      results of ``hacrl eval``
engines/NAME/     log of an agent's vLLM server, and the model files it loads
tensorboard/      TensorBoard event files, if that tracker is on
report.html       the page of ``hacrl report``
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from hacrl.config.load import config_to_yaml
from hacrl.config.schema import RunConfig
from hacrl.errors import CheckpointError, ConfigError
from hacrl.files import publish_folder, unfinished_name, write_json, write_text
from hacrl.plain_text import json_text, printable
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer

LOCK = ".lock"


class RunLock:
    """A lock on a run's folder; the system releases it when the process ends, even by a crash."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._finalizer: weakref.finalize[..., RunLock] | None = None
        self._handle: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._finalizer is not None and self._finalizer.alive

    def acquire(self) -> None:
        """Take the lock; raise ConfigError if another process, or another run in this one, holds it."""
        if self.is_held:
            return
        try:
            handle = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            raise ConfigError(f"output: {self._path} cannot be used as a lock: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise ConfigError(
                f"output: process {owner} is writing to {self._path.parent}; wait until it has finished"
            ) from error
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._handle, self._finalizer = handle, weakref.finalize(self, os.close, handle)

    @property
    def is_lost(self) -> bool:
        """Whether the lock's file was deleted, moved or replaced while it was held."""
        if self._handle is None or not self.is_held:
            return False
        try:
            return not os.path.samestat(os.fstat(self._handle), self._path.stat())
        except OSError:
            return True

    def release(self) -> None:
        """Let other processes write. May be called more than once."""
        if self._finalizer is not None:
            self._finalizer()


STATUS_SCHEMA = 1
ROLLOUTS = "rollouts"  # folder of the rollout log in the run's folder
RunState = Literal["running", "stopped", "failed", "finished"]
# Files to which every step may add lines.
GROWING_FILES = ("metrics.jsonl", "evaluations.jsonl", "timings.jsonl", "notes.txt")
RUN_FILES = frozenset(
    {
        "config.yaml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "notes.txt",
        ROLLOUTS,
        "timings.jsonl",
        "agents",
        "checkpoints",
        "status.json",
        "stalls.txt",
        LOCK,
        "evaluations",
        "engines",
        "tensorboard",
        "report.html",
    }
)
# What a process that ended before its run began may leave: none of it is worth keeping.
_REMAINS = frozenset({LOCK, "engines", "stalls.txt", "tensorboard"})


def check_output(config: RunConfig, overwrite: bool) -> None:
    """Refuse an output folder that cannot be written, is in use, or would lose files.

    A folder with nothing but the remains of a start that failed counts as empty. Otherwise only files of an
    earlier run may be deleted, and only with ``overwrite``.
    """
    path = Path(config.output)
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"output: {path} is a link to {os.readlink(path)}, which does not exist")
    try:
        _check_writable(path)
        present = {entry.name for entry in path.iterdir()} if path.exists() else set()
    except OSError as error:
        raise ConfigError(f"output: cannot use {config.output!r}: {error}") from error
    unfinished = {unfinished_name(path / name).name for name in RUN_FILES}
    present -= unfinished
    foreign = sorted(present - RUN_FILES)
    if not present <= _REMAINS and not overwrite:
        resume = f"continue it with `hacrl resume {path}`, " if "config.yaml" in present else ""
        replace = "" if foreign else ", or replace that run with --overwrite"
        raise ConfigError(f"output: {path} exists already; {resume}choose another output=FOLDER{replace}")
    if foreign:
        raise ConfigError(
            f"output: {path} is not overwritten because it holds files that no run wrote "
            f"({', '.join(foreign[:3])}); choose another output=FOLDER"
        )
    if LOCK in present:  # raises if another process is writing there
        lock = RunLock(path)
        lock.acquire()
        lock.release()


def _check_writable(path: Path) -> None:
    """Raise ConfigError unless the folder, or its nearest parent that exists, can be written to."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"output: cannot write to {path}: {existing} is a file; choose another output=FOLDER"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output: cannot write to {path}: no permission to write to {existing}")


class RunFolder(Observer):
    """Writes a run's config, metrics, evaluations, timings, notes, status and agents to its folder."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.path = Path(config.output)
        self._lock = RunLock(self.path)

    def create(self, overwrite: bool = False) -> None:
        """Make the folder and write the config; with ``overwrite``, delete an earlier run first."""
        check_output(self._config, overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()  # before deleting anything: another process may be writing here
            for name in (
                *RUN_FILES - {LOCK},
                *(unfinished_name(self.path / name).name for name in RUN_FILES),
            ):
                if (self.path / name).is_dir():
                    shutil.rmtree(self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)
            write_text(self.path / "config.yaml", config_to_yaml(self._config))
        except OSError as error:
            raise ConfigError(f"output: cannot write to {self.path}: {error}") from error

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Write one line of metrics and one of timings."""
        self._append("metrics.jsonl", report.as_dict())
        self._append("timings.jsonl", {"step": report.step, **seconds})

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Write one line per evaluation."""
        agents = {name: asdict(accuracy) for name, accuracy in accuracies.items()}
        self._append("evaluations.jsonl", {"step": step, "agents": agents})

    def on_note(self, step: int, note: str) -> None:
        """Write one line per note."""
        self._write_line("notes.txt", f"step {step}: {printable(note)}")

    def save_agent(self, name: str, save: Callable[[str, Path], None]) -> Path:
        """Have ``save`` write an agent into a folder, which appears under its name when it is complete."""
        folder = self.path / "agents" / name
        unfinished = folder.with_name(f".{name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        save(name, unfinished)
        publish_folder(unfinished, folder)
        return folder

    @property
    def is_open(self) -> bool:
        """Whether this process may write to the folder now."""
        return self._lock.is_held

    def reopen(self, positions: Mapping[str, int]) -> None:
        """Continue in the folder of an earlier process; lines after ``positions`` are dropped."""
        self._lock.acquire()
        self.truncate(positions)
        write_text(self.path / "config.yaml", config_to_yaml(self._config))

    def unlock(self) -> None:
        """Let other processes write to the folder."""
        self._lock.release()

    def write_status(self, state: RunState, steps_done: int, message: str = "") -> None:
        """Write the run's state to status.json."""
        self.check_present()
        status = {"schema": STATUS_SCHEMA, "state": state, "steps_done": steps_done, "message": message}
        write_json(self.path / "status.json", status)

    def positions(self) -> dict[str, int]:
        """Return name -> length in bytes of each growing file."""
        return {name: self._size(name) for name in GROWING_FILES}

    def truncate(self, positions: Mapping[str, int]) -> None:
        """Drop the lines that were added after ``positions`` were recorded."""
        for name in GROWING_FILES:
            recorded, actual = positions.get(name, 0), self._size(name)
            if actual < recorded:
                raise ConfigError(
                    f"{self.path / name} is {actual} bytes long, but the checkpoint recorded {recorded}: the "
                    "file was changed, so the run cannot continue exactly"
                )
            if actual > recorded:
                with (self.path / name).open("r+b") as file:
                    file.truncate(recorded)

    def _size(self, name: str) -> int:
        path = self.path / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(f"{path} is not a regular file: hacrl did not write it")
        return path.stat().st_size if path.exists() else 0

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self._write_line(name, json_text(record))

    def check_present(self) -> None:
        """Raise CheckpointError if the folder was deleted or moved: what is written would not be a run."""
        if self._lock.is_lost:
            raise CheckpointError(
                f"{self.path} was deleted, moved or replaced while this run was writing to it, so the run "
                "cannot be continued; start it again"
            )

    def _write_line(self, name: str, line: str) -> None:
        self.check_present()
        try:
            with (self.path / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path / name}: {error.strerror or error}. Everything up to the last "
                "checkpoint is safe: free some space or fix the permissions, then continue with "
                f"`hacrl resume {self.path}`"
            ) from error
