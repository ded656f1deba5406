"""One process at a time writes a run's folder.

The folder of a run: what was asked, what happened, and the agents that came of it.

config.yaml       every key, defaults included
metrics.jsonl     one line per step; equal runs have equal files
evaluations.jsonl one line per evaluation
notes.txt         what a user should know, a sentence a line
rollouts/         every verified rollout, a file per step and agent (docs/rollout_log.md)
timings.jsonl     seconds per phase and agent; the only file that differs between equal runs
agents/NAME/      each agent as a plain Hugging Face folder
checkpoints/      the whole state after some steps, to go on from (``hacrl resume``)
status.json       running, stopped, failed or finished, and after how many steps
evaluations/      what ``hacrl eval`` wrote
engines/NAME/     log of an agent's vLLM server, and what it starts from
tensorboard/      if that tracker was asked for
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from hacrl.config.load import config_to_yaml
from hacrl.config.schema import RunConfig
from hacrl.errors import CheckpointError, ConfigError
from hacrl.files import publish_folder, write_json, write_text
from hacrl.models.agent import Agent
from hacrl.plain_text import json_text, printable
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer

LOCK = ".lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RunLock:
    """A lock that goes with the process that holds it, however that ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._release: weakref.finalize[..., RunLock] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds it."""
        return self._release is not None and self._release.alive

    def take(self) -> None:
        """Raises if another process, or another run in this one, writes here."""
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
                f"output: {self._path.parent} is being written by process {owner}; wait for it"
            ) from error
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._release = weakref.finalize(self, os.close, handle)

    def give_up(self) -> None:
        """Let others write. May be called more than once."""
        if self._release is not None:
            self._release()


STATUS_SCHEMA = 1
ROLLOUTS = "rollouts"  # in the run's folder: the rollout log
RunState = Literal["running", "stopped", "failed", "finished"]
# what a step adds lines to, in the order it does
GROWING = ("metrics.jsonl", "evaluations.jsonl", "timings.jsonl", "notes.txt")
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
    }
)


def check_output(config: RunConfig, overwrite: bool) -> None:
    """Refuse a folder that is in use. Only ever delete what a run wrote, and only when told to."""
    path = Path(config.output)
    try:
        _check_writable(path)
        present = {entry.name for entry in path.iterdir()} if path.exists() else set()
    except OSError as error:
        raise ConfigError(f"output: cannot use {config.output!r}: {error}") from error
    foreign = sorted(present - RUN_FILES)
    if present and not overwrite:
        go_on = f"go on with it by `hacrl resume {path}`, " if "config.yaml" in present else ""
        replace = "" if foreign else ", or --overwrite to replace that run"
        raise ConfigError(
            f"output: {path} exists already and is kept; {go_on}use another output=FOLDER{replace}"
        )
    if foreign:
        raise ConfigError(
            f"output: {path} is not overwritten, it holds more than a run ({', '.join(foreign[:3])}); "
            "use another output=FOLDER"
        )
    if LOCK in present:  # raises if a live run writes there
        lock = RunLock(path)
        lock.take()
        lock.give_up()


def _check_writable(path: Path) -> None:
    """Found out now rather than after the models have loaded."""
    place = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not place.is_dir():
        raise ConfigError(f"output: cannot write to {path}: {place} is a file; use another output=FOLDER")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"output: cannot write to {path}: {place} is not yours to write in")


class RunFolder(Observer):
    """Writes a run down while it happens, a line at a time."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.path = Path(config.output)
        self._lock = RunLock(self.path)

    def claim(self, overwrite: bool = False) -> None:
        """Make the folder, empty but for the config; an earlier run goes if it may."""
        check_output(self._config, overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.take()  # before anything is deleted: another process may be writing here
            for name in RUN_FILES - {LOCK}:
                if (self.path / name).is_dir():
                    shutil.rmtree(self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)
            write_text(self.path / "config.yaml", config_to_yaml(self._config))
        except OSError as error:
            raise ConfigError(f"output: cannot write to {self.path}: {error}") from error

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """One line of metrics, one of timings."""
        self._append("metrics.jsonl", report.as_dict())
        self._append("timings.jsonl", {"step": report.step, **seconds})

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """One line per evaluation."""
        agents = {name: asdict(accuracy) for name, accuracy in accuracies.items()}
        self._append("evaluations.jsonl", {"step": step, "agents": agents})

    def on_note(self, step: int, note: str) -> None:
        """One line per note."""
        self._write_line("notes.txt", f"step {step}: {printable(note)}")

    def save_agent(self, agent: Agent) -> Path:
        """Write one agent as a Hugging Face folder, which appears when it is complete."""
        folder = self.path / "agents" / agent.name
        unfinished = folder.with_name(f".{agent.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        agent.save(unfinished)
        publish_folder(unfinished, folder)
        return folder

    @property
    def is_open(self) -> bool:
        """Whether this process writes here."""
        return self._lock.is_held

    def reopen(self, positions: Mapping[str, int]) -> None:
        """Go on in a folder that another process left, from these positions."""
        self._lock.take()
        self.cut_back(positions)
        write_text(self.path / "config.yaml", config_to_yaml(self._config))

    def unlock(self) -> None:
        """Let others write here."""
        self._lock.give_up()

    def write_status(self, state: RunState, steps_done: int, message: str = "") -> None:
        """Say what has become of the run."""
        status = {"schema": STATUS_SCHEMA, "state": state, "steps_done": steps_done, "message": message}
        write_json(self.path / "status.json", status)

    def positions(self) -> dict[str, int]:
        """How long each growing file is."""
        return {name: self._size(name) for name in GROWING}

    def cut_back(self, positions: Mapping[str, int]) -> None:
        """Drop the lines that were added after the positions were taken."""
        for name in GROWING:
            wanted, there = positions.get(name, 0), self._size(name)
            if there < wanted:
                raise ConfigError(
                    f"{self.path / name} is {there} bytes long, the checkpoint was taken at {wanted}: it has "
                    "been changed since, so the run cannot be gone on with exactly"
                )
            if there > wanted:
                with (self.path / name).open("r+b") as file:
                    file.truncate(wanted)

    def _size(self, name: str) -> int:
        path = self.path / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(f"{path} is no regular file: this is not a run's folder as hacrl writes it")
        return path.stat().st_size if path.exists() else 0

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self._write_line(name, json_text(record))

    def _write_line(self, name: str, line: str) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path / name}: {error.strerror or error}. What was done until the last "
                f"checkpoint is safe: make room or give access, then `hacrl resume {self.path}`"
            ) from error
