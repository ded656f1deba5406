"""Resume a run: find its newest checkpoint, and check which settings have changed since."""

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
from hacrl.runs.results import EvaluationLine, MetricsLine, RunResult, plain_seconds
from hacrl.training.lr_schedule import LearningRateSchedule
from hacrl.training.trainer import Trainer


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from, and the run's result up to it."""

    state: Mapping[str, Any] | None  # None: there is no checkpoint, so the run starts from the beginning
    tensors: Mapping[str, Mapping[str, Any]]  # by agent and name
    positions: Mapping[str, int]  # lengths of the run's growing files at the checkpoint
    data: str | None  # fingerprint of the problems
    result: RunResult  # up to the checkpoint
    notes: tuple[str, ...] = ()

    @property
    def steps_done(self) -> int:
        """Number of finished steps."""
        return 0 if self.state is None else int(self.state["steps_done"])

    def check_data(self, fingerprint: str) -> None:
        """Raise CheckpointError unless the task has the same problems as when the run started."""
        if self.data is not None and self.data != fingerprint:
            raise CheckpointError(
                "the task's problems differ from those this run started with: the data set or the package "
                "that makes them has changed. Restore the data, or start a new run from the saved agents"
            )

    def restore(self, trainer: Trainer) -> None:
        """Load the checkpoint into the trainer."""
        if self.state is None:
            return
        try:
            trainer.load_state_dict(self.state, self.tensors)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this run: {error!r}; was it written by another recipe?"
            ) from error


Line = TypeVar("Line", MetricsLine, EvaluationLine)
# Keys that may change when a run is resumed. With these the result stays the same to the last bit (with other
# steps: unless the learning rate follows a schedule, see schedule_notes) ...
FREE_KEYS = (
    "steps",
    "output",
    "executor",
    "ray.*",
    "agents.*.place.*",
    "agents.*.endpoint.url",
    "agents.*.endpoint.api_key_env",
    "agents.*.endpoint.max_concurrency",
    "agents.*.endpoint.timeout",
    "agents.*.endpoint.retries",
    "agents.*.endpoint.max_unanswered",
    "trackers",
    "project",
    "logged_rollouts",
    "keep_rollouts",
    "checkpoint.*",
    "pause_collapsed",
    "evaluation.every",
    "learning.offload",
)
# ... and with these, sums may be rounded differently.
ROUNDING_KEYS = (
    "device",
    "threads",
    "rollout.max_batch",
    "rollout.engine",
    "learning.micro_batch_tokens",
    "learning.compile",
    "agents.*.device",
    "agents.*.ranks",
    "agents.*.fsdp.*",
    "agents.*.engine",
    "agents.*.replicas.*",
    "agents.*.vllm.*",
    "agents.*.attention",
    "agents.*.gradient_checkpointing",
)


@dataclass(frozen=True)
class ResumableRun:
    """A run that can continue, or that is finished."""

    config: RunConfig
    point: ResumePoint
    finished_after: int | None  # number of steps if the run is finished; otherwise None


def inspect_run(folder: Path, overrides: Sequence[str] = ()) -> ResumableRun:
    """Find where the run in a folder stopped, and check the overrides; change nothing in the folder."""
    if folder.is_dir():
        check_tree(folder, folder)  # the run will write to the folder: no link may lead out of it
    original, config = _configs(folder, overrides)
    return _find_run(folder, original, config)


def _find_run(folder: Path, original: RunConfig, config: RunConfig) -> ResumableRun:
    status = _status(folder)
    is_finished = status.get("state") == "finished"
    point = _resume_point(folder, original, config)
    done = status["steps_done"] if is_finished else point.steps_done
    if config.steps < done:
        raise ConfigError(
            f"steps={config.steps}, but {folder} has made {done} steps already; steps is the total number"
        )
    if is_finished and config.steps > done and point.state is None:
        raise ConfigError(
            f"{folder} finished after {done} steps and has no checkpoint to continue from "
            f"(checkpoint.every=0, or it was deleted); start a new run from the agents in {folder / 'agents'}"
        )
    return ResumableRun(config, point, done if is_finished and config.steps == done else None)


def resume_point_of(config: RunConfig) -> ResumePoint | None:
    """Return where the run in the config's output folder stopped, or None if there is no run.

    The config must be that of the run, except for keys that may change.
    """
    folder = Path(config.output)
    if not (folder / "config.yaml").is_file():
        return None
    check_inside(folder / "config.yaml", folder)
    data = read_recipe(folder / "config.yaml")
    original = build_config({**data, "output": config.output}, str(folder / "config.yaml"))
    config = config if config.threads else replace(config, threads=original.threads)
    _check_changes(folder, original, config)
    found = _find_run(folder, original, config)
    if found.finished_after is not None and found.point.state is None:
        raise ConfigError(
            f"output: the run in {folder} is finished and has no checkpoint to load; its agents are in "
            f"{folder / 'agents'}"
        )
    return found.point


def _configs(folder: Path, overrides: Sequence[str]) -> tuple[RunConfig, RunConfig]:
    """Return the run's original config, and the one with the overrides."""
    path = folder / "config.yaml"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the folder of a run, e.g. runs/size")
    if not path.is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
    check_inside(path, folder)
    data = read_recipe(path)
    data["output"] = str(folder)
    original = build_config(data, str(path))
    for override in overrides:
        apply_override(data, override)
    config = build_config(data, str(path))
    _check_changes(folder, original, config)
    return original, config


def changes_rounding_only(key: str) -> bool:
    """Return whether a run with another value of this key gives the same numbers except for rounding."""
    return _matches(key, (*ROUNDING_KEYS, "learning.offload"))


def _check_changes(folder: Path, original: RunConfig, now: RunConfig) -> None:
    """Refuse changes that would make it another run."""
    refused = {
        key: values
        for key, values in changes(original, now).items()
        if not _matches(key, (*FREE_KEYS, *ROUNDING_KEYS))
    }
    if refused:
        listed = "; ".join(f"{key} was {before!r}, now {after!r}" for key, (before, after) in refused.items())
        raise ConfigError(
            f"{folder} cannot continue with these settings: {listed}. Keys that may change: "
            f"{', '.join(FREE_KEYS)}; with other rounding: {', '.join(ROUNDING_KEYS)}. For other changes "
            f"start a new run, e.g. from the agents in {folder}/agents"
        )


def rounding_notes(original: RunConfig, now: RunConfig) -> list[str]:
    """Return a note if a changed key changes how sums are rounded."""
    changed = [key for key in changes(original, now) if _matches(key, ROUNDING_KEYS)]
    return [f"{', '.join(changed)} changed: from now on, numbers may differ by rounding"] if changed else []


def schedule_notes(original: RunConfig, now: RunConfig, steps_done: int) -> list[str]:
    """Return a note if another number of steps changes the learning rates of the steps to come."""
    before, after = LearningRateSchedule.of(original), LearningRateSchedule.of(now)
    to_come = range(steps_done + 1, now.steps + 1)
    if before.steps == after.steps or all(before.factor(step) == after.factor(step) for step in to_come):
        return []
    step = steps_done + 1
    return [
        f"steps changed from {before.steps} to {after.steps}: from step {step} on, the learning rate follows "
        f"the schedule of a run of {after.steps} steps (learning.schedule={after.kind}, warm-up "
        f"{after.warmup_steps} steps). Step {step} has {after.factor(step):.3g} of learning.lr, not "
        f"{before.factor(step):.3g}"
    ]


def changes(original: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> (before, after) of every setting that differs; agents are matched by name."""
    before, after = _flat(_plain(original)), _flat(_plain(now))
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
        raise ConfigError(f"this version of hacrl cannot read {path}; use the version that wrote it")
    found: dict[str, Any] = status
    return found


def _resume_point(folder: Path, original: RunConfig, config: RunConfig) -> ResumePoint:
    notes = rounding_notes(original, config)
    found = CheckpointStore(folder / CHECKPOINTS).newest_intact()
    if found is None:
        note = "there is no checkpoint yet: the run starts from the beginning"
        return ResumePoint(None, {}, {}, None, RunResult(folder), (note, *notes))
    which, content, problems = found
    try:
        run = content.documents["run"]
        positions = {str(name): int(length) for name, length in run["positions"].items()}
        state, tensors = trainer_state(content)
        _apply_new_batch_sizes(state, original, config)
        result = _result_until(folder, positions)
        place = f"step {which.steps}" + (", in the middle of the next step" if which.phases else "")
        skipped = [f"a damaged checkpoint was skipped: {problem}" for problem in problems]
        notes = [*skipped, f"resumed after {place}", *schedule_notes(original, config, which.steps), *notes]
        return ResumePoint(state, tensors, positions, str(run["data"]), result, tuple(notes))
    except HacrlError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / CHECKPOINTS / which.folder} is not a run's checkpoint: {error!r}"
        ) from error


def _apply_new_batch_sizes(state: Mapping[str, Any], original: RunConfig, config: RunConfig) -> None:
    """Replace the checkpoint's batch sizes, which may have been lowered for lack of memory.

    A size that the user changed is taken from the config. A size that was chosen automatically is dropped, so
    that it is chosen again, if the device changed.
    """
    changed = changes(original, config)
    tokens = config.learning.micro_batch_tokens
    moved = tokens is None and any(_matches(key, ("device", "agents.*.device")) for key in changed)
    for agent in state["agents"].values():
        if "rollout.max_batch" in changed:
            agent["engine"]["max_batch"] = config.rollout.max_batch
        if "learner" not in agent:  # it is frozen
            continue
        if "learning.micro_batch_tokens" in changed and tokens is not None:
            agent["learner"]["micro_batch_tokens"] = tokens
        elif "learning.micro_batch_tokens" in changed or moved:
            agent["learner"].pop("micro_batch_tokens", None)


def _result_until(folder: Path, positions: Mapping[str, int]) -> RunResult:
    """Return the run's result up to the checkpoint."""
    result = RunResult(folder)
    for evaluation in _lines_until(folder / "evaluations.jsonl", folder, positions, EvaluationLine):
        result.on_evaluation(evaluation.step, evaluation.agents)
    for line in _lines_until(folder / "metrics.jsonl", folder, positions, MetricsLine):
        for name, agent in line.agents.items():
            result.add(name, agent)
    if (folder / "timings.jsonl").exists():
        for times in iterate_jsonl(folder / "timings.jsonl", folder):
            if times.end <= positions.get("timings.jsonl", 0):
                result.add_seconds(plain_seconds(times.record))
    return result


def _lines_until(path: Path, folder: Path, positions: Mapping[str, int], kind: type[Line]) -> Iterator[Line]:
    if not path.exists():
        return
    for line in iterate_jsonl(path, folder):
        if line.end > positions.get(path.name, 0):
            return
        yield as_record(line.record, kind, f"{path}, line {line.number},")
