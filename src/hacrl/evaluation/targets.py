"""The models that ``hacrl eval`` evaluates: the agents of a run or study, one agent, or any model."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hacrl.config.load import load_config
from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.errors import ConfigError, ModelError
from hacrl.evaluation.benchmarks import label_of
from hacrl.files import check_inside, check_tree
from hacrl.models.model_sources import resolve_model
from hacrl.runs.folder import RUN_FILES

Stage = Literal["before", "after"]
_LEVELS_UP = 4  # parents searched for the run: of RUN/agents/NAME or a checkpoint
_BLOCK, _BLOCKS = 65536, 64  # bytes a block, blocks read of a large file
_ORIGIN = ("model", "revision", "precision", "chat_template", "chat_template_args")  # what an agent begins as
_MAX_NAME = 80  # characters of a folder name


@dataclass(frozen=True)
class StudyRun:
    """A run's place in a study of ``hacrl compare``."""

    folder: Path  # of the study
    variant: str  # a method, perhaps with changed keys
    seed: int


@dataclass(frozen=True)
class Target:
    """One model to evaluate, with the settings to load and sample it."""

    label: str  # in tables and files; unique in an evaluation
    agent: str  # name of the agent; the same before and after training
    settings: AgentSettings
    stage: Stage | None = None  # for a run's agents: the original model or the trained one
    run: RunConfig | None = None
    folder: Path | None = None  # of the run
    study: StudyRun | None = None  # if the run belongs to a study

    @property
    def home(self) -> Path | None:
        """The folder that results are written below: of the run, or of its study."""
        return self.folder if self.study is None else self.study.folder

    @property
    def origin(self) -> str | None:
        """What the states before and after training have in common: the run, or its study."""
        return None if self.home is None else str(self.home)


def resolve_targets(references: Sequence[str], before: bool = False) -> list[Target]:
    """Return the models that the references name, in order. Load nothing; raise if one is missing."""
    found: list[Target] = []
    for reference in dict.fromkeys(references):
        path = Path(os.path.expanduser(reference))  # Path.expanduser raises for an unknown user
        if os.path.lexists(path / "config.yaml"):
            found += _agents_of_run(path, before)
        elif runs := _runs_of_study(path):
            found += _agents_of_study(path, runs, before)
        elif os.path.isdir(path):
            found += _agent_folder(path, before)
        else:
            found.append(_model(reference, before))
    return _with_unique_labels(found)


def _agents_of_run(path: Path, before: bool) -> list[Target]:
    config = load_config(path / "config.yaml", inside=path)
    targets = []
    for agent in config.local_agents:
        if before:
            targets.append(_original(agent, config, path))
        if not agent.frozen:
            targets.append(_trained(agent, config, path, path / "agents" / agent.name))
    return targets


def _runs_of_study(path: Path) -> list[Path]:
    """Return the folders of a study's runs, ``VARIANT/seed-N``, by variant and seed; empty if it is none."""
    found = [folder.parent for folder in path.glob("*/seed-*/config.yaml")] if os.path.isdir(path) else []
    numbered = [run for run in found if run.name.removeprefix("seed-").isdecimal()]
    return sorted(numbered, key=lambda run: (run.parent.name, int(run.name.removeprefix("seed-"))))


def _agents_of_study(path: Path, runs: Sequence[Path], before: bool) -> list[Target]:
    """Return the trained agents of all runs; first, if wanted, each agent before training, once.

    Agents of one name that begin from different models have no common state before training.
    """
    trained: list[Target] = []
    originals: dict[str, Target] = {}
    for run in runs:
        check_inside(run, path)
        place = StudyRun(path, run.parent.name, int(run.name.removeprefix("seed-")))
        for target in _agents_of_run(run, before):
            if target.stage == "before":
                first = originals.setdefault(target.agent, replace(target, study=place))
                if any(getattr(first.settings, key) != getattr(target.settings, key) for key in _ORIGIN):
                    raise ConfigError(
                        f"--before: in {path}, agent {target.agent!r} does not begin as the same model in "
                        "every run; evaluate the runs one by one"
                    )
            else:
                label = f"{place.variant} seed {place.seed}: {target.label}"
                trained.append(replace(target, label=label, study=place))
    return [*originals.values(), *trained]


def _agent_folder(path: Path, before: bool) -> list[Target]:
    """Return the model of a folder. If a run wrote it, use that run's settings."""
    for parent in list(path.resolve().parents)[:_LEVELS_UP]:
        written_by_a_run = path.resolve().relative_to(parent).parts[0] in RUN_FILES
        if written_by_a_run and os.path.lexists(parent / "config.yaml"):
            config = load_config(parent / "config.yaml", inside=parent)
            for agent in config.agents:
                if agent.name == path.resolve().name:
                    trained = _trained(agent, config, parent, path)
                    return [_original(agent, config, parent), trained] if before else [trained]
            break
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} is neither a run (it has no config.yaml), nor a study (it has no "
            "VARIANT/seed-N/config.yaml), nor a model (it has no config.json)"
        )
    return [_model(str(path), before)]


def _original(agent: AgentSettings, config: RunConfig, run: Path) -> Target:
    try:
        resolve_model(agent.model)
    except ModelError as error:
        raise ModelError(
            f"--before: the original model of agent {agent.name!r} is missing: {error}"
        ) from error
    return Target(
        f"{agent.name} (before)", agent.name, _without_training_settings(agent), "before", config, run
    )


def _trained(agent: AgentSettings, config: RunConfig, run: Path, folder: Path) -> Target:
    check_inside(folder, run)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no trained agent: agents are saved at the end of a run; "
            f"let the run {run} finish first"
        )
    check_tree(folder, run)  # transformers would follow links out of the run and block on pipes
    settings = replace(_without_training_settings(agent), model=str(folder), revision=None)
    return Target(agent.name, agent.name, settings, "after", config, run)


def _without_training_settings(agent: AgentSettings) -> AgentSettings:
    """Return the settings without those of training. A run merges adapters into the agents that it saves."""
    return replace(agent, lora=None, gradient_checkpointing=False)


def _model(reference: str, before: bool) -> Target:
    if before:
        raise ConfigError(f"--before needs a run: {reference} is a model without a state before training")
    resolve_model(reference)
    last = reference.rstrip("/").rsplit("/", 1)[-1].removeprefix("bundled:")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", last).lstrip("._-") or "model"
    return Target(name, name, AgentSettings(name=name, model=reference))


def _with_unique_labels(targets: Sequence[Target]) -> list[Target]:
    """Prefix equal labels with the run's folder; number those that are still equal."""
    for prefixed in (False, True):
        counts = Counter(target.label for target in targets)
        labelled: list[Target] = []
        for i, target in enumerate(targets):
            label = target.label
            if counts[label] > 1 and prefixed:
                label = f"{label} #{sum(other.label == label for other in targets[:i]) + 1}"
            elif counts[label] > 1 and target.home is not None:
                label = f"{target.home.resolve().name}/{label}"
            labelled.append(replace(target, label=label))
        targets = labelled
    return list(targets)


def weights_digest(settings: AgentSettings) -> str:
    """Return a digest that changes with the weights; empty for hub models. Reads parts of large files."""
    folder = Path(resolve_model(settings.model))
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".gguf", ".json", ".jinja", ".model") and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name}\x1f{size}\x1f".encode())
            with path.open("rb") as file:
                for start in range(0, size, max(_BLOCK, size // _BLOCKS)):
                    file.seek(start)
                    digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def looks_like_a_hub_id(reference: str) -> bool:
    """Return whether a reference is neither bundled nor a folder."""
    return reference == resolve_model(reference) and not os.path.exists(reference)


def default_output(targets: Sequence[Target], names: Sequence[str]) -> Path:
    """Return ``RUN/evaluations/BENCHMARKS`` for one run or study, else ``evaluations/MODELS/BENCHMARKS``."""
    benchmarks = _folder_name([label_of(name) for name in names])
    folders = {target.home for target in targets}
    folder = targets[0].home
    if len(folders) == 1 and folder is not None:
        output = folder / "evaluations" / benchmarks
        check_inside(output, folder)
        return output
    return Path("evaluations") / _folder_name([target.label for target in targets]) / benchmarks


def _folder_name(parts: Sequence[str]) -> str:
    name = "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-") for part in parts)
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:_MAX_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
