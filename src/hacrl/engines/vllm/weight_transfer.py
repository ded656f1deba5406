"""Ways for weights to get from a learner into an engine. Which one is taken depends on where they are.

An agent's weights as vLLM reads them: Hugging Face names, every tensor once, adapters merged.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hacrl.config.schema import WeightSync
from hacrl.engines.vllm.backend import Backend, EngineError, EngineLostError
from hacrl.engines.vllm.in_vllm.hacrl_vllm_worker import make_group
from hacrl.models.lora import is_adapted

Weights = Iterable[tuple[str, Tensor]]
_SHARED_MEMORY = Path("/dev/shm")


class Transport(Protocol):
    """One way."""

    name: str

    def send(self, weights: Weights, backend: Backend) -> None:
        """Returns when every worker has put the weights in place."""
        ...

    def close(self) -> None:
        """Let go of what both ends share."""
        ...


class Ipc:
    """In place: workers read the learner's own tensors on the same GPU. Nothing is copied on the way."""

    name = "ipc"

    def send(self, weights: Weights, backend: Backend) -> None:
        """See :class:`Transport`."""
        kept = [(name, tensor.contiguous()) for name, tensor in weights]  # until the workers are done
        torch.cuda.synchronize()
        _check(backend, backend.call("hacrl_load_ipc", json.dumps([_handle(*one) for one in kept])))
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # the workers have let go of what is shared

    def close(self) -> None:
        """Nothing is held."""


class Files:
    """Through a safetensors file, in memory where the machine has a folder for that."""

    name = "files"

    def send(self, weights: Weights, backend: Backend) -> None:
        """See :class:`Transport`."""
        from safetensors.torch import save_file

        tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with tempfile.TemporaryDirectory(prefix="hacrl-weights-", dir=_roomy_folder(size)) as folder:
            path = Path(folder) / "weights.safetensors"
            save_file(tensors, path)
            _check(backend, backend.call("hacrl_load_file", str(path)))

    def close(self) -> None:
        """Nothing is held."""


class Broadcast:
    """Over the network: the learner broadcasts, all workers listen. NCCL between GPUs, gloo between CPUs."""

    def __init__(self, kind: str, workers: int, host: str, seconds: float = 120.0) -> None:
        self.name = kind
        self._size = workers + 1
        self._host = host
        self._wait = timedelta(seconds=seconds)
        self._group: Any = None

    def send(self, weights: Weights, backend: Backend) -> None:
        """See :class:`Transport`."""
        device = "cuda" if self.name == "nccl" else "cpu"
        kept = [(name, tensor.to(device).contiguous()) for name, tensor in weights]
        plan = [
            {"name": name, "shape": list(tensor.shape), "dtype": _dtype_name(tensor)} for name, tensor in kept
        ]
        with ThreadPoolExecutor(1) as listening:  # workers answer when they have everything
            if self._group is None:
                self._group = self._meet(backend, listening)
            answer = listening.submit(backend.call, "hacrl_load_broadcast", json.dumps(plan))
            with _explained_by(answer, backend):
                for _, tensor in kept:
                    self._group.broadcast([tensor], torch.distributed.BroadcastOptions()).wait()
            _check(backend, answer.result())

    def _meet(self, backend: Backend, listening: ThreadPoolExecutor) -> Any:
        port = free_port()
        where = (self.name, self._host, str(port), "1", str(self._size), str(self._wait.total_seconds()))
        answer = listening.submit(backend.call, "hacrl_join", *where)
        with _explained_by(answer, backend):
            group = make_group(self.name, self._host, port, 0, self._size, self._wait)
        answer.result()
        return group

    def close(self) -> None:
        """A group does not outlive its workers: a new engine gets a new one."""
        self._group = None


@contextmanager
def _explained_by(answer: Future[Any], backend: Backend) -> Iterator[None]:
    """What went wrong between the two ends: the engine's own words say it better than the connection's."""
    try:
        yield
    except RuntimeError as error:
        answer.result()
        raise EngineLostError(f"{backend.name} lost its connection for weights: {error}") from error


def make_transport(
    wanted: WeightSync, learner: torch.device, workers: list[dict[str, Any]], same_host: bool, host: str
) -> Transport:
    """The way asked for, or the best one both ends have; one they cannot go is an error."""
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
    if wanted == "ipc":
        return Ipc()
    if wanted == "files":
        return Files()
    return Broadcast(wanted, len(workers), host)


def free_port() -> int:
    """A TCP port nobody listens on."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _check(backend: Backend, answers: list[dict[str, Any]]) -> None:
    missing = sorted({name for answer in answers for name in answer["missing"]})
    if missing:
        raise EngineError(
            f"{backend.name} serves another model: the agent has no weights for {', '.join(missing)}"
        )


def _roomy_folder(size: int) -> str | None:
    """Shared memory if twice the size fits; None: the usual place for temporary files."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > 2 * size:
        return str(_SHARED_MEMORY)
    return None


def _handle(name: str, tensor: Tensor) -> dict[str, Any]:
    """Where a tensor lies, for another process on the same GPU."""
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


@torch.no_grad()
def exported_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each weight; tied ones come once, under the name of the embeddings."""
    if not is_adapted(model):
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
        return
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, last = name.rpartition(".")
        weight = parameter.detach()
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            if last == "weight":
                weight = _merged(modules[owner], weight)
        yield f"{owner.removeprefix(_PEFT_PREFIX)}.{last}", weight


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """W + scale * B A, summed in float32: the adapters are, and their share may be below W's precision."""
    merged = weight.float()
    for adapter in layer.active_adapters:
        merged = merged + layer.get_delta_weight(adapter).float()
    return merged.to(weight.dtype)
