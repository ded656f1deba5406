"""From a model reference to a model and a tokenizer that can act as an agent."""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError

from hacrl.agents.references import resolve_model
from hacrl.agents.settings import AgentSettings
from hacrl.errors import ModelError


def load_model_and_tokenizer(settings: AgentSettings) -> tuple[Any, Any]:
    """Load with transformers; dropout off, on the CPU, in float32.

    Steps of a usual learning rate are below the resolution of bfloat16 weights: those would not move.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location = resolve_model(settings.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=settings.trust_remote_code)
        model, report = AutoModelForCausalLM.from_pretrained(
            location,
            dtype=torch.float32,
            trust_remote_code=settings.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"agent {settings.name!r}: cannot load model {settings.model!r}: {error}") from error
    _check_weights(settings, report)
    _check_tokenizer(settings, tokenizer, model)
    return model.eval(), tokenizer


def _check_weights(settings: AgentSettings, report: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and only warns."""
    for kind in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in report.get(kind) or ())
        if keys:
            raise ModelError(
                f"agent {settings.name!r}: the weights of {settings.model!r} do not fit its config.json: "
                f"{len(keys)} {kind.replace('_', ' ')}, e.g. {keys[0]}"
            )


def _check_tokenizer(settings: AgentSettings, tokenizer: Any, model: Any) -> None:
    """A tokenizer that can end a response and whose tokens all have an embedding."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer of {settings.model!r} has no eos_token, so a response "
            "could never end; set eos_token in its tokenizer_config.json"
        )
    vocabulary = tokenizer.get_vocab()
    if not vocabulary or not tokenizer("1").input_ids:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer of {settings.model!r} turns text into nothing; "
            "does the folder have a tokenizer.json?"
        )
    embeddings = model.get_input_embeddings().num_embeddings
    if max(vocabulary.values()) >= embeddings:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer of {settings.model!r} has token "
            f"{max(vocabulary.values())}, the model only {embeddings} embeddings: they do not belong together"
        )
