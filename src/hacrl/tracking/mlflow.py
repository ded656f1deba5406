"""Log to MLflow: to ``MLFLOW_TRACKING_URI`` if it is set, otherwise to MLflow's default."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from hacrl.plain_text import printable
from hacrl.tracking.base import Backend, TrackedRun
from hacrl.tracking.samples import RolloutRow, as_text
from hacrl.tracking.scalars import Scalars

_PARAMS_A_CALL = 100  # limits of MLflow's log_batch
_METRICS_A_CALL = 1000
_LONGEST_PARAM = 500


class Mlflow(Backend):
    """One MLflow run, with its own client: the process's active run is not changed."""

    def __init__(self) -> None:
        entities: Any = import_module("mlflow.entities")
        self._metric, self._param = entities.Metric, entities.Param
        self._client_class: Any = import_module("mlflow").MlflowClient
        self._client: Any = None
        self._run_id = ""
        self._notes: list[str] = []

    def start(self, run: TrackedRun) -> None:
        """Start a run in the project's experiment; log config keys as params and config.yaml as artifact."""
        self._client = self._client_class()
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        params = [self._param(key, value[:_LONGEST_PARAM]) for key, value in flat_params(run.config)]
        for i in range(0, len(params), _PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=params[i : i + _PARAMS_A_CALL])
        self._client.log_text(self._run_id, run.config_yaml, "config.yaml")

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """Log all numbers of a step in as few calls as MLflow allows."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        for i in range(0, len(metrics), _METRICS_A_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[i : i + _METRICS_A_CALL])

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Log one text file per step, because MLflow rewrites a whole table with every new row."""
        self._client.log_text(self._run_id, as_text(rows), f"rollouts/step_{step:06d}.txt")

    def log_note(self, step: int, note: str) -> None:
        """Write all notes so far as one text file."""
        self._notes.append(f"step {step}: {printable(note)}\n")
        self._client.log_text(self._run_id, "".join(self._notes), "notes.txt")

    def finish(self, succeeded: bool) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._run_id, "FINISHED" if succeeded else "FAILED")


def flat_params(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys with values: ``learning.lr``, ``agents.qwen.model``."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_params(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                yield from flat_params(item, f"{name}.{item.get('name', index)}.")
        else:
            yield re.sub(r"[^\w. :/-]", "_", name), str(value)  # only these characters are valid in MLflow
