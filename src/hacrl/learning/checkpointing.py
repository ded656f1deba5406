"""Gradient checkpointing with dropout off.

transformers recomputes a layer's activations only while the layer is in training mode, which would also
switch dropout on inside it: sampler and learner would then disagree. So only the layer itself is put
into training mode, not what is inside it, and only while a loss is computed: in training mode a
checkpointed layer refuses the cache that generation needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def checkpointed_layers(model: Any) -> Iterator[None]:
    """Within the block, layers that have gradient checkpointing enabled use it."""
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training
