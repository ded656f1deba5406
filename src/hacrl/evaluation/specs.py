"""Benchmark specs: the problems, samples per problem and sampling settings of a benchmark for one model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.config.schema import (
    DEFAULT_BATCH,
    DEFAULT_MAX_NEW_TOKENS,
    BenchmarkSettings,
    RunConfig,
    TaskSettings,
)
from hacrl.errors import ConfigError, TaskError
from hacrl.evaluation.benchmarks import (
    BENCHMARKS,
    FILE_PURPOSES,
    find_benchmark,
    label_of,
    load_benchmark,
    load_file,
    looks_like_a_file,
)
from hacrl.evaluation.targets import Target
from hacrl.tasks.base import Task
from hacrl.tasks.boxed import DEFAULT_PROMPT
from hacrl.tasks.columns import check_columns
from hacrl.tasks.prompts import SLOT
from hacrl.tasks.registry import GYM_PREFIX, make_task
from hacrl.types import Problem, Sampling

OWN_TASK = "task"  # --on task: the held-out split of a run's own task
# Tasks that generate their own problems, as those with GYM_PREFIX do.
WITHOUT_DATA = ("arithmetic", "calculator", "python", "dungeon", "sqlite", "written_calculator")


@dataclass(frozen=True)
class BenchmarkSpec:
    """One benchmark for one model."""

    name: str
    task: Task
    problems: Sequence[Problem]
    source: str
    samples: int
    sampling: Sampling
    batch: int
    seed_parts: tuple[str, ...]  # separates the random draws of benchmarks

    @property
    def digest(self) -> str:
        """A digest of the problems in their order."""
        content = [(p.id, p.prompt, p.answer, p.context) for p in self.problems]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


class BenchmarkSpecs:
    """Builds benchmark specs. Models with the same benchmark share its task and verifier."""

    def __init__(
        self,
        settings: BenchmarkSettings,
        data: Path | None = None,
        prompt: str | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        if prompt is not None and SLOT not in prompt:
            raise ConfigError(f"--prompt {prompt!r} must contain {SLOT}, where the question goes")
        self._settings = settings
        self._data = data
        self._prompt = prompt
        self._columns = check_columns(columns, FILE_PURPOSES, "--columns")
        self._tasks: dict[tuple[str, str], Task] = {}
        self.notes: list[str] = []

    def build(self, name: str, target: Target) -> BenchmarkSpec:
        """Return the benchmark of that name for one model."""
        if name == OWN_TASK:
            return self._own_task(target)
        default_samples = BENCHMARKS[name].samples if name in BENCHMARKS else 1
        task = self._task(name, "", None)
        if name.startswith(GYM_PREFIX) and target.run is not None and target.run.task.name == name:
            self.notes.append(
                f"{name} generates its own questions, and {target.label} may have been trained on some of "
                f"them; --on {OWN_TASK} uses those that its run held out"
            )
        source = getattr(task, "source", f"task {name}")
        samples = self._settings.samples_of(default_samples)
        sampling = Sampling(
            self._settings.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            self._settings.temperature_of(samples),
            top_p=self._settings.top_p,
            stop=self._settings.stop_of(() if target.run is None else target.run.rollout.stop_strings),
        )
        batch = self._settings.batch or DEFAULT_BATCH
        label = label_of(name)
        return BenchmarkSpec(label, task, self._problems(task), source, samples, sampling, batch, (label,))

    def check(self, names: Sequence[str]) -> None:
        """Load the benchmarks that need no run; raise if one is unknown or has no data."""
        for name in names:
            if name != OWN_TASK:
                self._problems(self._task(name, "", None))

    def close(self) -> None:
        """End the verifiers' worker processes."""
        for task in self._tasks.values():
            task.close()

    def _own_task(self, target: Target) -> BenchmarkSpec:
        """Return the spec of the run's own evaluation; the first chunk has the same random draws."""
        run = target.run
        if run is None or target.folder is None:
            raise ConfigError(
                f"--on task: {target.settings.model} is a model, not a run, and has no task of its own; "
                "say e.g. --on math500,gsm8k, --on arithmetic for the bundled agents, or --on FILE.jsonl"
            )
        task = self._task(OWN_TASK, repr(run.task), run)  # a study's runs share theirs
        own = run.evaluation
        samples = self._settings.samples_of(own.samples_per_problem)
        temperature = own.temperature if self._settings.temperature is None else self._settings.temperature
        new_tokens = self._settings.max_new_tokens or own.sampling(run.rollout.sampling).max_new_tokens
        return BenchmarkSpec(
            OWN_TASK,
            task,
            self._problems(task),
            f"held-out split of {task.name}",
            samples,
            Sampling(
                new_tokens,
                temperature,
                top_p=self._settings.top_p,
                stop=self._settings.stop_of(run.rollout.stop_strings),
            ),
            self._settings.batch or run.rollout.max_batch,
            (),
        )

    def _problems(self, task: Task) -> Sequence[Problem]:
        problems = task.test[: self._settings.limit]
        if not problems:
            raise TaskError(f"--on: task {task.name!r} holds out no problems to evaluate on")
        return problems

    def _task(self, name: str, owner: str, run: RunConfig | None) -> Task:
        if (name, owner) not in self._tasks:
            task = make_task(run.task) if run is not None else self._load(name)
            self.notes += getattr(task, "notes", ())
            self._tasks[name, owner] = task
        return self._tasks[name, owner]

    def _load(self, name: str) -> Task:
        if name in WITHOUT_DATA or name.startswith(GYM_PREFIX):
            options = {} if self._prompt is None else {"prompt": self._prompt}
            return make_task(TaskSettings(name=name, options=options))
        prompt = DEFAULT_PROMPT if self._prompt is None else self._prompt
        if looks_like_a_file(name):
            return load_file(Path(name).expanduser(), prompt=prompt, columns=self._columns)
        find_benchmark(name)
        return load_benchmark(name, self._data, prompt)


def split_names(on: Sequence[str]) -> list[str]:
    """Return the distinct names in ``--on a,b --on c``: a, b, c."""
    names = [name.strip() for given in on for name in given.split(",")]
    return list(dict.fromkeys(name for name in names if name))
