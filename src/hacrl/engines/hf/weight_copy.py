"""A second model with a policy's weights, on a device of choice."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hacrl.models.sharding import copy_weights, sharding_of, weight_groups, whole_model


@torch.no_grad()
def copied_model(model: Any, device: torch.device) -> Any:
    """Return an ordinary model with the weights of ``model``, on a device and without gradients."""
    if sharding_of(model) is not None:
        whole = whole_model(model, device).requires_grad_(False)
        copy_weights(model, whole)
        return whole
    # moved one by one: deepcopy would first make a second copy on the model's own device
    moved = {id(tensor): _moved(tensor, device) for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, moved)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    value = tensor.detach().to(device, copy=True)
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value


@torch.no_grad()
def copy_changed_weights(model: Any, target: Any) -> None:
    """Copy all weights that are trained into a model that :func:`copied_model` made."""
    targets = dict(target.named_parameters())
    for group in weight_groups(model):
        for name, weight in group:
            if weight.requires_grad:
                targets[name].copy_(weight)
