"""From a model reference to a model and a tokenizer that can act as an agent."""

from __future__ import annotations

from typing import Any

import torch

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
        model = AutoModelForCausalLM.from_pretrained(
            location, dtype=torch.float32, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"agent {settings.name!r}: cannot load model {settings.model!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer of {settings.model!r} has no eos_token, so a response "
            "could never end; set eos_token in its tokenizer_config.json"
        )
    return model.eval(), tokenizer
