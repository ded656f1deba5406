"""Settings of the engines that generate an agent's responses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hacrl.config.settings import Settings

EngineName = str  # transformers, vllm, an installed package's, or module:attribute
VllmMode = Literal["auto", "child", "server"]
WeightSync = Literal["auto", "ipc", "nccl", "gloo", "files"]
MOST_MEMORY = 0.3  # share of a GPU that a vLLM engine takes unless `memory` says more


@dataclass(frozen=True, kw_only=True)
class VllmSettings(Settings):
    """One agent's vLLM engine: where it runs, how much memory it takes, how it gets the agent's weights."""

    mode: VllmMode = "auto"
    """`child`: vLLM of hacrl's own environment, in a process of its own. `server`: a vLLM server that hacrl
    starts and supervises. `auto`: `server` if `python` is set, else `child`."""
    python: str | None = None
    """Interpreter of an environment that has vLLM, for mode `server`. Default: hacrl's own interpreter."""
    url: str | tuple[str, ...] | None = None
    """A server that is already running, e.g. `http://gpu7:8000`, or a list of them, one for each engine;
    hacrl starts none. Their API key is read from the environment variable `HACRL_VLLM_API_KEY`."""
    engines: int = 1
    """Engines that generate the agent's responses together, each with all weights (data parallel). Default
    with a list of URLs: one for each."""
    devices: tuple[int, ...] | None = None
    """The engines' CUDA devices by number, divided among the engines in order: with 2 engines, `[1, 2, 3, 4]`
    gives each of them two (tensor parallel). Default: the agent's device."""
    memory: float | None = None
    """Share of the GPU's memory, weights included. Default: what the run needs, at most 0.3."""
    max_sequences: int = 256
    """Responses decoded side by side, rounded up to a multiple of 16 after 4 for the weight check are
    added."""
    sleep: bool | None = None
    """Whether the engine gives its GPU memory back between generations. Default: if the learner needs it."""
    weight_sync: WeightSync = "auto"
    """How the learner's weights reach the engine. `auto`: the fastest way that both ends support."""
    max_logprob_gap: float | None = None
    """Largest mean difference between the engine's and the learner's log-probabilities, in nats per token.
    Default: 0.001 in float32, 0.15 in lower precisions."""
    timeout: float = 600.0
    """Longest time in seconds that the engine samples no token while responses are due. Then it is started
    again."""
    seeded: bool = False
    """Whether every response has its own seed: repeatable on a CPU, slower on a GPU."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Any other argument of vLLM by its name there, e.g. `kv_cache_memory_bytes` or `max_model_len`."""

    def __post_init__(self) -> None:
        if self.engines < 1:
            raise ValueError(f"engines must be at least 1, not {self.engines}")
        self._check_urls()
        if self.mode == "child" and self.python is not None:
            raise ValueError("python belongs to mode server: a child has hacrl's own interpreter")
        for key in ("memory", "max_logprob_gap", "timeout"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be positive, not {value}")
        if self.memory is not None and self.memory > 1:
            raise ValueError(f"memory is a share of the GPU's memory, so at most 1, not {self.memory}")
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, not {self.max_sequences}")
        if self.devices is not None and (not self.devices or min(self.devices) < 0):
            raise ValueError(f"devices must name CUDA devices by number, not {list(self.devices)}")
        if self.devices is not None and len(self.devices) % self.engines:
            raise ValueError(
                f"devices: {len(self.devices)} devices cannot be divided among {self.engines} engines; name "
                "as many for each"
            )
        for key, value in self.engine_args.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"engine_args.{key}: {value!r} cannot be handed to another process; use text, numbers, "
                    "lists and mappings"
                ) from None

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that are already running."""
        return () if self.url is None else (self.url,) if isinstance(self.url, str) else self.url

    def _check_urls(self) -> None:
        if self.url is None:
            return
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url must start with http:// or https://, not {url!r}")
        if not self.urls or self.engines not in (1, len(self.urls)):
            raise ValueError(
                f"url names {len(self.urls)} servers for {self.engines} engines; name one for each engine"
            )
        without_effect = [key for key in ("python", "devices") if getattr(self, key) is not None]
        if without_effect or self.mode == "child":
            what = ", ".join(without_effect) or "mode: child"
            raise ValueError(f"url names a server that is already running: {what} would have no effect")

    def each(self) -> tuple[VllmSettings, ...]:
        """Return the settings of each engine by itself."""
        if self.urls:
            return tuple(replace(self, url=url, engines=1) for url in self.urls)
        if self.devices is None:
            return (replace(self, engines=1),) * self.engines
        size = len(self.devices) // self.engines
        parts = (self.devices[start : start + size] for start in range(0, len(self.devices), size))
        return tuple(replace(self, devices=part, engines=1) for part in parts)

    @property
    def starts_server(self) -> bool:
        """Whether hacrl starts and supervises a server for this agent."""
        if self.url is not None or self.mode == "child":
            return False
        return self.mode == "server" or self.python is not None
