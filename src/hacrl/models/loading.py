"""Load models and tokenizers, and refuse those that cannot be used as agents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hacrl.config.schema import AgentSettings
from hacrl.errors import ModelError
from hacrl.models import smollm2
from hacrl.models.architecture import check_architecture
from hacrl.models.lora import add_adapters
from hacrl.models.model_sources import materialise_model, resolve_model
from hacrl.models.tokenizing import TextCodec, context_length

# Names of files that tokenizers are made from, e.g. tokenizer.json, spiece.model, vocab.txt, qwen.tiktoken
_TOKENIZER_FILE = re.compile(r"token|vocab|merges|\.model$|\.bpe$", re.IGNORECASE)


def load_text_codec(settings: AgentSettings) -> TextCodec:
    """Load an agent's tokenizer and chat template without its weights, e.g. to check prompts early."""
    config, tokenizer = load_model_config(settings), load_tokenizer(settings)
    _check_vocabulary(settings, tokenizer, config.get_text_config().vocab_size)
    return TextCodec(
        settings.name,
        tokenizer,
        _generation_config(settings, config),
        context_length(config),
        settings.chat_template,
        settings.chat_template_args,
    )


def load_tokenizer(settings: AgentSettings) -> Any:
    """Load the tokenizer. Raise ModelError if it has no eos_token or no vocabulary."""
    from transformers import AutoTokenizer

    _check_tokenizer_exists(settings)
    with _explained(settings, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(materialise_model(settings.model), **_where(settings))
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer of {settings.model!r} has no eos_token, so a response "
            "could never end; set eos_token in its tokenizer_config.json"
        )
    if not tokenizer.get_vocab() or not tokenizer("1").input_ids:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer of {settings.model!r} turns text into nothing; "
            "does the folder have a tokenizer.json?"
        )
    return tokenizer


def _check_tokenizer_exists(settings: AgentSettings) -> None:
    """Raise ModelError for a folder without a tokenizer: transformers would make up an empty one."""
    folder = Path(resolve_model(settings.model))
    if settings.model == smollm2.REFERENCE or not folder.is_dir():
        return
    if not any(_TOKENIZER_FILE.search(file.name) for file in folder.iterdir()):
        raise ModelError(
            f"agents.{settings.name}.model: folder {settings.model} has no tokenizer; copy tokenizer.json "
            "and tokenizer_config.json (or tokenizer.model, vocab.json, merges.txt) from where the weights "
            "come from"
        )


def load_model_config(settings: AgentSettings) -> Any:
    """Load the model's config.json. Raise ModelError for an architecture that cannot be an agent."""
    from transformers import AutoConfig

    with _explained(settings, "config"):
        config = AutoConfig.from_pretrained(materialise_model(settings.model), **_where(settings))
    check_architecture(settings.name, settings.model, config)
    return config


def load_model(
    settings: AgentSettings, tokenizer: Any, device: str, seed: int = 0, location: str | None = None
) -> Any:
    """Load the model, in the precision that it has on ``device`` and without dropout; add new adapters.

    ``location``: the device to load it onto if that is another one.
    """
    from transformers import AutoModelForCausalLM

    config = load_model_config(settings)
    check_weights_exist(settings)
    with _explained(settings, "model"):
        model, report = AutoModelForCausalLM.from_pretrained(
            materialise_model(settings.model),
            config=config,
            dtype=torch_precision(settings, config, device),
            output_loading_info=True,
            use_safetensors=True,  # the older .bin files are pickles, which can run code when they are loaded
            **_attention(settings),
            **_where(settings),
        )
    _check_weights(settings, report)
    _check_vocabulary(settings, tokenizer, model.get_input_embeddings().num_embeddings)
    return _prepared(model.eval().to(location or device), settings, seed)


def make_skeleton(settings: AgentSettings, device: str, seed: int = 0) -> Any:
    """Return what :func:`load_model` would return for ``device``, without weights: on the meta device."""
    from transformers import AutoModelForCausalLM

    config = load_model_config(settings)
    with _explained(settings, "model"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch_precision(settings, config, device),
            trust_remote_code=settings.trust_remote_code,
            **_attention(settings),
        )
        model.tie_weights()
        return _prepared(model.eval(), settings, seed)


def _attention(settings: AgentSettings) -> dict[str, str]:
    return {} if settings.attention is None else {"attn_implementation": settings.attention}


def _prepared(model: Any, settings: AgentSettings, seed: int) -> Any:
    """Return the model with gradient checkpointing and adapters, if configured."""
    if settings.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            raise ModelError(
                f"agents.{settings.name}.gradient_checkpointing: {type(model).__name__} does not support it; "
                "set it to false"
            )
        # the reentrant kind needs inputs that carry gradients, which frozen embeddings do not give
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model if settings.lora is None else add_adapters(model, settings, seed)


def torch_precision(settings: AgentSettings, config: Any, device: str) -> torch.dtype:
    """Return the dtype of the weights.

    "auto" is float32 on a CPU. On a GPU it is bfloat16 if the weights are stored in 16 bits, else float32.
    """
    if settings.precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.precision]
    stored = getattr(config, "dtype", None)
    halved = stored in (torch.bfloat16, torch.float16, "bfloat16", "float16")
    return torch.bfloat16 if halved and device != "cpu" else torch.float32


def _where(settings: AgentSettings) -> dict[str, Any]:
    where: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    return where if settings.revision is None else {**where, "revision": settings.revision}


def _generation_config(settings: AgentSettings, config: Any) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(materialise_model(settings.model), **_where(settings))
    except (OSError, ValueError):  # a model need not have one; transformers then takes the config's
        return GenerationConfig.from_model_config(config)


@contextmanager
def _explained(settings: AgentSettings, part: str) -> Iterator[None]:
    """Raise errors of transformers as ModelError, with the agent's name in front."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"agents.{settings.name}.{error}") from error
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        hint = ""
        if "trust_remote_code" in str(error):  # transformers' message does not name the configuration key
            raise ModelError(
                f"agents.{settings.name}.model: {settings.model!r} comes with Python code of its own "
                "(auto_map in its config.json), because transformers does not know the model. Read the code; "
                f"if you trust it, set agents.{settings.name}.trust_remote_code=true"
            ) from error
        if "couldn't connect to" in str(error):  # transformers' message does not name the configuration key
            version = f" (revision {settings.revision!r})" if settings.revision else ""
            raise ModelError(
                f"agents.{settings.name}.model: {settings.model!r}{version} is not in the local cache, and "
                "the Hugging Face hub cannot be reached; check the connection, or give the folder of a model"
            ) from error
        if "no file named model.safetensors" in str(error) or "a file named model.safetensors" in str(error):
            hint = f". {_no_pickles(settings.model)}"
        raise ModelError(
            f"agent {settings.name!r}: cannot load {part} {settings.model!r}: {error}{hint}"
        ) from error


def check_weights_exist(settings: AgentSettings) -> None:
    """Raise ModelError for a folder without weights, before other agents' weights are loaded."""
    if settings.model == smollm2.REFERENCE:
        return  # created when it is first used
    folder = Path(resolve_model(settings.model))
    suffixes = {file.suffix for file in folder.iterdir()} if folder.is_dir() else {".safetensors"}
    if ".safetensors" in suffixes:
        return
    if suffixes & {".bin", ".pt", ".pth"}:
        raise ModelError(
            f"agents.{settings.name}.model: folder {settings.model} has no weights as model.safetensors. "
            + _no_pickles(settings.model)
        )
    raise ModelError(
        f"agents.{settings.name}.model: folder {settings.model} has no weights, e.g. model.safetensors; "
        "was it copied in full?"
    )


def _no_pickles(model: str) -> str:
    """Return the advice for weights in the older pickle format."""
    new = f"{model.rstrip('/').rsplit('/', 1)[-1]}-safetensors"
    return (
        "Files such as pytorch_model.bin are pickles, which can run code, and are not loaded. To convert a "
        'model you trust: python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f'[one.from_pretrained({model!r}).save_pretrained({new!r}) for one in (M, T)]", then use {new}'
    )


def _check_weights(settings: AgentSettings, report: dict[str, Any]) -> None:
    """Raise ModelError for missing weights: transformers would only warn and fill in random numbers."""
    for kind in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in report.get(kind) or ())
        if keys:
            raise ModelError(
                f"agent {settings.name!r}: the weights of {settings.model!r} do not fit its config.json: "
                f"{len(keys)} {kind.replace('_', ' ')}, e.g. {keys[0]}"
            )


def _check_vocabulary(settings: AgentSettings, tokenizer: Any, embeddings: int) -> None:
    """Raise ModelError if a token of the tokenizer has no embedding."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= embeddings:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer of {settings.model!r} has token {largest}, "
            f"the model only {embeddings} embeddings: they do not belong together"
        )
