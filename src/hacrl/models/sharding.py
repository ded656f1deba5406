"""Shard a model over ranks with FSDP2: a rank holds a share of each weight, and gathers a layer at a time.

Trained weights are float32 shards, which AdamW updates in place: they are the master weights. A layer is
gathered in the precision in which the model computes, and gradients are summed over ranks in float32. Frozen
weights below adapters keep their own precision, and adapters compute in float32, as in one process.

Weights are never whole in one place but for the layer that is gathered, or while rank 0 loads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hacrl.models.compile import decoder_layers
from hacrl.models.device import current_device
from hacrl.models.lm_head import separate_head, without_adapters
from hacrl.models.lora import is_adapted
from hacrl.models.packing_support import supports_packing
from hacrl.models.rank_group import RankGroup
from hacrl.models.rank_guard import guard_layers

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded. It is an attribute of the sharded model."""

    group: RankGroup
    device: torch.device  # where the model computes
    dtype: torch.dtype  # in which it computes
    make_skeleton: Callable[[], Any]  # makes the same model without weights, on the meta device
    cpu_offload: bool  # whether shards are in the machine's memory, except while they are used
    mesh: Any  # the group's one-dimensional device mesh
    units: list[Any]  # modules whose own weights are gathered together; the model itself is the last


def sharding_of(model: Any) -> Sharding | None:
    """Return how the model is sharded, or None if it is whole."""
    found: Sharding | None = getattr(without_adapters(model), "hacrl_sharding", None)
    return found


def shard_model(
    make_skeleton: Callable[[], Any],
    group: RankGroup,
    device: torch.device,
    dtype: torch.dtype,
    source: Any | None,
    *,
    cpu_offload: bool = False,
) -> Any:
    """Return a model of which this rank holds a share. ``source``: the whole model on rank 0, else None."""
    model = make_skeleton()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    fill = _Rank0Weights(without_adapters(model), group, device, source)
    return _sharded(model, fill, group, device, dtype, make_skeleton, cpu_offload)


def frozen_copy(model: Any) -> Any:
    """Return a sharded copy of a sharded model in the precision of computing, without gradients."""
    sharding = sharding_of(model)
    assert sharding is not None
    copied = sharding.make_skeleton().requires_grad_(False)
    fill = _CopiedWeights(without_adapters(copied), sharding.device, sharding)
    return _sharded(
        copied,
        fill,
        sharding.group,
        sharding.device,
        sharding.dtype,
        sharding.make_skeleton,
        sharding.cpu_offload,
    )


def _sharded(
    model: Any,
    fill: _Weights,
    group: RankGroup,
    device: torch.device,
    dtype: torch.dtype,
    make_skeleton: Callable[[], Any],
    cpu_offload: bool,
) -> Any:
    """Shard a model on the meta device unit by unit, so that only one unit is ever whole."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    root = without_adapters(model)
    casts = dtype != torch.float32 and not is_adapted(model)
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if casts else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    mesh = DeviceMesh.from_group(group.members, device.type)
    units = [*decoder_layers(root), root]
    group.meet()  # rank 0 may have loaded weights until now
    with group.together(), torch.no_grad():
        fill.buffers()
        for number, unit in enumerate(units):
            fill.parameters(unit, number)
            # also the model itself, so that no unit stays gathered when an update changes the shards
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=offload
            )
    guard_layers(root)
    root.__class__ = _with_compute_properties(root.__class__)
    root.hacrl_sharding = Sharding(group, device, dtype, make_skeleton, cpu_offload, mesh, units)
    root.run_as_forward = MethodType(_run, root)
    register_fsdp_forward_method(root, "run_as_forward")
    # Trials of the model are forward passes, so all ranks must make them now, at the same time.
    with group.together(), torch.no_grad():
        supports_packing(model)
        separate_head(model)
    return model


def _run(_: Any, function: Callable[[], Result]) -> Result:
    """Call the function: what ``hacrl.models.lm_head.run_as_forward`` calls as a method of the model."""
    return function()


@lru_cache
def _with_compute_properties(sharded: type) -> type:
    """Return the class with the device and precision of computing; its shards may have others."""

    def device(self: Any) -> torch.device:
        found: torch.device = self.hacrl_sharding.device
        return found

    def dtype(self: Any) -> torch.dtype:
        found: torch.dtype = self.hacrl_sharding.dtype
        return found

    return type(sharded.__name__, (sharded,), {"device": property(device), "dtype": property(dtype)})


@contextmanager
def _gathered(unit: Any) -> Iterator[None]:
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


@torch.no_grad()
def weight_groups(model: Any) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield names and whole weights, group by group; a group is valid until the next one.

    A whole model is one group. A sharded model gathers layer by layer, on all ranks at the same time.
    """
    sharding = sharding_of(model)
    if sharding is None:
        yield list(model.named_parameters())
        return
    sharding.group.announce("gather_weights")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in sharding.units:
        own = [names[id(parameter)] for parameter in _own_parameters(unit, sharding.units)]
        with sharding.group.together(), current_device(sharding.device), _gathered(unit):
            yield [(name, model.get_parameter(name)) for name in own]


def whole_model(model: Any, device: torch.device) -> Any:
    """Return an ordinary model like the sharded one; its weights are undefined until they are copied."""
    sharding = sharding_of(model)
    assert sharding is not None
    whole, buffers = sharding.make_skeleton(), dict(without_adapters(model).named_buffers())
    root = without_adapters(whole)
    places = Places(root)
    for buffer in list(root.buffers()):
        places.fill(buffer, buffers[places.name(buffer)].to(device, copy=True))
    for parameter in list(root.parameters()):
        places.fill(parameter, torch.empty_like(parameter, device=device))
    whole.generation_config = model.generation_config
    return whole


def copy_weights(model: Any, target: Any | None) -> None:
    """Copy a sharded model's weights into a whole model on rank 0; other ranks take part without one."""
    targets = {} if target is None else dict(target.named_parameters())
    for group in weight_groups(model):
        for name, weight in group:
            if target is not None:
                targets[name].data.copy_(weight)


def local_rows(model: Any, whole: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor, as FSDP2 shards it."""
    sharding = sharding_of(model)
    assert sharding is not None
    rows = -(-whole.shape[0] // sharding.group.world)
    start = min(sharding.group.rank * rows, whole.shape[0])
    return whole[start : start + rows]


def whole_tensor(model: Any, shard: Tensor, shape: torch.Size) -> Tensor:
    """Return the whole of a tensor of this shape from all ranks' rows; on every rank."""
    from torch.distributed.tensor import DTensor, Shard

    sharding = sharding_of(model)
    assert sharding is not None
    stride = torch.empty(shape, device="meta").stride()
    with sharding.group.together(), current_device(sharding.device):
        on_device = shard.to(sharding.device)
        return DTensor.from_local(
            on_device, sharding.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        ).full_tensor()


def _own_parameters(unit: Any, units: list[Any]) -> list[nn.Parameter]:
    """Return the parameters that a unit does not share with units inside it."""
    inside = {
        id(parameter)
        for other in units
        if other is not unit and other in set(unit.modules())
        for parameter in other.parameters()
    }
    return [parameter for parameter in unit.parameters() if id(parameter) not in inside]


class Places:
    """The tensors of a model on the meta device, by the names of their places; tied weights have several."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[int, list[str]] = {}
        for name, tensor in all_tensors(root).items():
            self._names.setdefault(id(tensor), []).append(name)
        self._keep = [*root.parameters(), *root.buffers()]  # so that no id is used twice

    def name(self, meta: Tensor) -> str:
        """Return the first name of a tensor."""
        return self._names[id(meta)][0]

    def fill(self, meta: Tensor, value: Tensor) -> None:
        """Put a value in all places of a tensor."""
        is_parameter = isinstance(meta, nn.Parameter)
        placed = nn.Parameter(value, meta.requires_grad) if is_parameter else value
        for name in self._names[id(meta)]:
            owner, _, last = name.rpartition(".")
            module = self._root.get_submodule(owner)
            (module._parameters if is_parameter else module._buffers)[last] = placed


def all_tensors(root: Any) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, tied ones under each of their names."""
    return {
        **dict(root.named_parameters(remove_duplicate=False)),
        **dict(root.named_buffers(remove_duplicate=False)),
    }


class _Weights(ABC):
    """Fills a model on the meta device with values, on every rank."""

    def __init__(self, root: Any, device: torch.device) -> None:
        self._root, self._device = root, device
        self._places = Places(root)

    def parameters(self, unit: Any, number: int) -> None:
        """Fill the parameters of a unit that are still on the meta device."""
        for parameter in [parameter for parameter in unit.parameters() if parameter.is_meta]:
            self._places.fill(parameter, self._value(parameter, self._places.name(parameter)))

    def buffers(self) -> None:
        """Fill all buffers."""
        for buffer in list(self._root.buffers()):
            self._places.fill(buffer, self._value(buffer, self._places.name(buffer)))

    @abstractmethod
    def _value(self, meta: Tensor, name: str) -> Tensor:
        """Return the value of the tensor of that name, in the type of ``meta``."""


class _Rank0Weights(_Weights):
    """The weights of a whole model on rank 0."""

    def __init__(self, root: Any, group: RankGroup, device: torch.device, source: Any | None) -> None:
        super().__init__(root, device)
        self._group = group
        self._sources = {} if source is None else all_tensors(without_adapters(source))

    def _value(self, meta: Tensor, name: str) -> Tensor:
        if self._group.rank == 0:
            value = self._sources[name].detach().to(self._device, meta.dtype, copy=True).contiguous()
        else:
            value = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
        return self._group.broadcast(value)


class _CopiedWeights(_Weights):
    """The weights of another sharded model, which all ranks gather unit by unit."""

    def __init__(self, root: Any, device: torch.device, other: Sharding) -> None:
        super().__init__(root, device)
        self._other = other

    def parameters(self, unit: Any, number: int) -> None:
        with _gathered(self._other.units[number]):
            super().parameters(unit, number)

    def _value(self, meta: Tensor, name: str) -> Tensor:
        return all_tensors(self._other.units[-1])[name].detach().to(self._device, meta.dtype, copy=True)
