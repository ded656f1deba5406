"""Low-rank adapters, through peft. The model without them is the policy training started from."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hacrl.agents.settings import AgentSettings
from hacrl.errors import ModelError

ADAPTER_FOLDER = "adapter"  # beside the merged weights: the adapters alone, as peft writes them


def add_adapters(model: Any, settings: AgentSettings, seed: int) -> Any:
    """The model with fresh adapters, the only weights that are trained; they start without effect.

    Adapter weights are float32 whatever the model's precision: their updates are small.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelError(
            f"agents.{settings.name}.lora needs peft: pip install 'hacrl[lora]', or leave lora out"
        ) from error
    assert settings.lora is not None
    wanted = settings.lora.targets
    config = LoraConfig(
        r=settings.lora.rank,
        lora_alpha=settings.lora.alpha,  # type: ignore[arg-type]  # peft scales by any number
        target_modules=wanted if isinstance(wanted, str) else list(wanted),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ModelError(f"agents.{settings.name}.lora.targets={wanted!r}: {error}") from error
    return adapted.eval()


def is_adapted(model: Any) -> bool:
    """Whether a model carries adapters."""
    return hasattr(model, "peft_config")


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """The model as it was before training."""
    with model.disable_adapter():
        yield


def save_merged(model: Any, folder: Path) -> None:
    """A plain Hugging Face folder with the adapters merged in, and the adapters alone beside it.

    Merged in float32 on a copy in the CPU's memory, so that training may go on with unchanged weights.
    """
    merged = copy.deepcopy(model).to("cpu")
    precision = merged.get_base_model().dtype
    plain = merged.float().merge_and_unload().to(precision)
    plain.save_pretrained(folder)
    model.save_pretrained(folder / ADAPTER_FOLDER)
