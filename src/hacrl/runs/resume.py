"""Where an earlier process left a run.

``hacrl resume``: open a run's folder, find where it was, and check that it may go on.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hacrl.config.load import apply_override, build_config, read_recipe
from hacrl.config.schema import RunConfig
from hacrl.errors import CheckpointError, ConfigError, HacrlError
from hacrl.files import as_record, check_inside, check_tree, iterate_jsonl, read_json
from hacrl.runs.checkpoint import CheckpointStore
from hacrl.runs.checkpointer import CHECKPOINTS, trainer_state
from hacrl.runs.folder import STATUS_SCHEMA
from hacrl.runs.results import EvaluationLine, MetricsLine, RunResult
from hacrl.training.trainer import Trainer


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint's content, and what is known of the run until then."""

    state: Mapping[str, Any] | None  # None: there is no checkpoint, the run begins again
    tensors: Mapping[str, Mapping[str, Any]]
    positions: Mapping[str, int]  # how much of each file belongs to what was done
    data: str | None  # fingerprint of the problems
    result: RunResult  # until then
    notes: tuple[str, ...] = ()

    @property
    def steps_done(self) -> int:
        """Whole steps."""
        return 0 if self.state is None else int(self.state["steps_done"])

    def check_data(self, fingerprint: str) -> None:
        """The problems must be those the run began with: others would be another run."""
        if self.data is not None and self.data != fingerprint:
            raise CheckpointError(
                "the task's problems are not those this run began with: the data set or the package that "
                "makes them has changed. Go on with the same data, or start a new run from the saved agents"
            )

    def restore(self, trainer: Trainer) -> None:
        """Put the trainer where it was."""
        if self.state is None:
            return
        try:
            trainer.load_state_dict(self.state, self.tensors)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this run: {error!r}; was it written by another recipe?"
            ) from error


Line = TypeVar("Line", MetricsLine, EvaluationLine)
# Changes of the recipe that a run may go on with ...
FREE = (
    "steps",
    "output",
    "executor",
    "trackers",
    "project",
    "logged_rollouts",
    "keep_rollouts",
    "checkpoint.*",
    "pause_collapsed",
    "evaluation.every",
    "learning.offload",
)
# ... and those after which sums round differently, so that it is no longer the same to the last bit.
ROUNDING = (
    "device",
    "threads",
    "rollout.max_batch",
    "rollout.engine",
    "learning.micro_batch_tokens",
    "learning.compile",
    "agents.*.device",
    "agents.*.engine",
    "agents.*.vllm.*",
    "agents.*.attention",
    "agents.*.gradient_checkpointing",
)


@dataclass(frozen=True)
class Resumable:
    """A run that can go on, or that has nothing left to do."""

    config: RunConfig
    point: ResumePoint
    finished_after: int | None  # steps; None: there is something left to do


def open_run(folder: Path, overrides: Sequence[str] = ()) -> Resumable:
    """Look at a run's folder; nothing in it is changed."""
    if folder.is_dir():
        check_tree(folder, folder)  # nothing in it may lead elsewhere: it is going to be written to
    began, config = _configs(folder, overrides)
    return _looked_at(folder, began, config)


def _looked_at(folder: Path, began: RunConfig, config: RunConfig) -> Resumable:
    status = _status(folder)
    is_finished = status.get("state") == "finished"
    point = _resume_point(folder, began, config)
    done = status["steps_done"] if is_finished else point.steps_done
    if config.steps < done:
        raise ConfigError(
            f"steps={config.steps}, but {folder} has made {done} steps already; steps counts them all"
        )
    if is_finished and config.steps > done and point.state is None:
        raise ConfigError(
            f"{folder} is finished, after {done} steps, and has no checkpoint to go on from "
            f"(checkpoint.every=0, or it was deleted); start a new run from the agents in {folder / 'agents'}"
        )
    return Resumable(config, point, done if is_finished and config.steps == done else None)


def resume_point_of(config: RunConfig) -> ResumePoint | None:
    """Where the run in a config's output folder was left; None: there is none. The config must be its own."""
    folder = Path(config.output)
    if not (folder / "config.yaml").is_file():
        return None
    check_inside(folder / "config.yaml", folder)
    data = read_recipe(folder / "config.yaml")
    began = build_config({**data, "output": config.output}, str(folder / "config.yaml"))
    config = config if config.threads else replace(config, threads=began.threads)
    _check_changes(folder, began, config)
    found = _looked_at(folder, began, config)
    if found.finished_after is not None and found.point.state is None:
        raise ConfigError(
            f"output: {folder} is finished, and has no checkpoint to load it from; its agents are in "
            f"{folder / 'agents'}"
        )
    return found.point


def _configs(folder: Path, overrides: Sequence[str]) -> tuple[RunConfig, RunConfig]:
    """How the run began, and how it is to go on."""
    path = folder / "config.yaml"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: name the folder of a run, e.g. runs/size")
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run: it has no config.yaml")
    check_inside(path, folder)
    data = read_recipe(path)
    data["output"] = str(folder)
    began = build_config(data, str(path))
    for override in overrides:
        apply_override(data, override)
    config = build_config(data, str(path))
    _check_changes(folder, began, config)
    return began, config


def changes_rounding_only(key: str) -> bool:
    """Whether a run with another value of it says the same, but for rounding."""
    return _matches(key, (*ROUNDING, "learning.offload"))


def _check_changes(folder: Path, began: RunConfig, now: RunConfig) -> None:
    """Some changes make it another run."""
    refused = {
        key: values for key, values in changes(began, now).items() if not _matches(key, (*FREE, *ROUNDING))
    }
    if refused:
        listed = "; ".join(f"{key} was {before!r}, now {after!r}" for key, (before, after) in refused.items())
        raise ConfigError(
            f"{folder} cannot go on as another run: {listed}. Free to change: {', '.join(FREE)}; with other "
            f"rounding: {', '.join(ROUNDING)}. For the rest start a new run, from {folder}/agents if you like"
        )


def rounding_notes(began: RunConfig, now: RunConfig) -> list[str]:
    """Sentences about changes that cost exactness."""
    changed = [key for key in changes(began, now) if _matches(key, ROUNDING)]
    return [f"{', '.join(changed)} changed: numbers may differ in rounding from here on"] if changed else []


def changes(began: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (before, after) of every setting that differs; agents go by their names."""
    before, after = _flat(_plain(began)), _flat(_plain(now))
    keys = dict.fromkeys((*before, *after))
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _plain(config: RunConfig) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    plain["agents"] = {agent["name"]: agent for agent in plain["agents"]}
    return plain


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _status(folder: Path) -> Mapping[str, Any]:
    path = folder / "status.json"
    if not path.exists():
        return {}
    status: Any = read_json(path, folder)
    is_known = isinstance(status, dict) and status.get("schema") == STATUS_SCHEMA
    if not is_known or not isinstance(status.get("steps_done"), int):
        raise ConfigError(f"{path} is not one this hacrl can read; use the version that wrote it")
    found: dict[str, Any] = status
    return found


def _resume_point(folder: Path, began: RunConfig, config: RunConfig) -> ResumePoint:
    notes = rounding_notes(began, config)
    found = CheckpointStore(folder / CHECKPOINTS).newest_good()
    if found is None:
        note = "there is no checkpoint yet: the run begins again"
        return ResumePoint(None, {}, {}, None, RunResult(folder), (note, *notes))
    which, content, problems = found
    try:
        run = content.documents["run"]
        positions = {str(name): int(length) for name, length in run["positions"].items()}
        state, tensors = trainer_state(content)
        _take_new_sizes(state, began, config)
        result = _result_until(folder, positions)
        place = f"step {which.steps}" + (", in the middle of the next one" if which.phases else "")
        told = [f"a checkpoint is damaged and was passed over: {problem}" for problem in problems]
        told += [f"resumed after {place}", *notes]
        return ResumePoint(state, tensors, positions, str(run["data"]), result, tuple(told))
    except HacrlError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / CHECKPOINTS / which.folder} is not a run's checkpoint: {error!r}"
        ) from error


def _take_new_sizes(state: Mapping[str, Any], began: RunConfig, config: RunConfig) -> None:
    """Batch sizes that memory had made smaller are forgotten if the user gives new ones.

    So is a size that was chosen for a device, if the run goes on on another one.
    """
    changed = changes(began, config)
    tokens = config.learning.micro_batch_tokens
    moved = tokens is None and any(_matches(key, ("device", "agents.*.device")) for key in changed)
    for agent in state["agents"].values():
        if "learning.micro_batch_tokens" in changed and tokens is not None:
            agent["learner"]["micro_batch_tokens"] = tokens
        elif "learning.micro_batch_tokens" in changed or moved:
            agent["learner"].pop("micro_batch_tokens", None)  # chosen anew
        if "rollout.max_batch" in changed:
            agent["engine"]["max_batch"] = config.rollout.max_batch


def _result_until(folder: Path, positions: Mapping[str, int]) -> RunResult:
    """What the run had shown by then."""
    result = RunResult(folder)
    for evaluation in _lines_until(folder / "evaluations.jsonl", folder, positions, EvaluationLine):
        result.on_evaluation(evaluation.step, evaluation.agents)
    for line in _lines_until(folder / "metrics.jsonl", folder, positions, MetricsLine):
        for name, agent in line.agents.items():
            result.add(name, agent.rollout.reward, agent.rollout.rollouts, agent.learning.updates)
    return result


def _lines_until(path: Path, folder: Path, positions: Mapping[str, int], kind: type[Line]) -> Iterator[Line]:
    if not path.exists():
        return
    for line in iterate_jsonl(path, folder):
        if line.end > positions.get(path.name, 0):
            return
        yield as_record(line.record, kind, f"{path}, line {line.number},")
