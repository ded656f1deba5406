"""Gradient checkpointing with dropout off.

transformers recomputes a layer's activations only while the layer is in training mode, which would also
switch on dropout: sampler and learner would then disagree. So a layer is in training mode only when it
is asked whether to checkpoint, never while it computes, and what is inside it never is. All this holds
only while a loss is computed: in training mode a checkpointed layer refuses the cache that generation
needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def checkpointed_layers(model: Any) -> Iterator[None]:
    """Within the block, layers that have gradient checkpointing enabled use it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    flagged = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [module for module in flagged if isinstance(module, GradientCheckpointingLayer)]
    with ExitStack() as undo:
        # a model's own code may know no such layers: then it asks the module that holds them
        for module in layers or flagged:
            undo.callback(setattr, module, "training", module.training)
            module.training = True
        for layer in layers:
            undo.callback(layer.register_forward_pre_hook(_compute_in_evaluation_mode).remove)
            undo.callback(layer.register_forward_hook(_ask_in_training_mode, always_call=True).remove)
        yield


def _compute_in_evaluation_mode(layer: Any, _: Any) -> None:
    """Some layers call dropout as a function of their own mode, e.g. OPT's and Falcon's."""
    layer.training = False


def _ask_in_training_mode(layer: Any, *_: Any) -> None:
    """Called after errors too: torch breaks off a recomputation by one as soon as it has what it needs."""
    layer.training = True
