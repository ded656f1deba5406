"""The settings of a run from Python, apart from agents and task. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacrl.api.trl import lora_section, refuse_config_keys
from hacrl.config.load import build_config
from hacrl.config.schema import (
    DEFAULT_PROBLEMS,
    AnyMethodSettings,
    AsynchronousSettings,
    CheckpointSettings,
    EvaluationSettings,
    HacpoSettings,
    KeepRollouts,
    LearningSettings,
    RaySettings,
    RolloutSettings,
    RunConfig,
)
from hacrl.errors import ConfigError

Section = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class HACRLConfig:
    """The ``args`` of a :class:`hacrl.HACRLTrainer`: the keys of a recipe, with the same names and defaults.

    Sections take their settings record or a mapping: ``learning=LearningSettings(lr=1e-6)`` and
    ``learning={"lr": 1e-6}`` are the same. Values are checked when the trainer is made, before models load.
    """

    output: str | Path
    """Folder of this run: config, metrics, sampled rollouts, trained agents."""
    steps: int = 100
    """Training steps; each asks every agent ``rollout.prompts_per_step`` problems."""
    seed: int = 0
    """Seed of all randomness: equal runs on one machine give equal metrics."""
    device: str = "auto"
    """Where hacrl puts the models it loads: ``cpu``, ``cuda``, ``cuda:1``; ``auto``: a GPU if any."""
    executor: str = "local"
    """Where the agents' workers run: ``local``, ``ray``, an installed package's, or ``module:function``."""
    ray: RaySettings | Section = field(default_factory=dict)
    """The cluster of ``executor="ray"``."""
    threads: int | None = None
    """CPU threads of torch; None: torch's default."""
    method: str | AnyMethodSettings | Section = HacpoSettings.name
    """The name of a method (``"hacpo"``, ``"gspo"``, ``"aligned"``, ..., or ``"module:attribute"``), its
    settings, or a mapping with ``name``."""
    agent_defaults: Section = field(default_factory=dict)
    """Settings of every agent that does not have its own, e.g. ``{"lora": {"rank": 16}}``."""
    rollout: RolloutSettings | Section = field(default_factory=dict)
    """Prompts and responses of a step, and how responses are sampled."""
    learning: LearningSettings | Section = field(default_factory=dict)
    """Optimizer, mini-batches, number of updates."""
    asynchronous: AsynchronousSettings | Section = field(default_factory=dict)
    """Whether agents sample while they learn; they do not unless ``max_staleness`` is 1 or more."""
    evaluation: EvaluationSettings | Section = field(default_factory=dict)
    """How held-out accuracy is measured, and how often."""
    reward_weights: Sequence[float] | None = None
    """One weight per function in ``reward_funcs``; None: 1 each."""
    reward_range: Sequence[float] | None = None
    """The smallest and the largest possible reward, if known: HACPO uses the largest as a bound."""
    episodes: Section = field(default_factory=dict)
    """Options of episodes with an ``environment_factory``, as of the task ``environment``: ``max_turns``,
    ``max_turn_tokens``, ``max_seconds``, ``limits``, ``system``."""
    eval_share: float | None = None
    """Share of the training prompts to hold out if there is no ``eval_dataset``; None: none."""
    trackers: str | Sequence[str] = ()
    """Tools that also receive the metrics: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``."""
    report_to: str | Sequence[str] | None = None
    """The same as ``trackers``, with the name that transformers and TRL use; ``"none"`` means no tracker."""
    project: str = "hacrl"
    """What trackers file this run under."""
    logged_rollouts: int = 4
    """Responses per agent and step in the trackers' tables; 0: none."""
    keep_rollouts: KeepRollouts = "all"
    """Steps whose rollouts stay on disk: ``"all"``, ``"none"``, or the last so many."""
    pause_collapsed: bool = False
    """Whether an agent that has collapsed is paused; a note names it in any case."""
    checkpoint: CheckpointSettings | Section = field(default_factory=dict)
    """How often the whole state is written down, and how much of that is kept."""
    resume: bool = False
    """Continue the run in ``output`` if there is one; only some settings, such as ``steps``, may differ."""
    overwrite: bool = False
    """Replace an earlier run in the same folder; otherwise an earlier run is an error."""
    progress: bool = True
    """Show progress on the terminal."""

    def run_config(self, agents: Sequence[Section], task: Section, held_out: int | None) -> RunConfig:
        """Return the checked config of a run; ``held_out`` is the number of held-out problems, if known."""
        evaluation = plain_section(self.evaluation)
        if held_out is not None and isinstance(evaluation, dict):
            evaluation.setdefault("problems", min(DEFAULT_PROBLEMS, held_out))
        data = {
            "agents": list(agents),
            "agent_defaults": plain_section(self.agent_defaults),
            "output": str(self.output),
            **{key: getattr(self, key) for key in _SAME_KEY},
            "trackers": self._trackers(),
            "task": task,
            "method": self.method if isinstance(self.method, str) else plain_section(self.method),
            "rollout": plain_section(self.rollout),
            "learning": plain_section(self.learning),
            "asynchronous": plain_section(self.asynchronous),
            "ray": plain_section(self.ray),
            "evaluation": evaluation,
            "checkpoint": plain_section(self.checkpoint),
        }
        return build_config(data, source="HACRLConfig")

    def _trackers(self) -> list[str]:
        if self.report_to is None:
            return _listed(self.trackers)
        if self.trackers:
            raise ConfigError(
                f"report_to={self.report_to!r} and trackers={self.trackers!r} mean the same; give only one"
            )
        return [name for name in _listed(self.report_to) if name != "none"]


_init = HACRLConfig.__init__
_FIELDS = [field.name for field in dataclasses.fields(HACRLConfig)]


@functools.wraps(_init)
def _checked_init(self: HACRLConfig, *positional: Any, **given: Any) -> None:
    """Answer unknown keys, TRL's above all, before the dataclass refuses them."""
    refuse_config_keys({name: value for name, value in given.items() if name not in _FIELDS}, _FIELDS)
    if given.get("output") is None:
        raise ConfigError('HACRLConfig: output is missing: the folder of the run, e.g. output="runs/first"')
    _init(self, *positional, **given)


HACRLConfig.__init__ = _checked_init  # type: ignore[method-assign]


def with_adapters(config: HACRLConfig, peft_config: Any) -> HACRLConfig:
    """Return the config with a ``LoraConfig`` as every agent's default."""
    defaults = plain_section(config.agent_defaults)
    if "lora" in defaults:
        raise ConfigError("peft_config and HACRLConfig(agent_defaults={'lora': ...}) mean the same; give one")
    return dataclasses.replace(config, agent_defaults={**defaults, "lora": lora_section(peft_config)})


_SAME_KEY = (
    "steps",
    "seed",
    "device",
    "executor",
    "threads",
    "project",
    "logged_rollouts",
    "keep_rollouts",
    "pause_collapsed",
)


def plain_section(section: Any) -> Any:
    """Return plain data: a settings record becomes a dict of its keys that differ from their defaults."""
    if isinstance(section, Mapping):
        return {key: plain_section(value) for key, value in section.items()}
    if not dataclasses.is_dataclass(section) or isinstance(section, type):
        return section
    plain = {}
    for entry in dataclasses.fields(section):
        value = getattr(section, entry.name)
        if entry.name == "name" or value != _default(entry):
            plain[entry.name] = plain_section(value)
    return plain


def _default(entry: dataclasses.Field[Any]) -> Any:
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return entry.default


def _listed(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)
