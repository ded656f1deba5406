"""A model's layers compiled by torch for learning: many small kernels become few.

Without it, a GPU spends about half of an update on norms, rotations and activations that wait for memory. All
layers of a kind share what is compiled, for any number of tokens; torch keeps it on disk for the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hacrl.agents.ragged import packs, ragged
from hacrl.types import Sampling

_WANTED: ContextVar[bool] = ContextVar("compiled", default=False)
_FORWARDS: WeakKeyDictionary[Any, Callable[..., Any]] = WeakKeyDictionary()
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


@contextmanager
def compiled(model: Any, wanted: bool = True) -> Iterator[None]:
    """Within the block, the model's decoder layers are compiled, and so are functions that ask to be."""
    if not wanted:
        yield
        return
    layers = decoder_layers(model)
    token = _WANTED.set(True)
    for layer in layers:
        if layer not in _FORWARDS:
            _FORWARDS[layer] = torch.compile(layer.forward, dynamic=True)
        layer.forward = _FORWARDS[layer]
    try:
        yield
    finally:
        _WANTED.reset(token)
        for layer in layers:
            del layer.forward  # the class's is back


def compiled_if_wanted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled if this is within a :func:`compiled` block."""
    if not _WANTED.get():
        return function
    if function not in _FUNCTIONS:
        _FUNCTIONS[function] = torch.compile(function, dynamic=True)
    return _FUNCTIONS[function]


def decoder_layers(model: Any) -> list[Any]:
    """The layers that make up most of a model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def why_not_compiled(model: Any) -> str | None:
    """What is in the way of compiling this model's layers, found out by trying; None if nothing is.

    A compiler needs a C compiler and Triton, and it does not understand all that models are written in.
    """
    if not decoder_layers(model):
        return f"{type(model).__name__} does not say which its layers are"
    probe = torch.arange(1, 9, device=model.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with compiled(model), ragged(model, packs(model)):
            from hacrl.agents.logprobs import response_logprobs

            pairs = [(probe[:3].tolist(), probe.tolist()), (probe[:2].tolist(), probe[:5].tolist())]
            logprobs, _ = response_logprobs(model, pairs, Sampling(8), model.device)
            torch.autograd.grad(logprobs.sum(), trained, allow_unused=True)
    except Exception as error:  # whatever it is, learning can do without
        return (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            if str(error)
            else repr(error)
        )
    return None
