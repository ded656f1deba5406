"""Finish a pass in which memory has run out on one rank, so that all ranks meet in the same collectives.

The other ranks of a sharded agent wait in a layer's collective for a rank that has left the pass. So a rank
whose memory runs out within a layer or the output layer goes on with worthless numbers and notes it. After
the pass the ranks agree to repeat the update with less memory.

FSDP2 gathers a layer before this code runs and shards it after it, in both passes: no collective is inside.
With gradient checkpointing a layer is computed again in the backward pass, within the same guard. So is the
output layer, always: that is where most memory is needed. Without gradient checkpointing, memory that runs
out in a layer's backward pass ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hacrl.errors import ModelError
from hacrl.models.compile import decoder_layers
from hacrl.models.device import free_failed_attempt, is_out_of_memory


class PassGuard:
    """Whether memory has run out in the pass under way."""

    def __init__(self) -> None:
        self.has_failed = False

    def attempt(self, compute: Callable[[], Tensor], device: torch.device) -> Tensor | None:
        """Return what ``compute`` returns; None if memory runs out, or has run out in this pass."""
        if self.has_failed:
            return None
        try:
            return compute()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.has_failed = True
            free_failed_attempt(error, device)
            return None


_GUARD: ContextVar[PassGuard | None] = ContextVar("rank_guard", default=None)


def guard_layers(model: Any) -> None:
    """Let the model's decoder layers obey :func:`guarded_pass`."""
    for layer in decoder_layers(model):
        layer.forward = partial(_guarded_layer, layer, layer.forward)


@contextmanager
def guarded_pass() -> Iterator[PassGuard]:
    """Within the block, which is one pass forward and backward, go on if memory runs out in a layer."""
    guard = PassGuard()
    token = _GUARD.set(guard)
    try:
        yield guard
    finally:
        _GUARD.reset(token)


def recomputes_layers(model: Any) -> bool:
    """Return whether a guarded pass is under way, which recomputes the model's layers itself."""
    return _GUARD.get() is not None and bool(decoder_layers(model))


def guarded_head(head: Any, hidden_N: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what ``compute`` makes of hidden states with the output layer: a float32 number for each."""
    guard = _GUARD.get()
    if guard is None:
        return compute(hidden_N)
    substitute = partial(torch.zeros, len(hidden_N), device=hidden_N.device)
    if not torch.is_grad_enabled():
        found = guard.attempt(partial(compute, hidden_N), hidden_N.device)
        return substitute() if found is None else found
    parameters = list(head.parameters()) if isinstance(head, nn.Module) else []
    return _recomputed(guard, compute, hidden_N, substitute, parameters)


def _guarded_layer(layer: Any, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Compute a decoder layer; its input is its output if memory runs out."""
    guard = _GUARD.get()
    if (
        guard is None
        or not arguments
        or not isinstance(arguments[0], Tensor)
        or _carry_gradients(arguments[1:], keywords)
    ):
        return forward(*arguments, **keywords)
    hidden, rest = arguments[0], arguments[1:]

    def compute(value: Tensor) -> Tensor:
        return _same_shape(forward(value, *rest, **keywords), value)

    if torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False):
        return _recomputed(guard, compute, hidden, hidden.clone, list(layer.parameters()))
    found = guard.attempt(partial(compute, hidden), hidden.device)
    if found is not None:
        return found
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    nothing = sum((parameter.sum() * 0 for parameter in trained), hidden.new_zeros(()))
    return hidden + nothing.to(hidden.dtype)  # FSDP2 sums gradients of the same weights on all ranks


def _same_shape(output: Any, hidden: Tensor) -> Tensor:
    """Return the output of a layer, which must be one tensor like its input."""
    if isinstance(output, Tensor) and output.shape == hidden.shape:
        return output
    raise ModelError(
        "layers of this model return more than hidden states, which an agent with several ranks cannot "
        "compute: leave agents.NAME.ranks out"
    )


def _carry_gradients(arguments: Sequence[Any], keywords: dict[str, Any]) -> bool:
    values = (*arguments, *keywords.values())
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _recomputed(
    guard: PassGuard,
    compute: Callable[[Tensor], Tensor],
    hidden: Tensor,
    substitute: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
) -> Tensor:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    anchor = torch.zeros((), device=hidden.device, requires_grad=True)  # hidden states may carry no gradients
    found: Tensor = _Recomputed.apply(hidden, anchor, guard, compute, substitute, trained)  # type: ignore[no-untyped-call]
    return found


class _Recomputed(torch.autograd.Function):
    """A function of hidden states that is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        anchor: Tensor,
        guard: PassGuard,
        compute: Callable[[Tensor], Tensor],
        substitute: Callable[[], Tensor],
        trained: Sequence[nn.Parameter],
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.guard, ctx.compute, ctx.trained = guard, compute, trained
        found = guard.attempt(partial(compute, hidden), hidden.device)
        return substitute() if found is None else found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        needs_input = ctx.needs_input_grad[0]
        copy = hidden.detach().requires_grad_(needs_input)

        def again() -> Tensor:
            with torch.enable_grad():
                found = ctx.compute(copy)
            if found.requires_grad:
                torch.autograd.backward(found, gradient)
            return gradient

        ctx.guard.attempt(again, hidden.device)
        if ctx.guard.has_failed:
            for parameter in ctx.trained:  # FSDP2 sums gradients of the same weights on all ranks
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        input_gradient = copy.grad if copy.grad is not None else torch.zeros_like(hidden)
        return (input_gradient if needs_input else None, *[None] * 5)
