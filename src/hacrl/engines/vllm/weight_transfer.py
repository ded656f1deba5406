"""Send an agent's weights to vLLM's workers, by the fastest transport that both ends support.

Weights have Hugging Face names, each tensor is sent once, and adapters are merged.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hacrl.config.schema import WeightSync
from hacrl.engines.base import Policy
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm.backend import Backend, EngineLostError
from hacrl.engines.vllm.in_vllm.hacrl_vllm_worker import make_group
from hacrl.models.lora import is_adapted
from hacrl.models.sharding import sharding_of, weight_groups

Weights = Iterable[tuple[str, Tensor]]
_SHARED_MEMORY = Path("/dev/shm")


class Workers:
    """vLLM's workers as the receivers of weights.

    They are reached by vLLM's weight-transfer API where it has hacrl's engine, else by hacrl's extension.
    """

    def __init__(self, backend: Backend, has_api: bool) -> None:
        self._backend = backend
        self._has_api = has_api

    def join(self, group: dict[str, Any]) -> None:
        """Have every worker join a process group with the learner."""
        if self._has_api:
            self._backend.weight_transfer("init_weight_transfer_engine", {"init_info": {"group": group}})
        else:
            self._backend.call("hacrl_join", json.dumps(group))

    def load(self, source: dict[str, Any]) -> None:
        """Have every worker load the weights from a source; return when all have."""
        if self._has_api:
            self._backend.weight_transfer("start_weight_update")
            self._backend.weight_transfer("update_weights", {"update_info": {"source": source}})
            self._backend.weight_transfer("finish_weight_update")
            return
        answers = self._backend.call("hacrl_load", json.dumps(source))
        missing = sorted({name for answer in answers for name in answer["missing"]})
        if missing:
            raise EngineError(
                f"{self._backend.name} serves another model: the agent has no weights for "
                f"{', '.join(missing)}"
            )


class Transport(Protocol):
    """One way to send weights."""

    name: str

    def send(self, weights: Weights, backend: Backend) -> None:
        """Send the weights; return when every worker has loaded them."""
        ...

    def close(self) -> None:
        """Release what both ends share."""
        ...


class Ipc:
    """CUDA IPC: workers read the learner's own tensors on the same GPU, without a copy."""

    name = "ipc"

    def __init__(self, has_api: bool = False) -> None:
        self._has_api = has_api

    def send(self, weights: Weights, backend: Backend) -> None:
        """Send handles of the tensors, which stay alive until the workers have loaded them."""
        kept = [(name, tensor.contiguous()) for name, tensor in weights]
        torch.cuda.synchronize()
        Workers(backend, self._has_api).load({"ipc": [_handle(name, tensor) for name, tensor in kept]})
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # frees what the workers have released

    def close(self) -> None:
        """Hold nothing."""


class Files:
    """A safetensors file, in shared memory where there is room."""

    name = "files"

    def __init__(self, has_api: bool = False) -> None:
        self._has_api = has_api

    def send(self, weights: Weights, backend: Backend) -> None:
        """Write the file, have the workers load it, and delete it."""
        from safetensors.torch import save_file

        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="hacrl-weights-", dir=_folder_for(size)) as folder:
            path = Path(folder) / "weights.safetensors"
            save_file(tensors, path)
            Workers(backend, self._has_api).load({"file": str(path)})

    def close(self) -> None:
        """Hold nothing."""


class Broadcast:
    """A broadcast from the learner to all workers: NCCL between GPUs, gloo otherwise."""

    def __init__(
        self, kind: str, workers: int, host: str, has_api: bool = False, seconds: float = 120.0
    ) -> None:
        self.name = kind
        self._size = workers + 1
        self._host = host
        self._has_api = has_api
        self._timeout = timedelta(seconds=seconds)
        self._group: Any = None

    def send(self, weights: Weights, backend: Backend) -> None:
        """Broadcast one tensor after the other, in the order of a plan that the workers get first."""
        device = "cuda" if self.name == "nccl" else "cpu"
        kept = [(name, tensor.to(device).contiguous()) for name, tensor in weights]
        plan = [
            {"name": name, "shape": list(tensor.shape), "dtype": _dtype_name(tensor)} for name, tensor in kept
        ]
        workers = Workers(backend, self._has_api)
        with ThreadPoolExecutor(1) as thread:  # workers answer once they have all tensors
            if self._group is None:
                self._group = self._join(workers, backend, thread)
            answer = thread.submit(workers.load, {"broadcast": plan})
            with _errors_of(answer, backend):
                for _, tensor in kept:
                    self._group.broadcast([tensor], torch.distributed.BroadcastOptions()).wait()
            answer.result()

    def _join(self, workers: Workers, backend: Backend, thread: ThreadPoolExecutor) -> Any:
        port, seconds = free_port(), self._timeout.total_seconds()
        group = {"backend": self.name, "host": self._host, "port": port, "size": self._size}
        answer = thread.submit(workers.join, {**group, "seconds": seconds})
        with _errors_of(answer, backend):
            joined = make_group(self.name, self._host, port, 0, self._size, self._timeout)
        answer.result()
        return joined

    def close(self) -> None:
        """Drop the process group, which belongs to the engine's present workers."""
        self._group = None


@contextmanager
def _errors_of(answer: Future[Any], backend: Backend) -> Iterator[None]:
    """If the connection breaks, raise the engine's own error, which tells more than the connection's."""
    try:
        yield
    except RuntimeError as error:
        answer.result()
        raise EngineLostError(f"{backend.name} lost its connection for weights: {error}") from error


def make_transport(
    wanted: WeightSync, learner: torch.device, workers: list[dict[str, Any]], same_host: bool, host: str
) -> Transport:
    """Return the wanted transport, or for ``auto`` the fastest; raise EngineError for an impossible one."""
    on_gpu = learner.type == "cuda"
    identity = str(torch.cuda.get_device_properties(learner).uuid) if on_gpu else None
    same_gpu = on_gpu and same_host and all(worker["gpu"] == identity for worker in workers)
    both_gpu = on_gpu and all(worker["device"] == "cuda" for worker in workers)
    if wanted == "auto":
        wanted = "ipc" if same_gpu else "nccl" if both_gpu else "files" if same_host else "gloo"
    possible = {"ipc": same_gpu, "nccl": both_gpu, "gloo": not both_gpu, "files": True, "auto": True}
    if not possible[wanted]:
        needs = {
            "ipc": "learner and engine on the same GPU",
            "nccl": "learner and engine on GPUs",
            "gloo": "learner or engine on a CPU",
        }
        raise EngineError(
            f"weight_sync={wanted} needs {needs[wanted]}; here the learner is on {learner} and the engine on "
            f"{', '.join(worker['device'] for worker in workers)}. Leave weight_sync out to take the best way"
        )
    has_api = all(worker.get("weight_transfer") for worker in workers)
    if wanted == "ipc":
        return Ipc(has_api)
    if wanted == "files":
        return Files(has_api)
    return Broadcast(wanted, len(workers), host, has_api)


def free_port() -> int:
    """Return a free TCP port."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _folder_for(size: int) -> str | None:
    """Return the shared-memory folder if twice the size fits; None for the default temporary folder."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size:
        return str(_SHARED_MEMORY)
    return None


def _handle(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return a description by which another process on the same GPU opens the tensor."""
    storage = [
        {"b": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
        for part in tensor.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    ]
    return {
        "name": name,
        "dtype": _dtype_name(tensor),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "storage": storage,
    }


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_PEFT_PREFIX = "base_model.model."


def weights_device(policy: Policy) -> torch.device:
    """Return where :func:`exported_weights` of a policy are."""
    return policy.device if sharding_of(policy.model) is None else torch.device("cpu")


@torch.no_grad()
def exported_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of each weight; tied weights come once, under the name of the embeddings.

    Weights of a sharded model are gathered layer by layer and yielded as copies in the machine's memory.
    """
    modules = dict(model.named_modules()) if is_adapted(model) else {}
    for group in weight_groups(model):
        for name, parameter in group:
            if ".lora_" in name:
                continue
            weight = parameter.detach()
            exported = _without_adapter(name, weight, modules) if modules else (name, weight)
            yield exported if sharding_of(model) is None else (exported[0], _on_host(exported[1]))


def _on_host(weight: Tensor) -> Tensor:
    return weight.to("cpu", copy=True)


def _without_adapter(name: str, weight: Tensor, modules: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Return a base weight, merged with its adapter, under its name in a model without adapters."""
    owner, _, last = name.rpartition(".")
    if owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
        if last == "weight":
            weight = _merged(modules[owner], weight)
    return f"{owner.removeprefix(_PEFT_PREFIX)}.{last}", weight


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """Return W + scale * B A, summed in float32: the update may be below the precision of W."""
    merged = weight.float()
    for adapter in layer.active_adapters:
        merged = merged + layer.get_delta_weight(adapter).float()
    return merged.to(weight.dtype)
