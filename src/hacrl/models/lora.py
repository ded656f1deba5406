"""Low-rank adapters, through peft. The model without them is the policy training started from."""

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
    """The model with fresh adapters, the only weights that are trained; they start without effect.

    Adapter weights are float32 whatever the model's precision: their updates are small.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelError(
            f"agents.{settings.name}.lora needs peft: pip install 'hacrl[lora]', or leave lora out"
        ) from error
    assert settings.lora is not None
    wanted = settings.lora.targets
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if wanted != "all-linear":
        _check_targets(model, settings.name, names)
    config = LoraConfig(
        r=settings.lora.rank,
        lora_alpha=settings.lora.alpha,  # type: ignore[arg-type]  # peft scales by any number
        target_modules=wanted if wanted == "all-linear" else names,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        # GPT-2's layers hold their weights transposed; peft says so and does what is right
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ModelError(f"agents.{settings.name}.lora.targets={wanted!r}: {error}") from error
    return adapted.eval()


def _check_targets(model: Any, agent: str, names: Sequence[str]) -> None:
    """peft passes over a name that no layer has as long as another one has one."""
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
    """Whether a model carries adapters."""
    return hasattr(model, "peft_config")


def check_trainable(model: Any, agent: str) -> None:
    """Refuse before training what could not be trained or, hours later, not be saved."""
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
    """The model as it was before training."""
    with model.disable_adapter():
        yield


def save_merged(model: Any, folder: Path) -> None:
    """A plain Hugging Face folder with the adapters merged in, and the adapters alone beside it.

    Merged in float32 on a copy in the CPU's memory, so that training may go on with unchanged weights.
    """
    tensors = [*model.parameters(), *model.buffers()]
    copied = {id(tensor): _on_cpu(tensor) for tensor in tensors}  # tells deepcopy what is copied already
    merged = copy.deepcopy(model, copied).float()
    plain = merged.merge_and_unload().to(model.get_base_model().dtype)
    plain.save_pretrained(folder)
    # no embedding is ever added to a vocabulary: without False, peft would ask the hub
    model.save_pretrained(folder / ADAPTER_FOLDER, save_embedding_layers=False)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().to("cpu", copy=True)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(moved, tensor.requires_grad)
    return moved
