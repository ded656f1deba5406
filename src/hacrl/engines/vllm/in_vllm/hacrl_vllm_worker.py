"""hacrl's worker extension: vLLM mixes this class into its workers, so that they can load weights.

An interpreter without hacrl may import this module, so it imports only what vLLM needs itself. Arguments and
results fit into JSON, because they cross HTTP and processes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch

PROTOCOL = 1  # raised whenever a method changes what it takes or returns


class WeightReceiver:
    """Methods for ``collective_rpc``. Their names start with hacrl, so that they hide none of vLLM's."""

    def hacrl_describe(self) -> dict[str, Any]:
        """Return which model this worker serves, and its device."""
        import vllm

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        config = self.model_runner.model_config.hf_text_config  # type: ignore[attr-defined]
        parameter = next(model.parameters())
        keys = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
        return {
            "protocol": PROTOCOL,
            "vllm": vllm.__version__,
            "device": str(parameter.device.type),
            "gpu": _gpu_identity(parameter.device),
            "dtype": str(self.model_runner.model_config.dtype).removeprefix("torch."),  # type: ignore[attr-defined]
            "max_length": int(self.model_runner.model_config.max_model_len),  # type: ignore[attr-defined]
            "model": {key: getattr(config, key, None) for key in keys},
        }

    def hacrl_load_file(self, path: str) -> dict[str, Any]:
        """Load weights from a safetensors file that both sides can read."""
        from safetensors import safe_open

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    yield name, file.get_tensor(name)

        return self._hacrl_load(weights())

    def hacrl_load_ipc(self, handles: str) -> dict[str, Any]:
        """Load weights from the learner's memory on the same GPU."""
        # Open all before loading any: the tensors lie in a few large allocations, and an allocation is mapped
        # into this process again whenever its last open tensor was closed.
        opened = [(handle["name"], _opened(handle)) for handle in json.loads(handles)]
        result = self._hacrl_load(opened)
        del opened
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return result

    def hacrl_join(self, backend: str, host: str, port: str, rank: str, size: str, seconds: str) -> None:
        """Join the process group in which the learner, rank 0, broadcasts weights."""
        timeout = timedelta(seconds=float(seconds))
        own_rank = int(rank) + int(getattr(self, "rank", 0))
        self._hacrl_group = make_group(backend, host, int(port), own_rank, int(size), timeout)

    def hacrl_load_broadcast(self, plan: str) -> dict[str, Any]:
        """Load weights that the learner broadcasts one by one, in the order of the plan."""
        device = next(self.model_runner.get_model().parameters()).device  # type: ignore[attr-defined]

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for entry in json.loads(plan):
                tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device=device)
                self._hacrl_group.broadcast([tensor], torch.distributed.BroadcastOptions()).wait()
                yield entry["name"], tensor

        return self._hacrl_load(weights())

    def _hacrl_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Load weights with Hugging Face names into the model; return parameters that got none."""
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        with torch.inference_mode():
            if _is_plain(model):  # no layer repacks its weights: copy in place
                loaded = model.load_weights(weights)
            else:
                # a list, because vLLM loads layer by layer and repacks each
                runner.reload_weights(weights_iterator=iter(list(weights)))
                _repack_tied_head(model)
                loaded = None
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        missing = (
            [] if loaded is None else sorted({name for name, _ in model.named_parameters()} - set(loaded))
        )
        return {"missing": missing[:8]}


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
