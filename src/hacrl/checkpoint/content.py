"""What a checkpoint holds, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CheckpointContent:
    """JSON documents and groups of tensors, both by name; a name becomes a file's."""

    documents: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(t.numel() * t.element_size() for group in self.tensors.values() for t in group.values())
