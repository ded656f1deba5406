"""Settings of ``executor: ray``: which cluster, where agents are placed, and what happens to lost ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hacrl.config.settings import Settings

OnLoss = Literal["rebuild", "drop", "stop"]


@dataclass(frozen=True, kw_only=True)
class PlaceSettings(Settings):
    """What each process of an agent asks of the Ray cluster. An agent has a process for every rank and every
    replica."""

    gpus: float | None = None
    """GPUs of each process: 1, or a share of one, e.g. 0.5. Default: 1 where the agent is trained on a GPU,
    else 0."""
    engine_gpus: int = 0
    """Further GPUs on the machine of the agent's first process, for engines apart from the learner. In
    `vllm.devices`, 0 is the learner's GPU and these are 1, 2, ..."""
    cpus: float = 1.0
    """CPU cores of each process, as Ray counts them."""
    accelerator: str | None = None
    """Type of GPU, as Ray names it, e.g. `H100`. Default: any."""
    host: str | None = None
    """Host name or address of the machine. Default: any with enough room."""
    resources: dict[str, float] = field(default_factory=dict)
    """Further resources that the machine must offer, as `ray start --resources` names them."""
    share: str | None = None
    """A name. Agents with the same name live in one process and take turns on its GPU, as with
    `executor: local`. Default: a process of its own."""

    def __post_init__(self) -> None:
        if self.engine_gpus and self.gpus not in (None, 1):
            raise ValueError(f"engine_gpus={self.engine_gpus} needs gpus=1, not {self.gpus}")
        for key in ("gpus", "engine_gpus", "cpus"):
            value = getattr(self, key)
            if value is not None and not value >= 0:
                raise ValueError(f"{key} must not be negative, not {value}")
        if self.gpus is not None and self.gpus > 1:
            raise ValueError(
                f"gpus is per process and a process computes on one GPU, so at most 1, not {self.gpus}; "
                "set the agent's ranks to divide it among several GPUs"
            )
        for name, amount in self.resources.items():
            if not amount > 0:
                raise ValueError(f"resources.{name} must be positive, not {amount}")


@dataclass(frozen=True, kw_only=True)
class RaySettings(Settings):
    """The Ray cluster of `executor: ray`; without effect for other executors."""

    address: str | None = None
    """A running cluster: `auto` for the one on this machine, or the head's `host:port`. Default: hacrl starts
    one on this machine and ends it with the run."""
    placement_timeout: float = 120.0
    """Seconds that a run waits for room on the cluster. Then it ends and says what it asked for and what is
    free. If longer than 300, also the time that a placed process may take to start."""
    patience: float = 3600.0
    """Seconds without any progress of an agent (no response, no finished phase) after which it counts as
    lost."""
    on_loss: OnLoss = "rebuild"
    """What happens when an agent's process or machine is lost. `rebuild`: the agent is placed again, takes
    its last checkpoint, and learns the steps since then again from the rollout log. `drop`: the others go on
    without it. `stop`: the run ends; `hacrl resume` goes on."""
    max_rebuilds: int = 10
    """How often each agent may be rebuilt in one run. One more loss ends the run."""

    def __post_init__(self) -> None:
        for key in ("placement_timeout", "patience"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} must be a positive number of seconds, not {getattr(self, key)}")
        if self.max_rebuilds < 0:
            raise ValueError(f"max_rebuilds must not be negative, not {self.max_rebuilds}")
