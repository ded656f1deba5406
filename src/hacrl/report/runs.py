"""Read a run's folder into plain numbers by step, while the run is under way or later. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacrl.config.load import read_recipe
from hacrl.errors import ConfigError
from hacrl.files import MissingFileError, UnreadableFileError, read_json, read_jsonl, read_text

Series = list[float | None]  # one value per step; None where there is none
_BY_SOURCE = ("sources", "dropped", "left_out", "retokenised")


@dataclass(frozen=True)
class RunData:
    """One run's files as plain values."""

    name: str
    folder: Path
    variant: str  # of a study; else the method's name
    seed: int
    config: dict[str, Any]
    steps: list[int] = field(default_factory=list)
    # agent -> "learning/loss" -> one value per step
    metrics: dict[str, dict[str, Series]] = field(default_factory=dict)
    # learner -> source -> "used", "clipped", ... -> one value per step
    pairs: dict[str, dict[str, dict[str, Series]]] = field(default_factory=dict)
    dropped: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # in all, by reason
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, Series] = field(default_factory=dict)  # "learn/ada" -> one value per step
    notes: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def agents(self) -> list[str]:
        """The agents in the config's order."""
        return [agent["name"] for agent in self.config["agents"]]

    def series(self, agent: str, name: str) -> Series:
        """Return one of an agent's metrics by step; all None if there is no such metric."""
        return self.metrics.get(agent, {}).get(name, [None] * len(self.steps))

    def spent_at(self, step: int, agent: str) -> int:
        """Return how many training rollouts the agent had sampled after a step."""
        rollouts = self.series(agent, "rollout/rollouts")
        return int(sum(n or 0 for at, n in zip(self.steps, rollouts, strict=True) if at <= step))

    def accuracy(self, agent: str, last: bool) -> dict[str, Any] | None:
        """Return the agent's first or last evaluation; None if there is none."""
        found = [line["agents"][agent] for line in self.evaluations if agent in line["agents"]]
        return found[-1 if last else 0] if found else None


def find_runs(folders: Sequence[Path]) -> list[RunData]:
    """Return the runs in these folders: a run's own folder, or one of several runs (a study, the demo)."""
    found: dict[Path, RunData] = {}
    for folder in folders:
        inside = run_folders(folder)
        if not inside:
            raise ConfigError(
                f"{folder} holds no run: name the folder of a run, e.g. runs/size, of a study or of a demo"
            )
        for path in inside:
            found.setdefault(path.resolve(), read_run(path, inside_of=folder))
    names = [run.name for run in found.values()]
    return [run if names.count(run.name) == 1 else _renamed(run) for run in found.values()]


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders at most two levels below ``folder``, or ``folder`` itself."""
    if (folder / "config.yaml").is_file():
        return [folder]
    found = [*folder.glob("*/config.yaml"), *folder.glob("*/seed-*/config.yaml")]
    return sorted(path.parent for path in found if path.is_file())


def _renamed(run: RunData) -> RunData:
    """Return the run named by its whole path, because another run has the same name."""
    return RunData(**{**vars(run), "name": str(run.folder)})


def read_run(folder: Path, inside_of: Path | None = None) -> RunData:
    """Return what the folder holds so far. ``inside_of``: the folder that a run of several is named in."""
    parent = folder if inside_of is None else inside_of
    relative = folder.relative_to(parent) if folder != parent else Path(folder.resolve().name)
    try:
        config = read_recipe(folder / "config.yaml", folder)
        config["agents"] = [dict(agent) for agent in config["agents"]]
        method = config["method"]["name"]
        is_of_study = relative.name.startswith("seed-") and relative != Path(relative.name)
        run = RunData(
            name=str(relative),
            folder=folder,
            variant=relative.parent.name if is_of_study else method,
            seed=int(config.get("seed", 0)),
            config=config,
        )
        _ = run.agents
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.yaml'} is not the config of a run: {error!r}") from error
    try:
        _read_metrics(run)
        _read_timings(run)
        run.evaluations.extend(_lines(folder, "evaluations.jsonl"))
    except (KeyError, TypeError, AttributeError) as error:
        raise UnreadableFileError(f"{folder} is damaged or of another version: {error!r}") from error
    run.notes.extend(_read_notes(folder))
    run.status.update(_read_status(folder))
    return run


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    try:
        return [line.record for line in read_jsonl(folder / name, folder).lines]
    except MissingFileError:  # nothing of this kind has happened yet
        return []


def _read_notes(folder: Path) -> list[str]:
    try:
        return read_text(folder / "notes.txt", folder).splitlines()
    except MissingFileError:
        return []


def _read_status(folder: Path) -> dict[str, Any]:
    try:
        status = read_json(folder / "status.json", folder)
    except MissingFileError:
        return {}
    return status if isinstance(status, dict) else {}


def _read_metrics(run: RunData) -> None:
    lines = _lines(run.folder, "metrics.jsonl")
    run.steps.extend(line["step"] for line in lines)
    for position, line in enumerate(lines):
        for agent, report in line["agents"].items():
            columns = run.metrics.setdefault(agent, {})
            for name, value in _numbers(report):
                _put(columns, name, position, value)
            learning = report["learning"]
            for source, numbers in learning["sources"].items():
                pair = run.pairs.setdefault(agent, {}).setdefault(source, {})
                for name, value in _numbers(numbers):
                    _put(pair, name, position, value)
            for source, reasons in learning["dropped"].items():
                pair = run.pairs.setdefault(agent, {}).setdefault(source, {})
                _put(pair, "dropped", position, float(sum(reasons.values())))
                totals = run.dropped.setdefault(agent, {}).setdefault(source, {})
                for reason, count in reasons.items():
                    totals[reason] = totals.get(reason, 0) + count
            for source, count in learning.get("left_out", {}).items():
                pair = run.pairs.setdefault(agent, {}).setdefault(source, {})
                _put(pair, "left_out", position, float(count))
    _pad(run.metrics.values(), len(lines))
    for sources in run.pairs.values():
        _pad(sources.values(), len(lines))


def _read_timings(run: RunData) -> None:
    by_step = {line["step"]: line for line in _lines(run.folder, "timings.jsonl")}
    for position, step in enumerate(run.steps):
        for name, value in by_step.get(step, {}).items():
            if name != "step":
                _put(run.seconds, name, position, float(value))
    _pad([run.seconds], len(run.steps))


def _put(columns: dict[str, Series], name: str, position: int, value: float | None) -> None:
    column = columns.setdefault(name, [])
    column.extend([None] * (position - len(column)))
    column.append(value)


def _pad(tables: Any, length: int) -> None:
    for columns in tables:
        for column in columns.values():
            column.extend([None] * (length - len(column)))


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers in nested mappings, with their keys joined by slashes."""
    for key, value in record.items():
        if key in _BY_SOURCE:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)
