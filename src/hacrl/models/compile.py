"""A model's layers compiled by torch for learning: many small kernels become few.

Without it, a GPU spends about half of an update on norms, rotations and activations that wait for memory. All
layers of a kind share what is compiled, for any number of tokens; torch keeps it on disk for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch

from hacrl.models.packing import has_fused_attention

WORTH_IT = 100_000_000  # parameters; with fewer, compiling takes longer than it saves in a short run
MOST_VARIANTS = 64  # of one function, compiled: learning and decoding, for every size of model

_WANTED: ContextVar[bool] = ContextVar("compiled", default=False)
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


@contextmanager
def compiled(model: Any, wanted: bool = True) -> Iterator[None]:
    """Within the block, the model's decoder layers are compiled, and so are functions that ask to be."""
    if not wanted:
        yield
        return
    import torch._functorch.config as partition  # slow to import

    layers = decoder_layers(model)
    token = _WANTED.set(True)
    for layer in layers:  # a class's function is kept, not a layer's: that would keep the model for ever
        layer.forward = MethodType(_compiled(type(layer).forward), layer)
    try:
        # what is cheap to compute again is not kept for the backward pass, even if it has to be written there
        with partition.patch(ban_recompute_materialized_backward=False):
            yield
    finally:
        _WANTED.reset(token)
        for layer in layers:
            del layer.forward  # the class's is back


def compiled_if_wanted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled if this is within a :func:`compiled` block."""
    return _compiled(function) if _WANTED.get() else function


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For any number of tokens, and for as many models of a kind as there may be agents."""
    if function not in _FUNCTIONS:
        import torch._dynamo.config as limits  # slow to import

        limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)
        _FUNCTIONS[function] = torch.compile(function, dynamic=True)
    return _FUNCTIONS[function]


def worth_compiling(model: Any) -> bool:
    """Whether layers are compiled if nobody has said anything: it takes half a minute for a new model."""
    return has_fused_attention(model) and model.num_parameters() >= WORTH_IT


def decoder_layers(model: Any) -> list[Any]:
    """The layers that make up most of a model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_compile_error(error: BaseException) -> bool:
    """Whether it is the compiler that failed, not what it compiled."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
