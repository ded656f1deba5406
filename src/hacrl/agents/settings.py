"""What a user says about one agent."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from hacrl.agents.engine_settings import EngineName, VllmSettings

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters instead of full fine-tuning. The reference policy is the model without them."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    rank: int = 16
    alpha: float = 32.0  # the adapters' output is scaled by alpha / rank
    targets: str | tuple[str, ...] = "all-linear"  # names of the layers that get one

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 2**16:
            raise ValueError(f"rank must be between 1 and {2**16}, not {self.rank}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be positive, not {self.alpha}")
        if not self.targets:
            raise ValueError("targets must name layers, or be 'all-linear'")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """One agent: any causal language model with its tokenizer. ``None`` takes the run's general setting."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    name: str
    model: str  # "bundled:NAME", "smollm2-135m", a folder, or a Hugging Face id
    revision: str | None = None  # branch, tag or commit of a Hugging Face id
    rollouts_per_prompt: int | None = None
    lr: float | None = None
    device: str | None = None
    # weights: "auto" is float32 on a CPU, on a GPU what the model is stored in. Lower precisions are trained
    # through float32 master weights.
    precision: Precision = "auto"
    lora: LoraSettings | None = None  # None: all weights are trained
    gradient_checkpointing: bool = False  # less memory for a third more compute in learning
    attention: str | None = None  # transformers' attn_implementation: sdpa, eager, flash_attention_2, ...
    chat_template: bool = True  # use the tokenizer's chat template if it has one
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}
    trust_remote_code: bool = False
    engine: EngineName | None = None  # what generates its responses
    vllm: VllmSettings = field(default_factory=VllmSettings)  # its engine, if that is vLLM

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"name {self.name!r} becomes a folder name: use letters, digits, '.', '_' and '-' only"
            )
        if self.rollouts_per_prompt is not None and self.rollouts_per_prompt < 1:
            raise ValueError(f"rollouts_per_prompt must be at least 1, not {self.rollouts_per_prompt}")
        if self.lr is not None and self.lr <= 0:
            raise ValueError(f"lr must be positive, not {self.lr}")
