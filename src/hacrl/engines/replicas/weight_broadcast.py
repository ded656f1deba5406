"""Broadcast weights from the learner to replicas, bucket by bucket.

A message announces the names in a bucket over the connection of each replica; then all meet in a broadcast.
The group of processes is apart from torch's default one: it is made anew when a replica was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from hacrl.models.sharding import weight_groups

BUCKET_BYTES = 2**26  # small tensors are sent together; each message costs some 0.1 ms
Transport = Literal["gloo", "nccl"]
Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class GroupSettings:
    """Where a group of processes meets, and which of them this one is. The learner is rank 0."""

    number: int  # of the group, from 1
    transport: Transport
    rank: int
    size: int
    timeout: float


class WeightGroup:
    """The learner and its replicas, connected for broadcasts. Making one waits for all of them.

    ``store``: shared by all processes. ``address``: where others reach this process.
    """

    def __init__(self, settings: GroupSettings, store: Any, address: str, device: torch.device) -> None:
        # Where broadcast tensors are.
        self.device = device if settings.transport == "nccl" else torch.device("cpu")
        prefixed = dist.PrefixStore(f"hacrl/weights/{settings.number}", store)  # type: ignore[attr-defined, unused-ignore]
        timeout = timedelta(seconds=settings.timeout)
        self._group: Any
        if settings.transport == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = timeout
            self._group = gloo(prefixed, settings.rank, settings.size, options)
        else:
            chosen = dist.ProcessGroupNCCL.Options()
            chosen._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, settings.rank, settings.size, chosen)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor with the learner's; raise RuntimeError if a process is gone or silent."""
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def transport_between(learner: torch.device, replicas: Sequence[torch.device]) -> Transport:
    """Return NCCL if every process has a GPU for itself, else gloo, through the machine's memory."""
    devices = [learner, *replicas]
    on_gpus = all(device.type == "cuda" for device in devices)
    return "nccl" if on_gpus and len(set(map(str, devices))) == len(devices) else "gloo"


def sent_weights(model: Any, everything: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained weights, or all weights and buffers, under their names in the model.

    A sharded model gathers layer by layer, so a tensor is valid until the next one.
    """
    for group in weight_groups(model):
        for name, weight in group:
            if everything or weight.requires_grad:
                yield name, weight.detach()
    if everything:
        yield from model.named_buffers()


def send_weights(weights: Weights, announce: Callable[[dict[str, Any]], None], group: WeightGroup) -> int:
    """Broadcast weights; return how many bytes. ``announce`` sends a bucket's message to all replicas."""
    sent = 0
    for names, flat in buckets(weights, group.device):
        announce({"do": "bucket", "names": names, "dtype": str(flat.dtype).removeprefix("torch.")})
        group.broadcast(flat)
        sent += flat.nbytes
    return sent


def buckets(
    weights: Weights, device: torch.device, most: int = BUCKET_BYTES
) -> Iterator[tuple[list[str], Tensor]]:
    """Yield names and their tensors as one flat tensor; neighbours of one dtype share a bucket."""
    names: list[str] = []
    parts: list[Tensor] = []

    def full() -> tuple[list[str], Tensor]:
        bucket = list(names), torch.cat(parts)
        names.clear()
        parts.clear()
        return bucket

    for name, weight in weights:
        size = sum(part.nbytes for part in parts)
        if parts and (parts[0].dtype != weight.dtype or size + weight.nbytes > most):
            yield full()
        names.append(name)
        # a copy, because a gathered weight is freed when the next one is gathered
        parts.append(weight.reshape(-1).to(device, copy=True))
    if parts:
        yield full()


def receive_bucket(
    message: Mapping[str, Any], targets: Mapping[str, Tensor], group: WeightGroup
) -> Collection[str]:
    """Take part in the broadcast of an announced bucket, copy it into the targets, and return its names."""
    names, dtype = message["names"], getattr(torch, message["dtype"])
    sizes = [targets[name].numel() for name in names]
    flat = torch.empty(sum(sizes), dtype=dtype, device=group.device)
    group.broadcast(flat)
    with torch.no_grad():
        for name, part in zip(names, torch.split(flat, sizes), strict=True):
            targets[name].copy_(part.view(targets[name].shape))
    return list(names)
