"""The policy training started from, for the KL term: a frozen copy, or the model with its adapters off."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hacrl.models.lora import adapters_off, is_adapted


class ReferencePolicy(Protocol):
    """Gives the reference model for the time of a ``with`` block, in which nothing carries gradients."""

    def policy(self) -> Any:
        """A context manager around the model."""
        ...


class FrozenCopy:
    """All weights are trained, so the old ones must be kept: as much memory again as the weights take."""

    def __init__(self, model: Any) -> None:
        self._model = copy.deepcopy(model).requires_grad_(False)

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """The copy."""
        with torch.no_grad():
            yield self._model


class AdaptersOff:
    """Only adapters are trained: without them the model is what it was. No extra memory."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """The model, its adapters switched off within the block."""
        with torch.no_grad(), adapters_off(self._model):
            yield self._model


def make_reference(model: Any) -> ReferencePolicy:
    """The cheapest way to remember what this model is now."""
    return AdaptersOff(model) if is_adapted(model) else FrozenCopy(model)
