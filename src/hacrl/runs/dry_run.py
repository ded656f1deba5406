"""Check a run and estimate its memory without loading weights.

A mistake raises the same error as in a real run. Anything that cannot be checked because the Hugging Face
hub is unreachable is listed instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hacrl.config.checks import check_plugin_method, updates_per_step
from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.engines.registry import check_engines, engine_notes
from hacrl.errors import ModelError, TaskError
from hacrl.executors.registry import chooses_devices, find_executor
from hacrl.memory.engine_sleep import decide_engine_memory
from hacrl.memory.estimate import AgentShapes, DeviceMemory, device_memory, footprints, ranks_of
from hacrl.models.architecture import architecture_support
from hacrl.models.footprint import Footprint, known_config
from hacrl.models.loading import load_model_config, load_text_codec
from hacrl.models.tokenizing import TextCodec
from hacrl.runs.folder import check_output
from hacrl.runs.hub import is_unreachable, probe_hub_if_needed
from hacrl.runs.preflight import check_agents, check_task, preflight
from hacrl.tasks.base import CheckedTask, Task
from hacrl.tasks.registry import make_task
from hacrl.tracking.registry import make_trackers

NOTHING: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentPlan:
    """One agent, as far as it could be checked."""

    settings: AgentSettings
    device: str
    footprint: Footprint | None  # None: not checked, here and below
    stop_tokens: tuple[str, ...] | None
    longest_prompt: int | None  # in tokens
    path: str | None = None  # how its architecture trains: "packed" or "plain"


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run."""

    config: RunConfig
    agents: tuple[AgentPlan, ...]
    devices: tuple[DeviceMemory, ...]
    train_problems: int | None  # None: the data could not be loaded
    test_problems: int | None
    updates_per_step: int
    notes: tuple[str, ...]
    not_checked: tuple[str, ...]
    warnings: tuple[str, ...] = ()  # settings with which the run can hardly succeed

    @property
    def rollouts_per_step(self) -> dict[str, int]:
        """Agent -> number of responses it generates in a step."""
        prompts = self.config.rollout.prompts_per_step
        return {agent.name: prompts * self.config.rollouts_per_prompt(agent) for agent in self.config.agents}


def dry_run(config: RunConfig, overwrite: bool = False) -> DryRun:
    """Check everything except the weights; write nothing except downloads into the hub's cache."""
    check_plugin_method(config)
    devices = check_agents(config, set())
    check_engines(config)
    find_executor(config.executor)
    check_output(config, overwrite)
    make_trackers(config, Path(config.output))  # raises if one cannot be imported; none starts
    with probe_hub_if_needed(config) as reason:
        loader = _Loader(config, reason or "the Hugging Face hub cannot be reached")
        task = loader.task()
        try:
            codecs = {agent.name: codec for agent in config.local_agents if (codec := loader.codec(agent))}
            checked = _check_task(config, task, codecs)
            configs = {
                agent.name: found for agent in config.local_agents if (found := loader.model_config(agent))
            }
        finally:
            if task is not None:
                task.close()
    prompts = {name: _longest_prompt(codec, checked) for name, codec in codecs.items() if checked is not None}
    loader.not_checked += [
        f"the endpoint of agent {agent.name!r} ({agent.endpoint.url}): a dry run asks it nothing"
        for agent in config.agents
        if agent.endpoint is not None
    ]
    local = {agent.name: devices[agent.name] for agent in config.local_agents}
    sized = AgentShapes(local, configs, prompts, ranks=ranks_of(config))
    settled, notes, known = config, NOTHING, dict[str, Footprint]()
    is_elsewhere = chooses_devices(config) and any(device != "cpu" for device in devices.values())
    if is_elsewhere:
        loader.not_checked.append(
            f"memory of agents on GPUs: executor {config.executor!r} places them on other machines; a dry "
            "run there with executor: local estimates it"
        )
    else:
        settled, notes = decide_engine_memory(config, sized)
        known = footprints(settled, sized)
    for agent in config.agents:
        if agent.name in configs and agent.name not in known and not is_elsewhere:
            loader.not_checked.append(
                f"memory of agent {agent.name!r} ({agent.model}): unknown type of layers"
            )
    return DryRun(
        config=config,
        agents=tuple(
            AgentPlan(
                agent,
                devices[agent.name],
                known.get(agent.name),
                _stop_tokens(codecs.get(agent.name)),
                prompts.get(agent.name),
                _path(agent, configs.get(agent.name)),
            )
            for agent in config.agents
        ),
        devices=() if is_elsewhere else tuple(device_memory(config, sized, known)),
        train_problems=None if task is None else len(checked.train if checked else task.train),
        test_problems=None if task is None else len(checked.test if checked else task.test),
        updates_per_step=updates_per_step(config),
        notes=engine_notes(config, devices)
        + notes
        + (() if task is None else checked.notes if checked else tuple(getattr(task, "notes", ()))),
        not_checked=tuple(loader.not_checked),
        warnings=() if checked is None else checked.warnings,
    )


class _Loader:
    """Loads tasks, tokenizers and model configs; records in ``not_checked`` what the hub did not provide."""

    def __init__(self, config: RunConfig, reason: str) -> None:
        self.not_checked: list[str] = []
        self._config = config
        self._reason = reason

    def task(self) -> Task | None:
        """Return the task with its data, or None if the hub is unreachable."""
        try:
            return make_task(self._config.task)
        except TaskError as error:
            self._record_unreachable(f"the data of task {self._config.task.name!r}", error)
            return None

    def codec(self, agent: AgentSettings) -> TextCodec | None:
        """Return the agent's tokenizer, or None if the hub is unreachable."""
        try:
            return load_text_codec(agent)
        except ModelError as error:
            subject = f"tokenizer, stop tokens and prompt lengths of agent {agent.name!r} ({agent.model})"
            self._record_unreachable(subject, error)
            return None

    def model_config(self, agent: AgentSettings) -> Any | None:
        """Return the model's config, or a built-in config of the same shape if the hub is unreachable."""
        try:
            return load_model_config(agent)
        except ModelError as error:
            known = known_config(agent.model)
            if known is None or not is_unreachable(error):
                self._record_unreachable(f"memory of agent {agent.name!r} ({agent.model})", error)
            return known

    def _record_unreachable(self, subject: str, error: Exception) -> None:
        if not is_unreachable(error):
            raise error
        self.not_checked.append(f"{subject}: {self._reason}")


def _check_task(config: RunConfig, task: Task | None, codecs: Mapping[str, TextCodec]) -> CheckedTask | None:
    """Run the checks of a real run for all agents whose tokenizer could be loaded."""
    if task is None:
        return None
    known = codecs.keys() | {agent.name for agent in config.agents if agent.endpoint is not None}
    agents = tuple(agent for agent in config.agents if agent.name in known)
    if codecs:
        return preflight(replace(config, agents=agents), task, codecs)
    check_task(config, task)
    return None


def _longest_prompt(codec: TextCodec, checked: CheckedTask) -> int:
    return codec.longest_prompt([*checked.train, *checked.test])


def _path(agent: AgentSettings, config: Any | None) -> str | None:
    return None if config is None else architecture_support(config, agent.attention).path


def _stop_tokens(codec: TextCodec | None) -> tuple[str, ...] | None:
    if codec is None:
        return None
    return tuple(codec.tokenizer.convert_ids_to_tokens(sorted(codec.stop_ids)))
