"""Settings of the engines that generate an agent's responses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
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
    url: str | None = None
    """A server that is already running, e.g. `http://gpu7:8000`; hacrl starts none. Its API key is read from
    the environment variable `HACRL_VLLM_API_KEY`."""
    devices: tuple[int, ...] | None = None
    """The engine's CUDA devices by number. Default: the agent's device."""
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
    seeded: bool = False
    """Whether every response has its own seed: repeatable on a CPU, slower on a GPU."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Any other argument of vLLM by its name there, e.g. `kv_cache_memory_bytes` or `max_model_len`."""

    def __post_init__(self) -> None:
        if self.url is not None:
            self._check_url(self.url)
        if self.mode == "child" and self.python is not None:
            raise ValueError("python belongs to mode server: a child has hacrl's own interpreter")
        for key in ("memory", "max_logprob_gap"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be positive, not {value}")
        if self.memory is not None and self.memory > 1:
            raise ValueError(f"memory is a share of the GPU's memory, so at most 1, not {self.memory}")
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, not {self.max_sequences}")
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

    def _check_url(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, not {url!r}")
        without_effect = [key for key in ("python", "devices") if getattr(self, key) is not None]
        if without_effect or self.mode == "child":
            what = ", ".join(without_effect) or "mode: child"
            raise ValueError(f"url names a server that is already running: {what} would have no effect")

    @property
    def starts_server(self) -> bool:
        """Whether hacrl starts and supervises a server for this agent."""
        if self.url is not None or self.mode == "child":
            return False
        return self.mode == "server" or self.python is not None
