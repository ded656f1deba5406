"""AdamW for one rank of a sharded agent: the same code as in one process, over this rank's float32 shards.

FSDP2 sums each pass's gradients over ranks and adds them to the shard's gradient. AdamW works number by
number, so updating shards gives what updating whole tensors would.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hacrl.models.sharding import local_rows, sharding_of, whole_tensor
from hacrl.training.gradients import evenly_spaced_numbers
from hacrl.training.optimizer import MasterWeightAdamW
from hacrl.training.tensor_files import TensorStream, in_file_order

_STEP = ".step"  # end of the names of AdamW's step counts, the only tensors that are not sharded


class ShardedAdamW(MasterWeightAdamW):
    """AdamW over the shards of a model's trained weights."""

    def __init__(
        self,
        model: Any,
        parameters: Sequence[Any],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        sharding = sharding_of(model)
        assert sharding is not None
        self._group, self._device = sharding.group, sharding.device
        self._model = model
        self._sharded = list(parameters)  # DTensors: FSDP2 writes their gradients
        with torch.no_grad():  # tensors that share the shards' memory
            shards = [nn.Parameter(parameter.to_local()) for parameter in parameters]
        super().__init__(shards, lr, betas, weight_decay)

    def zero_gradients(self) -> None:
        """Begin an update without gradients; they appear in the first backward pass."""
        self._sums.free()
        for parameter in self._sharded:
            parameter.grad = None

    def summed_gradients(self) -> list[Tensor | None]:
        """Return the gradients of this rank's shards; FSDP2 has averaged them over ranks."""
        return [None if parameter.grad is None else parameter.grad.to_local() for parameter in self._sharded]

    @torch.no_grad()
    def sampled_gradients(self, most: int) -> Tensor:
        """Return up to ``most`` evenly spaced numbers of this rank's gradients, averaged over ranks."""
        gradients = [
            torch.zeros_like(weight.parameter) if parameter.grad is None else parameter.grad.to_local()
            for parameter, weight in zip(self._sharded, self._weights, strict=True)
        ]
        return evenly_spaced_numbers(gradients, most)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients down to ``max_norm``; return their norm over all ranks before.

        FSDP2 has averaged them over ranks. They are multiplied by the number of ranks, because the ranks'
        losses are parts of a sum.
        """
        for parameter, weight in zip(self._sharded, self._weights, strict=True):
            gradient = None if parameter.grad is None else parameter.grad.to_local()
            weight.parameter.grad = torch.zeros_like(weight.parameter) if gradient is None else gradient
        own = float(self._sums.norm())
        norms = [struct.unpack("d", data)[0] for data in self._group.gather(struct.pack("d", own))]
        world = self._group.world
        norm = torch.tensor(world * math.sqrt(math.fsum(value * value for value in norms)))
        factor = world * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._sums.scale(factor.to(self._weights[0].gradient.device))
        return float(norm)

    def end_update(self) -> None:
        """Drop references to the gradients: between updates, other code may use them."""

    def tensors(self) -> dict[str, Tensor]:
        """Return whole masters and moments on rank 0, in the machine's memory, and none on other ranks.

        The names and tensors are those of an agent in one process, so that either can load the other's.
        """
        stream = self.tensor_stream()
        if self._group.rank == 0:
            copied = (value.to("cpu", copy=True) for value in stream.values())
            return dict(zip(stream.shapes, copied, strict=True))
        for _ in stream.values():
            pass
        return {}

    def tensor_stream(self) -> TensorStream:
        """Return whole masters and moments, gathered one by one. All ranks read the stream to its end."""
        shards = super().tensors()
        shapes = {name: torch.empty_like(value, device="meta") for name, value in shards.items()}
        for name, value in shards.items():
            if not name.endswith(_STEP):
                whole = self._sharded[int(name.partition(".")[0])].shape
                shapes[name] = torch.empty(whole, dtype=value.dtype, device="meta")
        order = in_file_order(shapes)

        def gathered(name: str) -> Tensor:
            if name.endswith(_STEP):
                return shards[name]
            return whole_tensor(self._model, shards[name], shapes[name].shape)

        def values() -> Iterator[Tensor]:
            self._group.announce("optimizer_tensors")
            waiting = iter(order)
            try:
                for name in waiting:
                    yield gathered(name)
            finally:
                for name in waiting:  # the reader has stopped; the other ranks go on to the end
                    gathered(name)

        return TensorStream({name: shapes[name] for name in order}, values)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`tensors` returned on rank 0; other ranks receive their shards from it."""
        self._group.announce("load_optimizer_tensors")
        listed = {name: [list(value.shape), _dtype_name(value)] for name, value in tensors.items()}
        wanted = json.loads(self._group.gather(json.dumps(listed).encode())[0])
        shards = {}
        for name, (shape, dtype) in wanted.items():
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            if self._group.rank == 0:
                whole.copy_(tensors[name])
            self._group.broadcast(whole)
            shards[name] = whole if name.endswith(_STEP) else local_rows(self._model, whole).clone()
        super().load_tensors(shards)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
