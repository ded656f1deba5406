"""The folder of a run: what was asked, what happened, and the agents that came of it.

config.yaml       every key, defaults included
metrics.jsonl     one line per step; equal runs have equal files
evaluations.jsonl one line per evaluation
notes.txt         what a user should know, a sentence a line
rollouts.jsonl    a few rollouts per agent and step, to be read
timings.jsonl     seconds per phase and agent; the only file that differs between equal runs
agents/NAME/      each agent as a plain Hugging Face folder
evaluations/      what ``hacrl eval`` wrote
engines/NAME/     log of an agent's vLLM server, and what it starts from
tensorboard/      if that tracker was asked for
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hacrl.agents.agent import Agent
from hacrl.config.loading import config_to_yaml
from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.evaluation.accuracy import Accuracy
from hacrl.learning.observer import Observer
from hacrl.learning.reports import StepReport
from hacrl.types import VerifiedRollout

RUN_FILES = frozenset(
    {
        "config.yaml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "notes.txt",
        "rollouts.jsonl",
        "timings.jsonl",
        "agents",
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
    if present and not overwrite:
        raise ConfigError(
            f"output: {path} exists already and is kept; use another output=FOLDER, "
            "or --overwrite to replace that run"
        )
    foreign = sorted(present - RUN_FILES)
    if foreign:
        raise ConfigError(
            f"output: {path} is not overwritten, it holds more than a run ({', '.join(foreign[:3])}); "
            "use another output=FOLDER"
        )


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

    def claim(self, overwrite: bool = False) -> None:
        """Make the folder, empty but for the config; an earlier run goes if it may."""
        check_output(self._config, overwrite)
        try:
            for name in RUN_FILES:
                if (self.path / name).is_dir():
                    shutil.rmtree(self.path / name)
                else:
                    (self.path / name).unlink(missing_ok=True)
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "config.yaml").write_text(config_to_yaml(self._config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output: cannot write to {self.path}: {error}") from error

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Keep the first response to each of the first few problems."""
        first_per_problem = {verified.rollout.problem.id: verified for verified in reversed(rollouts)}
        kept = list(first_per_problem.values())[::-1][: self._config.logged_rollouts]
        for verified in kept:
            rollout = verified.rollout
            self._append(
                "rollouts.jsonl",
                {
                    "step": step,
                    "agent": agent,
                    "problem": rollout.problem.id,
                    "response": rollout.text,
                    "reward": verified.reward,
                    "verdict": verified.verdict.label,
                    "tokens": rollout.num_tokens,
                    "logprob": rollout.logprob,
                    "finish_reason": rollout.finish_reason,
                    "policy_version": rollout.policy_version,
                },
            )

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
        with (self.path / "notes.txt").open("a", encoding="utf-8") as file:
            file.write(f"step {step}: {note}\n")

    def save_agent(self, agent: Agent) -> Path:
        """Write one agent as a Hugging Face folder."""
        folder = self.path / "agents" / agent.name
        agent.save(folder)
        return folder

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        # a data set's id may hold half a character, which JSON can spell out and UTF-8 cannot write
        with (self.path / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
