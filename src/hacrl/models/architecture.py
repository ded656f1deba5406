"""Decide from a model's config whether the model can be an agent, and how it computes.

========  ==========================================================================================
packed    Sequences lie end to end in one row and share their prompts; responses share a KV cache.
plain     One padded row per sequence. A model with recurrent or convolution layers generates through
          ``generate`` of transformers, with prompts of equal length side by side: padding would
          change its state.
refused   The model is no causal language model, or transformers' code for it cannot be trained.
========  ==========================================================================================

The decision needs no weights. It asks what a config and a model class say about themselves, and knows no
model's name. Once a model is loaded, trials confirm the decision: :func:`check_causal` here,
``supports_packing`` before sequences are packed, and the transformers engine's before it generates.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hacrl.errors import ModelError
from hacrl.models.device import is_out_of_memory
from hacrl.models.packing_support import attention_windows, logit_tolerance

TrainingPath = Literal["packed", "plain", "refused"]
# Kinds of layers that carry a state from token to token. Kinds of attention keep keys and values instead.
STATEFUL_KINDS = frozenset({"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"})
# Classes of models that read a text and write none
_OTHER_HEAD = re.compile(r"For(Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice")
_EXPECTED = "An agent is a decoder-only causal language model, e.g. Qwen/Qwen3-0.6B"
# Two sequences of the trial, of different lengths
_TRIAL = ((3, 1, 4, 1, 5, 9, 2), (2, 7, 1, 8))


@dataclass(frozen=True)
class Support:
    """How a model computes as an agent."""

    path: TrainingPath
    reason: str = ""  # why it is not packed, or why it is refused
    advice: str = ""  # what to do if it is refused


def architecture_support(config: Any, attention: str | None = None) -> Support:
    """Return how a model of this config computes; ``attention`` is the agent's setting.

    ``packed`` is what the config and the model's class allow. A trial after loading has the last word: a few
    classes do not hand on what packed attention needs, and their models then take the plain path.
    """
    refusal = next(_refusals(config), None)
    if refusal is not None:
        return refusal
    obstacle = next(_packing_obstacles(config, attention), None)
    return Support("packed") if obstacle is None else Support("plain", obstacle)


def check_architecture(agent: str, model: str, config: Any) -> None:
    """Raise ModelError, naming the agent's key, if a model of this config cannot be an agent."""
    support = architecture_support(config)
    if support.path == "refused":
        kind = f"(model_type {config.model_type!r})"
        advice = f". {support.advice}" if support.advice else ""
        raise ModelError(f"agents.{agent}.model: {model!r} {support.reason} {kind}{advice}")


def keeps_state(config: Any) -> bool:
    """Return whether layers carry a state from token to token, which padding and packing would change."""
    model_class = causal_model_class(config)
    return bool(getattr(model_class, "_is_stateful", False)) or not STATEFUL_KINDS.isdisjoint(
        layer_kinds(config)
    )


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer as the config names it; empty if the config does not say."""
    text = config.get_text_config()
    for key in ("layer_types", "layers_block_type", "block_types"):
        if kinds := getattr(text, key, None):
            return list(kinds)
    return []


def causal_model_class(config: Any) -> Any | None:
    """Return transformers' class for a causal language model of this config, None for a model's own code."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def loads_text_part(config: Any) -> bool:
    """Return whether the causal language model of a composite config is its text part alone."""
    text = config.get_text_config()
    return text is not config and getattr(causal_model_class(config), "config_class", None) is type(text)


def holds_scores(config: Any) -> bool:
    """Return whether transformers' attention for this config holds all scores, because no kernel fits it."""
    model_class = causal_model_class(config)
    return model_class is not None and not getattr(model_class, "_supports_sdpa", True)


def _has_own_code(config: Any) -> bool:
    return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def _refusals(config: Any) -> Iterator[Support]:
    """Yield why a model of this config cannot be an agent."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if getattr(config, "is_encoder_decoder", False):
        yield _refused(
            "is a sequence-to-sequence model: its decoder continues what its encoder has read", _EXPECTED
        )
    elif causal_model_class(config) is None and not _has_own_code(config):
        yield _refused("has a type of which transformers has no causal language model", _text_part(config))
    elif config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        yield _refused(
            "is an encoder: every token sees those after it, so it cannot write from left to right",
            f'{_EXPECTED}; one that was trained as a decoder says "is_decoder": true in its config.json',
        )
    elif heads := [name for name in config.architectures or () if _OTHER_HEAD.search(name)]:
        yield _refused(
            f"has the weights of {heads[0]}: the output layer that writes tokens is missing", _EXPECTED
        )
    elif getattr(config, "attn_type", None) == "bi":
        yield _refused("is a permutation language model: tokens see those after them", _EXPECTED)
    if 0 < getattr(config, "rescale_every", 0) < getattr(config, "num_hidden_layers", 0):
        yield _refused(
            "divides its own weights by powers of two when it computes, so they would be saved wrongly",
            'Set "rescale_every": 0 in its config.json',
        )


def _refused(reason: str, advice: str) -> Support:
    return Support("refused", reason, advice)


def _text_part(config: Any) -> str:
    """Return the advice for a composite model, e.g. of images and text, whose text part is causal."""
    text = config.get_text_config()
    if text is config or causal_model_class(text) is None:
        return _EXPECTED
    return (
        f"Its text part is one ({text.model_type}): load the model with transformers, save that part and the "
        "tokenizer in a folder of their own, and give the folder"
    )


def _packing_obstacles(config: Any, attention: str | None) -> Iterator[str]:
    """Yield why a model of this config does not compute packed sequences."""
    if keeps_state(config):
        yield "recurrent or convolution layers carry a state from token to token"
    if attention not in (None, "sdpa"):
        yield f"attention: {attention} was chosen"
    model_class = causal_model_class(config)
    if model_class is None:
        return  # the model's own code: the trial decides
    if not hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS"):
        yield "attention is code of the model's own"
    elif holds_scores(config):
        yield "attention scores are capped, or attention has sinks: transformers has no fused kernel for it"
    if attention_windows(config.get_text_config()) is None:
        others = {*layer_kinds(config)} - {"full_attention", "sliding_attention"}
        yield f"layers are of the kind {', '.join(sorted(others)) or 'sliding_attention without a window'}"


@torch.no_grad()
def check_causal(model: Any, agent: str) -> None:
    """Raise ModelError unless a token's logits depend on nothing but the tokens up to it.

    Not on later tokens, and not on padding behind the sequence or on other rows. Training relies on that.
    """
    longest = max(map(len, _TRIAL))
    rows = [[*tokens, *[0] * (longest - len(tokens))] for tokens in _TRIAL]

    def logits(token_ids: list[list[int]]) -> torch.Tensor:
        ids = torch.tensor(token_ids, device=model.device)
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
        return found

    try:
        alone = [logits([list(tokens)])[0] for tokens in _TRIAL]
        together = logits(rows)
    except Exception as error:  # a model's code may raise anything
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"agent {agent!r}: {type(model).__name__} cannot compute a plain forward pass: {error}"
        ) from error
    for row, expected in zip(together, alone, strict=True):
        gap = (row[: len(expected)] - expected).abs().mean()
        if gap > logit_tolerance(model.dtype) * expected.std():  # False for NaN: learning reports that
            raise ModelError(
                f"agent {agent!r}: the log-probabilities of {type(model).__name__} depend on later tokens or "
                "on padding, so it is not a causal language model and cannot be trained as one"
            )
