"""What a user says about how one agent's responses are generated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

EngineName = Literal["transformers", "vllm"]
VllmMode = Literal["auto", "child", "server"]
WeightSync = Literal["auto", "ipc", "nccl", "gloo", "files"]
MOST_MEMORY = 0.3  # share of a GPU that an engine takes unless it is told to take more


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """One agent's vLLM engine: where it runs, what it may use, and how it gets the agent's weights."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    # "child": vLLM is installed beside hacrl, and runs in a process of its own; "server": hacrl starts vLLM's
    # server and looks after it. "auto": a server if `python` names an environment for it, else a child.
    mode: VllmMode = "auto"
    python: str | None = None  # interpreter of an environment that has vLLM; None: the one hacrl runs in
    url: str | None = None  # a server that is already running, e.g. http://gpu7:8000; hacrl starts none
    api_key_variable: str = "HACRL_VLLM_API_KEY"  # environment variable with the key of the server at `url`
    port: int | None = None  # of a server that hacrl starts, on 127.0.0.1; None: a free one
    devices: tuple[int, ...] | None = None  # the engine's CUDA devices; None: the agent's own
    memory: float | None = None  # share of the GPU, weights included; None: what it needs, up to 0.3
    kv_cache_gib: float | None = None  # fixed size of the key-value cache instead of a share; on a CPU 1
    max_sequences: int = 256  # responses decoded side by side, or up to 19 more: what a CUDA graph holds
    max_length: int | None = None  # prompt and response in tokens; None: what the task's prompts need
    sleep: bool | None = None  # give memory back between rollouts; None: if the learner needs it
    weight_sync: WeightSync = "auto"  # how weights travel; "auto": the best way the two ends have
    max_logprob_gap: float | None = None  # most nats per token between engine and learner
    seeded: bool = False  # a seed for every response: repeatable, but slower sampling on a GPU
    start_timeout: float = 900.0  # seconds until an engine must be ready
    restarts: int = 3  # how often an engine that died is started again, in one generation
    engine_args: dict[str, Any] = field(default_factory=dict)  # anything else vLLM takes, by its name there

    def __post_init__(self) -> None:
        if self.url is not None:
            self._check_url()
        if self.mode == "child" and self.python is not None:
            raise ValueError("python belongs to mode server: a child has hacrl's own interpreter")
        for key in ("memory", "kv_cache_gib", "max_logprob_gap", "start_timeout"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be positive, not {value}")
        if self.memory is not None and self.memory > 1:
            raise ValueError(f"memory is a share of the GPU's memory, so at most 1, not {self.memory}")
        for key, least in (("max_sequences", 1), ("max_length", 2), ("restarts", 0)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"{key} must be at least {least}, not {value}")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ValueError(f"port must be between 1 and 65535, not {self.port}")
        if self.devices is not None and (not self.devices or min(self.devices) < 0):
            raise ValueError(f"devices must name CUDA devices by number, not {list(self.devices)}")
        for key, value in self.engine_args.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"engine_args.{key}: {value!r} cannot be handed to another process; use text, numbers, "
                    "lists and mappings"
                ) from None

    def _check_url(self) -> None:
        assert self.url is not None
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, not {self.url!r}")
        started = [key for key in ("python", "port", "devices") if getattr(self, key) is not None]
        if started or self.mode == "child":
            what = ", ".join(started) or "mode: child"
            raise ValueError(f"url names a server that is already running: {what} would have no effect")

    @property
    def starts_server(self) -> bool:
        """Whether hacrl starts and supervises a server for this agent."""
        if self.url is not None or self.mode == "child":
            return False
        return self.mode == "server" or self.python is not None
