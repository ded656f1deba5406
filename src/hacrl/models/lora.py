"""Low-rank adapters (LoRA) through peft. The model without them is the policy that training started from."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hacrl.config.schema import AgentSettings
from hacrl.errors import ModelError

ADAPTER_FOLDER = "adapter"  # beside the merged weights: the adapters alone, as peft writes them


def add_adapters(model: Any, settings: AgentSettings, seed: int) -> Any:
    """Return the model with new adapters, the only trained weights. Their initial effect is zero.

    Adapter weights are float32 in any precision of the model, because their updates are small.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelError(needs_peft(settings.name)) from error
    assert settings.lora is not None
    targets = settings.lora.targets
    names = [targets] if isinstance(targets, str) else list(targets)
    if targets != "all-linear":
        _check_targets(model, settings.name, names)
    config = LoraConfig(
        r=settings.lora.rank,
        lora_alpha=settings.lora.alpha,  # type: ignore[arg-type]  # peft scales by any number
        target_modules=targets if targets == "all-linear" else names,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # GPT-2's layers store their weights transposed; peft warns and handles that correctly
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ModelError(f"agents.{settings.name}.lora.targets={targets!r}: {error}") from error
    return adapted.eval()


def needs_peft(agent: str) -> str:
    """Return the error for an environment without peft."""
    return f"agents.{agent}.lora needs peft: pip install 'hacrl[lora]', or leave lora out"


def _check_targets(model: Any, agent: str, names: Sequence[str]) -> None:
    """Raise ModelError for a name that no layer has: peft ignores it if another name exists."""
    modules = dict(model.named_modules())
    found = {name: [path for path in modules if f".{path}".endswith(f".{name}")] for name in names}
    unknown = [name for name, paths in found.items() if not paths]
    if unknown:
        linear = {path.rpartition(".")[2] for path, module in modules.items() if _is_linear(module)}
        raise ModelError(
            f"agents.{agent}.lora.targets: the model has no layer called {', '.join(unknown)}; "
            f"it has {', '.join(sorted(linear))}"
        )
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    tied = ends if getattr(model.config, "tie_word_embeddings", False) else set()
    for name, paths in found.items():
        if any(modules[path] in tied for path in paths):
            raise ModelError(
                f"agents.{agent}.lora.targets: {name} shares its weights with the other end of the model, "
                "so an adapter cannot be merged into it; leave it out"
            )


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2's


def is_adapted(model: Any) -> bool:
    """Return whether a model has adapters."""
    return hasattr(model, "peft_config")


def check_trainable(model: Any, agent: str) -> None:
    """Raise ModelError for a model that could not be trained, or could not be saved after training."""
    if getattr(model, "is_quantized", False):
        raise ModelError(
            f"agent {agent!r}: its weights are quantised; neither they nor adapters on them can be trained "
            "here; give a model in bfloat16 or float32, e.g. with lora"
        )
    if is_adapted(model) and not (hasattr(model, "merge_and_unload") and hasattr(model, "disable_adapter")):
        raise ModelError(
            f"agent {agent!r}: its adapters could not be merged when it is saved; make them with "
            "peft.get_peft_model and a LoraConfig, or let hacrl make them: lora"
        )


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Disable the model's adapters within the block: it is then the model before training."""
    with model.disable_adapter():
        yield


def save_merged(model: Any, folder: Path) -> None:
    """Write a plain Hugging Face folder with merged adapters, and the adapters alone in a subfolder.

    The merge happens in float32 on a CPU copy, so that the trained weights stay unchanged.
    """
    tensors = [*model.parameters(), *model.buffers()]
    copied = {
        id(tensor): _on_cpu(tensor) for tensor in tensors
    }  # so that deepcopy does not copy these on the GPU
    merged = copy.deepcopy(model, copied).float()
    plain = merged.merge_and_unload().to(model.get_base_model().dtype)
    plain.save_pretrained(folder)
    # embeddings never change size; without False, peft would query the hub
    model.save_pretrained(folder / ADAPTER_FOLDER, save_embedding_layers=False)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, tensor.requires_grad)
    return moved
