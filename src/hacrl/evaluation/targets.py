"""Whom ``hacrl eval`` is about: a run's agents, one agent of a run, or any model."""

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
_LEVELS_UP = 4  # RUN/agents/NAME, or a checkpoint a little deeper
_BLOCK, _BLOCKS = 65536, 64  # bytes, and samples of a large file
_LONGEST_NAME = 80  # of a folder


@dataclass(frozen=True)
class Candidate:
    """One model to be evaluated, and how it is loaded and asked."""

    label: str  # in tables and files; different for all candidates of an evaluation
    agent: str  # name of the agent; the same before and after training
    settings: AgentSettings
    stage: Stage | None = None  # of a run's agents: its original model, or the trained one
    run: RunConfig | None = None
    folder: Path | None = None  # of the run


def resolve_targets(references: Sequence[str], before: bool = False) -> list[Candidate]:
    """Every model the references stand for, in order. Nothing is loaded; what is missing is an error here."""
    found: list[Candidate] = []
    for reference in dict.fromkeys(references):
        path = Path(os.path.expanduser(reference))  # Path's own way fails where there is no such user
        if os.path.lexists(path / "config.yaml"):
            found += _agents_of_run(path, before)
        elif os.path.isdir(path):
            found += _agent_folder(path, before)
        else:
            found.append(_model(reference, before))
    return _with_different_labels(found)


def _agents_of_run(path: Path, before: bool) -> list[Candidate]:
    config = load_config(path / "config.yaml", inside=path)
    candidates = []
    for agent in config.agents:
        if before:
            candidates.append(_original(agent, config, path))
        candidates.append(_trained(agent, config, path, path / "agents" / agent.name))
    return candidates


def _agent_folder(path: Path, before: bool) -> list[Candidate]:
    """A folder with a model. If a run wrote it, it is asked the way that run asked it."""
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
            f"{path} is neither a run (it has no config.yaml) nor a model (it has no config.json)"
        )
    return [_model(str(path), before)]


def _original(agent: AgentSettings, config: RunConfig, run: Path) -> Candidate:
    try:
        resolve_model(agent.model)
    except ModelError as error:
        raise ModelError(f"--before: the original model of agent {agent.name!r} is gone: {error}") from error
    return Candidate(f"{agent.name} (before)", agent.name, _asked_only(agent), "before", config, run)


def _trained(agent: AgentSettings, config: RunConfig, run: Path, folder: Path) -> Candidate:
    check_inside(folder, run)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no trained agent: agents are saved at the end of a run; "
            f"let the run {run} finish first"
        )
    check_tree(folder, run)  # transformers would follow any link, and wait for any pipe
    settings = replace(_asked_only(agent), model=str(folder), revision=None)
    return Candidate(agent.name, agent.name, settings, "after", config, run)


def _asked_only(agent: AgentSettings) -> AgentSettings:
    """Without what only learning needs. A run's adapters are merged into the agents it saves."""
    return replace(agent, lora=None, gradient_checkpointing=False)


def _model(reference: str, before: bool) -> Candidate:
    if before:
        raise ConfigError(f"--before is for runs: {reference} is a model, it has nothing before it")
    resolve_model(reference)
    last = reference.rstrip("/").rsplit("/", 1)[-1].removeprefix("bundled:")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", last).lstrip("._-") or "model"
    return Candidate(name, name, AgentSettings(name=name, model=reference))


def _with_different_labels(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Equal names get the run's folder in front, and a number if that does not help."""
    for prefixed in (False, True):
        counts = Counter(candidate.label for candidate in candidates)
        labelled: list[Candidate] = []
        for i, candidate in enumerate(candidates):
            label = candidate.label
            if counts[label] > 1 and prefixed:
                label = f"{label} #{sum(other.label == label for other in candidates[:i]) + 1}"
            elif counts[label] > 1 and candidate.folder is not None:
                label = f"{candidate.folder.resolve().name}/{label}"
            labelled.append(replace(candidate, label=label))
        candidates = labelled
    return list(candidates)


def weights_digest(settings: AgentSettings) -> str:
    """Tells other weights in the same place; empty for hub models. Of large files samples are read."""
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
    """Whether a reference is neither bundled nor a folder."""
    return reference == resolve_model(reference) and not os.path.exists(reference)


def default_output(candidates: Sequence[Candidate], names: Sequence[str]) -> Path:
    """``RUN/evaluations/BENCHMARKS`` for one run, else ``evaluations/MODELS/BENCHMARKS``."""
    benchmarks = _folder_name([label_of(name) for name in names])
    folders = {candidate.folder for candidate in candidates}
    folder = candidates[0].folder
    if len(folders) == 1 and folder is not None:
        output = folder / "evaluations" / benchmarks
        check_inside(output, folder)
        return output
    return Path("evaluations") / _folder_name([candidate.label for candidate in candidates]) / benchmarks


def _folder_name(parts: Sequence[str]) -> str:
    name = "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-") for part in parts)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
