"""Gradient checkpointing with dropout off.

transformers recomputes a layer's activations only if the layer is in training mode. Training mode would also
switch on dropout, and sampler and learner would disagree. So a layer is in training mode only at the moment
when transformers decides whether to checkpoint it. It computes in evaluation mode, and so do its submodules.
The modes change only while a loss is computed: a checkpointed layer in training mode refuses the KV cache
that generation needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hacrl.models.rank_guard import recomputes_layers


@contextmanager
def checkpointed_layers(model: Any) -> Iterator[None]:
    """Within the block, let layers that have gradient checkpointing enabled use it.

    Within a pass of several ranks, ``hacrl.models.rank_guard`` recomputes the layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if recomputes_layers(model):
        yield
        return
    flagged = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [module for module in flagged if isinstance(module, GradientCheckpointingLayer)]
    with ExitStack() as undo:
        # A model with its own code may have no such layers: then it reads the mode of the flagged module.
        for module in layers or flagged:
            undo.callback(setattr, module, "training", module.training)
            module.training = True
        for layer in layers:
            undo.callback(layer.register_forward_pre_hook(_to_evaluation_mode).remove)
            undo.callback(layer.register_forward_hook(_to_training_mode, always_call=True).remove)
        yield


def _to_evaluation_mode(layer: Any, _: Any) -> None:
    """Needed by layers that call dropout with their own mode, e.g. OPT's and Falcon's."""
    layer.training = False


def _to_training_mode(layer: Any, *_: Any) -> None:
    """Runs after errors too: torch ends a recomputation with an exception once it has what it needs."""
    layer.training = True
