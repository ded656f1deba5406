"""The policy that training started from, for the KL term: a frozen copy, or the model without adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hacrl.models.lora import adapters_off, is_adapted
from hacrl.models.sharding import frozen_copy, sharding_of


class ReferencePolicy(Protocol):
    """Lends the reference model to a ``with`` block, in which no gradients are recorded."""

    def policy(self) -> Any:
        """Return a context manager that yields the model."""
        ...


class FrozenCopy:
    """A copy of the model, if all its weights are trained. It takes as much memory as they do."""

    def __init__(self, model: Any) -> None:
        self._model = (
            copy.deepcopy(model).requires_grad_(False) if sharding_of(model) is None else frozen_copy(model)
        )

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """Yield the copy."""
        with torch.no_grad():
            yield self._model


class AdaptersOff:
    """The trained model without its adapters, if only adapters are trained. It takes no extra memory."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """Yield the model with its adapters disabled."""
        with torch.no_grad(), adapters_off(self._model):
            yield self._model


def make_reference(model: Any) -> ReferencePolicy:
    """Return a reference policy equal to the model as it is now."""
    return AdaptersOff(model) if is_adapted(model) else FrozenCopy(model)
