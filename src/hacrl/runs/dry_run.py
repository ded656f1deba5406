"""A run, short of loading weights: everything that can be checked is, and its memory is worked out.

What is wrong is an error, as in a real run. What cannot be checked because the Hugging Face hub is out of
reach is listed instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hacrl.config.checks import updates_per_step
from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.engines.registry import check_engines, engine_notes
from hacrl.errors import ModelError, TaskError
from hacrl.memory.engine_sleep import decide_engine_memory
from hacrl.memory.estimate import AgentShapes, DeviceMemory, device_memory, footprints
from hacrl.models.footprint import Footprint, known_config
from hacrl.models.loading import load_codec, load_model_config
from hacrl.models.tokenizing import Codec
from hacrl.runs.folder import check_output
from hacrl.runs.hub import hub_if_needed, is_unreachable
from hacrl.runs.preflight import check_agents, check_ids, check_sizes, preflight
from hacrl.tasks.base import Checked, Rehearsable, Task
from hacrl.tasks.registry import make_task
from hacrl.tracking.registry import make_trackers


@dataclass(frozen=True)
class AgentPlan:
    """One agent, as far as it could be looked at."""

    settings: AgentSettings
    device: str
    footprint: Footprint | None
    stop_tokens: tuple[str, ...] | None  # None: not checked, as for the next
    longest_prompt: int | None


@dataclass(frozen=True)
class DryRun:
    """What a run would be."""

    config: RunConfig
    agents: tuple[AgentPlan, ...]
    devices: tuple[DeviceMemory, ...]
    train_problems: int | None  # None: the data could not be loaded
    test_problems: int | None
    updates_per_step: int
    notes: tuple[str, ...]
    not_checked: tuple[str, ...]

    @property
    def rollouts_per_step(self) -> dict[str, int]:
        """Agent -> responses it samples in a step."""
        prompts = self.config.rollout.prompts_per_step
        return {agent.name: prompts * self.config.rollouts_per_prompt(agent) for agent in self.config.agents}


def dry_run(config: RunConfig, overwrite: bool = False) -> DryRun:
    """Check everything short of the weights; nothing is written but downloads into the hub's cache."""
    devices = check_agents(config, set())
    check_engines(config)
    check_output(config, overwrite)
    make_trackers(config, Path(config.output))  # refuses those that cannot be imported; none starts
    with hub_if_needed(config) as reason:
        look = _Look(config, reason or "the Hugging Face hub cannot be reached")
        task = look.task()
        try:
            codecs = {agent.name: codec for agent in config.agents if (codec := look.codec(agent))}
            checked = _checked(config, task, codecs)
            configs = {agent.name: found for agent in config.agents if (found := look.model_config(agent))}
        finally:
            if task is not None:
                task.close()
    prompts = {name: _longest_prompt(codec, checked) for name, codec in codecs.items() if checked is not None}
    sized = AgentShapes(devices, configs, prompts)
    settled, notes = decide_engine_memory(config, sized)
    known = footprints(settled, sized)
    for agent in config.agents:
        if agent.name in configs and agent.name not in known:
            look.not_checked.append(f"memory of agent {agent.name!r} ({agent.model}): its layers are unusual")
    return DryRun(
        config=config,
        agents=tuple(
            AgentPlan(
                agent,
                devices[agent.name],
                known.get(agent.name),
                _stop_tokens(codecs.get(agent.name)),
                prompts.get(agent.name),
            )
            for agent in config.agents
        ),
        devices=tuple(device_memory(config, sized, known)),
        train_problems=None if task is None else len(checked.train if checked else task.train),
        test_problems=None if task is None else len(checked.test if checked else task.test),
        updates_per_step=updates_per_step(config),
        notes=engine_notes(config, devices)
        + notes
        + (() if task is None else checked.notes if checked else tuple(getattr(task, "notes", ()))),
        not_checked=tuple(look.not_checked),
    )


class _Look:
    """Loads what it can, and writes down what it cannot."""

    def __init__(self, config: RunConfig, reason: str) -> None:
        self.not_checked: list[str] = []
        self._config = config
        self._reason = reason

    def task(self) -> Task | None:
        """The task with its data."""
        try:
            return make_task(self._config.task)
        except TaskError as error:
            self._note(f"the data of task {self._config.task.name!r}", error)
            return None

    def codec(self, agent: AgentSettings) -> Codec | None:
        """The agent's tokenizer."""
        try:
            return load_codec(agent)
        except ModelError as error:
            what = f"tokenizer, stop tokens and prompt lengths of agent {agent.name!r} ({agent.model})"
            self._note(what, error)
            return None

    def model_config(self, agent: AgentSettings) -> Any | None:
        """The model's config; a built-in one with the same shape will do."""
        try:
            return load_model_config(agent)
        except ModelError as error:
            known = known_config(agent.model)
            if known is None or not is_unreachable(error):
                self._note(f"memory of agent {agent.name!r} ({agent.model})", error)
            return known

    def _note(self, what: str, error: Exception) -> None:
        if not is_unreachable(error):
            raise error
        self.not_checked.append(f"{what}: {self._reason}")


def _checked(config: RunConfig, task: Task | None, codecs: Mapping[str, Codec]) -> Checked | None:
    """A run's own checks, for those agents whose tokenizer is at hand."""
    if task is None:
        return None
    agents = tuple(agent for agent in config.agents if agent.name in codecs)
    if agents:
        return preflight(replace(config, agents=agents), task, codecs)
    check_sizes(config, task)
    check_ids(task)
    if isinstance(task, Rehearsable):
        task.rehearse()
    return None


def _longest_prompt(codec: Codec, checked: Checked) -> int:
    return max(len(codec.encode_prompt(problem)) for problem in (*checked.train, *checked.test))


def _stop_tokens(codec: Codec | None) -> tuple[str, ...] | None:
    if codec is None:
        return None
    return tuple(codec.tokenizer.convert_ids_to_tokens(sorted(codec.stop_ids)))
