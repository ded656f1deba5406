"""What hacrl adds to vLLM's workers: taking weights. vLLM mixes this class into its own worker class.

It may be loaded by an interpreter that has vLLM and not hacrl, so it imports neither hacrl nor anything
that vLLM does not need itself. Arguments and results are JSON text: they pass HTTP and process borders alike.
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
    """Methods for ``collective_rpc``; all names start with hacrl, so that none hides one of vLLM's."""

    def hacrl_describe(self) -> dict[str, Any]:
        """Which model this worker serves, and what it runs on."""
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
        """Take weights from a safetensors file both sides can see."""
        from safetensors import safe_open

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    yield name, file.get_tensor(name)

        return self._hacrl_load(weights())

    def hacrl_load_ipc(self, handles: str) -> dict[str, Any]:
        """Take weights straight out of the learner's memory on the same GPU."""
        # All are opened before the first is read: they lie in a few large pieces of memory, and a piece is
        # mapped into this process anew whenever the last tensor in it has been let go.
        opened = [(one["name"], _opened(one)) for one in json.loads(handles)]
        result = self._hacrl_load(opened)
        del opened
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        return result

    def hacrl_join(self, backend: str, host: str, port: str, rank: str, size: str, seconds: str) -> None:
        """Join the group in which the learner, rank 0, broadcasts weights."""
        wait = timedelta(seconds=float(seconds))
        mine = int(rank) + int(getattr(self, "rank", 0))
        self._hacrl_group = make_group(backend, host, int(port), mine, int(size), wait)

    def hacrl_load_broadcast(self, plan: str) -> dict[str, Any]:
        """Take weights that the learner broadcasts one after the other in the order of the plan."""
        device = next(self.model_runner.get_model().parameters()).device  # type: ignore[attr-defined]

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for one in json.loads(plan):
                tensor = torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]), device=device)
                self._hacrl_group.broadcast([tensor], torch.distributed.BroadcastOptions()).wait()
                yield one["name"], tensor

        return self._hacrl_load(weights())

    def _hacrl_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Put weights with Hugging Face names where the engine computes with them."""
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        with torch.inference_mode():
            if _is_plain(model):  # weights are computed with as they were loaded: copy in place
                loaded = model.load_weights(weights)
            else:
                given = list(weights)  # vLLM reads them layer by layer and repacks each
                runner.reload_weights(weights_iterator=iter(given))
                _repack_tied_head(model)
                loaded = None
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        missing = (
            [] if loaded is None else sorted({name for name, _ in model.named_parameters()} - set(loaded))
        )
        return {"missing": missing[:8]}


def make_group(backend: str, host: str, port: int, rank: int, size: int, wait: timedelta) -> Any:
    """A process group of its own, beside whatever groups either side has; rank 0 keeps the meeting point."""
    from torch import distributed

    store = distributed.TCPStore(  # type: ignore[attr-defined]
        host, port, size, is_master=rank == 0, timeout=wait, wait_for_workers=False, use_libuv=True
    )
    if backend == "gloo":
        return distributed.ProcessGroupGloo(store, rank, size, wait)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = wait
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def _is_plain(model: torch.nn.Module) -> bool:
    """Whether no layer holds its weights in a form of its own: packed for a CPU, quantised, experts fused."""
    if not next(model.parameters()).is_cuda:
        return False
    for module in model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"):
            return False
    return True


def _repack_tied_head(model: torch.nn.Module) -> None:
    """On a CPU an output layer tied to the embeddings keeps a packed copy that a reload does not renew."""
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
    """A tensor of another process on this GPU; nothing is copied."""
    parts = [base64.b64decode(part["b"]) if isinstance(part, dict) else part for part in handle["storage"]]
    parts[0] = torch.cuda.current_device()  # the same GPU may have another number there
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    tensor = torch.empty(0, dtype=getattr(torch, handle["dtype"]), device="cuda")
    return tensor.set_(storage, handle["offset"], handle["shape"], handle["stride"])
