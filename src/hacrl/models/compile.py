"""Compile a model's decoder layers with torch.compile, so that many small kernels are fused into few.

Without compilation, a GPU spends about half of an update on memory-bound kernels: norms, rotary embeddings
and activations. Layers of the same class share compiled code, for any number of tokens. torch caches the code
on disk for later runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch

from hacrl.models.attention.packed import keep_caches_out_of_compiled_code
from hacrl.models.packing_support import has_fused_attention

# Models with fewer parameters are not compiled by default: in a short run, compiling takes longer than it
# saves.
MIN_PARAMETERS_TO_COMPILE = 100_000_000
MAX_VARIANTS = 64  # of one compiled function: learning and decoding, for every size of model

_ENABLED: ContextVar[bool] = ContextVar("compiled", default=False)
_COMPILED_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


@contextmanager
def compiled(model: Any, enabled: bool = True) -> Iterator[None]:
    """Compile the model's decoder layers within the block, and enable :func:`compiled_if_enabled`."""
    if not enabled:
        yield
        return
    import torch._functorch.config as partition  # slow to import

    layers = decoder_layers(model)
    token = _ENABLED.set(True)
    for layer in layers:  # compile the class's function: a layer's method would keep the model alive
        layer.forward = MethodType(_compiled(type(layer).forward), layer)
    try:
        # recompute cheap tensors in the backward pass, even if they have to be materialised there
        with partition.patch(ban_recompute_materialized_backward=False):
            yield
    finally:
        _ENABLED.reset(token)
        for layer in layers:
            del layer.forward  # the class's function takes effect again


def compiled_if_enabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function within a :func:`compiled` block, else the function itself."""
    return _compiled(function) if _ENABLED.get() else function


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for any number of tokens; compile it once per process."""
    if function not in _COMPILED_FUNCTIONS:
        import torch._dynamo.config as limits  # slow to import

        keep_caches_out_of_compiled_code()
        limits.recompile_limit = max(limits.recompile_limit, MAX_VARIANTS)
        _COMPILED_FUNCTIONS[function] = torch.compile(function, dynamic=True)
    return _COMPILED_FUNCTIONS[function]


def compiles_by_default(model: Any) -> bool:
    """Return whether layers are compiled if the setting is not given: compiling takes half a minute."""
    return has_fused_attention(model) and model.num_parameters() >= MIN_PARAMETERS_TO_COMPILE


def decoder_layers(model: Any) -> list[Any]:
    """Return the model's decoder layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def is_compile_error(error: BaseException) -> bool:
    """Return whether the error came from the compiler, not from the compiled code."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
