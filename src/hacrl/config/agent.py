"""Settings of one agent: its model, how the model is loaded and trained, and its engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from hacrl.config.endpoint import EndpointSettings
from hacrl.config.engine import EngineName, VllmSettings
from hacrl.config.ray import PlaceSettings
from hacrl.config.settings import Settings

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LoraSettings(Settings):
    """Low-rank adapters instead of full fine-tuning. The reference policy is the model without them."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """The adapters' output is scaled by `alpha` / `rank`."""
    targets: str | tuple[str, ...] = "all-linear"
    """Names of the layers that get an adapter, or `all-linear`."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 2**16:
            raise ValueError(f"rank must be between 1 and {2**16}, not {self.rank}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be positive, not {self.alpha}")
        if not self.targets:
            raise ValueError("targets must name layers, or be 'all-linear'")


@dataclass(frozen=True, kw_only=True)
class FsdpSettings(Settings):
    """How an agent with several ranks shards its weights over them, with torch's FSDP2."""

    cpu_offload: bool = False
    """Whether weights, gradients and optimizer state are in the machine's memory, and updates are made on the
    CPU. Only the layer at work is on the GPU."""
    timeout: float = 600.0
    """Longest time in seconds that a rank waits for another one in the middle of an update, a checkpoint or
    a weight sync. Then the run ends."""

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout}")


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings(Settings):
    """Copies of an agent's model that sample while the learner trains the model itself."""

    count: int = 0
    """Copies of the model that generate the agent's responses. 0: the learner's own weights generate, so an
    agent samples and learns in turns. 1: a copy in the worker's process. More: a process for each copy."""
    devices: tuple[str, ...] | None = None
    """The copies' devices, one for each: `cuda:1`, `cpu`. Default: the agent's device for all of them."""
    timeout: float = 600.0
    """Longest time in seconds that a weight update waits for a copy, or that a copy samples no token. Then a
    copy with a process of its own is given up, and the others go on; otherwise the run ends."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count must not be negative, not {self.count} (0: no copies)")
        if self.devices is not None and len(self.devices) != self.count:
            raise ValueError(
                f"devices must name one device for each of the {self.count} copies (count), not "
                f"{len(self.devices)}"
            )
        if not self.timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout}")


@dataclass(frozen=True, kw_only=True)
class AgentSettings(Settings):
    """One agent: any causal language model with its tokenizer."""

    name: str
    """Name in metrics, folders and messages: letters, digits, `.`, `_` and `-`."""
    model: str = ""
    """`bundled:NAME`, `smollm2-135m`, a folder, or a Hugging Face id. Required unless there is an
    `endpoint`."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id. Default: its main branch."""
    frozen: bool = False
    """Whether the agent is only sampled, and the others learn from it: no optimizer, no updates, nothing
    saved. Keys of training have no effect then. An agent with an `endpoint` is always frozen."""
    endpoint: EndpointSettings | None = None
    """An OpenAI-compatible endpoint that takes the place of `model`. Default: hacrl loads the model."""
    rollouts_per_prompt: int | None = None
    """This agent's G. Default: `rollout.rollouts_per_prompt`."""
    lr: float | None = None
    """This agent's learning rate. Default: `learning.lr`."""
    device: str | None = None
    """Where this agent is trained: `cpu`, `cuda`, `cuda:1`. Default: the run's `device`."""
    ranks: int = 1
    """Processes that train this agent together, each with a share of its weights, gradients and optimizer
    (FSDP2). On GPUs every rank has its own: `cuda:1` and 2 ranks take `cuda:1` and `cuda:2`."""
    fsdp: FsdpSettings = field(default_factory=FsdpSettings)
    """How the agent is sharded; without effect for an agent with one rank."""
    place: PlaceSettings = field(default_factory=PlaceSettings)
    """Where `executor: ray` places the agent; without effect for other executors."""
    precision: Precision = "auto"
    """Precision of the weights. `auto`: float32 on a CPU; on a GPU, the precision the model is stored in.
    Weights of lower precision are trained through float32 master weights."""
    lora: LoraSettings | None = None
    """Train low-rank adapters. Default: train all weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more compute in learning."""
    attention: str | None = None
    """transformers' `attn_implementation`: `sdpa`, `eager`, `flash_attention_2`, ... Default: transformers'
    choice."""
    chat_template: bool = True
    """Whether prompts go through the tokenizer's chat template, if the tokenizer has one."""
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, e.g. `{enable_thinking: false}`."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run."""
    engine: EngineName | None = None
    """What generates this agent's responses. Default: `rollout.engine`."""
    replicas: ReplicaSettings = field(default_factory=ReplicaSettings)
    """Copies of the model that generate this agent's responses, beside learning or on other devices; without
    effect for other engines than `transformers`."""
    vllm: VllmSettings = field(default_factory=VllmSettings)
    """This agent's vLLM engine; without effect for other engines."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"name {self.name!r} becomes a folder name: use letters, digits, '.', '_' and '-' only"
            )
        self._check_source()
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, not {self.ranks}")
        if self.rollouts_per_prompt is not None and self.rollouts_per_prompt < 1:
            raise ValueError(f"rollouts_per_prompt must be at least 1, not {self.rollouts_per_prompt}")
        if self.lr is not None and self.lr <= 0:
            raise ValueError(f"lr must be positive, not {self.lr}")

    def _check_source(self) -> None:
        """Check that there is a model or an endpoint. An agent with an endpoint is frozen."""
        if self.endpoint is None and not self.model:
            raise ValueError("model is missing: name a model, or give an endpoint")
        if self.endpoint is not None and self.model:
            raise ValueError(f"model={self.model!r} and endpoint exclude each other; leave one of them out")
        if not self.frozen and self.endpoint is None:
            return
        if self.ranks > 1:
            raise ValueError(
                f"ranks={self.ranks} share the work of training, and a frozen agent does not train; leave "
                "ranks out, and give a large model an engine on several GPUs (engine: vllm)"
            )
        for key, value in (("frozen", True), ("lora", None), ("gradient_checkpointing", False)):
            object.__setattr__(self, key, value)
