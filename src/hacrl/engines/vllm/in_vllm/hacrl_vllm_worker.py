"""The part of hacrl that runs in vLLM's workers: receives weights and loads them into the model.

vLLM imports this module for its worker extension, ``WeightReceiver``, which describes the worker. Where vLLM
has a weight-transfer API, the module registers ``HacrlTransferEngine`` with it, under the name ``hacrl``;
elsewhere the extension loads the weights. An interpreter without hacrl may import this module, so it imports
only what vLLM needs itself. Arguments and results fit into JSON, because they cross HTTP and processes.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

PROTOCOL = 2  # raised whenever a method changes what it takes or returns
BACKEND = "hacrl"  # in vLLM's weight_transfer_config
Weights = Iterable[tuple[str, torch.Tensor]]


class WeightReceiver:
    """Methods for ``collective_rpc``. Their names start with hacrl, so that they hide none of vLLM's."""

    def hacrl_describe(self) -> dict[str, Any]:
        """Return which model this worker serves, its device, and whether it has the transfer engine."""
        import vllm

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        config = self.model_runner.model_config.hf_text_config  # type: ignore[attr-defined]
        parameter = next(model.parameters())
        keys = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
        transfer_engine = getattr(self, "weight_transfer_engine", None)
        return {
            "protocol": PROTOCOL,
            "vllm": vllm.__version__,
            "device": str(parameter.device.type),
            "gpu": _gpu_identity(parameter.device),
            "dtype": str(self.model_runner.model_config.dtype).removeprefix("torch."),  # type: ignore[attr-defined]
            "max_length": int(self.model_runner.model_config.max_model_len),  # type: ignore[attr-defined]
            "model": {key: getattr(config, key, None) for key in keys},
            "weight_transfer": type(transfer_engine).__name__ == "HacrlTransferEngine",
        }

    def hacrl_join(self, group: str) -> None:
        """Join the process group in which the learner, rank 0, broadcasts weights."""
        self._hacrl_group = _joined(json.loads(group), int(getattr(self, "rank", 0)))

    def hacrl_load(self, source: str) -> dict[str, Any]:
        """Load weights with Hugging Face names into the model; return parameters that got none."""
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        device = next(model.parameters()).device
        weights = received(json.loads(source), device, getattr(self, "_hacrl_group", None))
        with torch.inference_mode():
            if _is_plain(model):  # no layer repacks its weights: copy in place
                loaded = model.load_weights(weights)
            else:
                # a list, because vLLM loads layer by layer and repacks each
                runner.reload_weights(weights_iterator=iter(list(weights)))
                _repack_tied_head(model)
                loaded = None
        del weights
        _finish(device)
        missing = (
            [] if loaded is None else sorted({name for name, _ in model.named_parameters()} - set(loaded))
        )
        return {"missing": missing[:8]}


def received(source: dict[str, Any], device: torch.device, group: Any) -> Weights:
    """Return the weights that the learner sends: from a file, from its memory, or by broadcast."""
    if "file" in source:
        return _from_file(source["file"])
    if "ipc" in source:
        # Open all before loading any: the tensors lie in a few large allocations, and an allocation is mapped
        # into this process again whenever its last open tensor was closed.
        return [(handle["name"], _opened(handle)) for handle in source["ipc"]]
    return _from_broadcast(source["broadcast"], device, group)


def _from_file(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            yield name, file.get_tensor(name)


def _from_broadcast(
    plan: list[dict[str, Any]], device: torch.device, group: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive the tensors one by one, in the order of the plan."""
    for entry in plan:
        tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device=device)
        group.broadcast([tensor], torch.distributed.BroadcastOptions()).wait()
        yield entry["name"], tensor


def make_group(backend: str, host: str, port: int, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a process group apart from torch's default one; rank 0 hosts the store."""
    from torch import distributed

    store = distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False, use_libuv=True
    )
    if backend == "gloo":
        return distributed.ProcessGroupGloo(store, rank, size, timeout)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def _joined(group: dict[str, Any], worker_rank: int) -> Any:
    timeout = timedelta(seconds=group["seconds"])
    rank = 1 + worker_rank
    return make_group(group["backend"], group["host"], group["port"], rank, group["size"], timeout)


def _finish(device: torch.device) -> None:
    """Wait for the copies, and let the learner have its memory back."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _is_plain(model: torch.nn.Module) -> bool:
    """Return whether all layers keep weights as loaded: none packed for a CPU, quantised, or fused."""
    if not next(model.parameters()).is_cuda:
        return False
    for module in model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
            return False
    return True


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Renew a tied output layer's packed copy of the embeddings, which a reload on a CPU leaves stale."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and getattr(module, "weight", None) is not None and _is_head(module):
            module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]


def _is_head(module: torch.nn.Module) -> bool:
    return any(kind.__name__ in ("ParallelLMHead", "VocabParallelEmbedding") for kind in type(module).__mro__)


def _gpu_identity(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def _opened(handle: dict[str, Any]) -> torch.Tensor:
    """Open a tensor of another process on this GPU, without a copy."""
    parts = [base64.b64decode(part["b"]) if isinstance(part, dict) else part for part in handle["storage"]]
    parts[0] = torch.cuda.current_device()  # the GPU may have another number there
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    tensor = torch.empty(0, dtype=getattr(torch, handle["dtype"]), device="cuda")
    return tensor.set_(storage, handle["offset"], handle["shape"], handle["stride"])


def register_transfer_engine() -> None:
    """Register ``HacrlTransferEngine`` with vLLM's weight-transfer API; raise ImportError without one."""
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    @dataclass
    class InitInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
        group: dict[str, Any]

    @dataclass
    class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
        source: dict[str, Any]

    class HacrlTransferEngine(WeightTransferEngine):  # type: ignore[misc, unused-ignore]
        """Loads what hacrl's learner sends, in the same steps as vLLM's own engines."""

        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        _group: Any = None

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self._group = _joined(init_info.group, self.parallel_config.rank)

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: UpdateInfo) -> None:
            loaded = self.model.load_weights(received(update_info.source, self.device, self._group))
            missing = {name for name, _ in self.model.named_parameters()} - set(loaded or ())
            if self.model_config.hf_text_config.tie_word_embeddings:
                missing = {name for name in missing if not name.endswith("lm_head.weight")}
            if missing and loaded and self.model_config.quantization is None:
                raise ValueError(f"the agent has no weights for {', '.join(sorted(missing)[:8])}")

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied_head(self.model)
            _finish(self.device)

        def shutdown(self) -> None:
            self._group = None

    WeightTransferEngineFactory.register_engine(BACKEND, HacrlTransferEngine)


if "vllm" in sys.modules:  # not in the learner's process, which must not import vLLM
    with suppress(ImportError):  # a vLLM without this API
        register_transfer_engine()
