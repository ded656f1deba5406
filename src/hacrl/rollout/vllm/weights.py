"""An agent's weights as vLLM reads them: Hugging Face names, every tensor once, adapters merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hacrl.agents.lora import is_adapted

_PEFT_PREFIX = "base_model.model."


@torch.no_grad()
def exported_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each weight; tied ones come once, under the name of the embeddings."""
    if not is_adapted(model):
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
        return
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, last = name.rpartition(".")
        weight = parameter.detach()
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            if last == "weight":
                weight = _merged(modules[owner], weight)
        yield f"{owner.removeprefix(_PEFT_PREFIX)}.{last}", weight


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """W + scale * B A, summed in float32: the adapters are, and their share may be below W's precision."""
    merged = weight.float()
    for adapter in layer.active_adapters:
        merged = merged + layer.get_delta_weight(adapter).float()
    return merged.to(weight.dtype)
