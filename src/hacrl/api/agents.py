"""Turn the agents of a Python user, in any supported form, into config sections and loaded agents."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.api.config import plain_section
from hacrl.config.schema import AgentSettings
from hacrl.errors import ConfigError, ModelError
from hacrl.models.model_sources import BUNDLED_PREFIX

if TYPE_CHECKING:
    from hacrl.models.agent import Agent

# Keys that apply to a loaded model; all others say how to load one.
_KEYS_OF_LOADED_MODELS = frozenset(
    ("name", "model", "frozen", "rollouts_per_prompt", "lr", "chat_template", "chat_template_args")
)
_KINDS = (
    "a model's name or folder, an AgentSettings, a mapping of its keys, a (model, tokenizer) pair, "
    "or a hacrl agent"
)


@dataclass(frozen=True)
class AgentRequest:
    """One agent as a section of the config, with its model, tokenizer or agent if they are loaded already."""

    section: Mapping[str, Any]
    model: Any = None
    tokenizer: Any = None
    agent: Agent | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the model is loaded already."""
        return self.agent is not None or self.model is not None


def agent_requests(given: Sequence[Any] | Mapping[str, Any]) -> list[AgentRequest]:
    """Return one request per agent, each with a unique name."""
    if isinstance(given, Mapping):
        requests = [_named(_request(agent, name), name) for name, agent in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        requests = [_request(agent, f"agents[{i}]") for i, agent in enumerate(given)]
    else:
        raise ConfigError(f"agents: must be a list, or a dict of name to agent, not {type(given).__name__}")
    _check_models_differ(requests)
    return _with_names(requests)


def make_loaded(requests: Sequence[AgentRequest], settings: Sequence[AgentSettings]) -> dict[str, Agent]:
    """Return name -> agent for all loaded models. They are trained in place, not copied."""
    loaded = {}
    for request, own in zip(requests, settings, strict=True):
        if request.is_loaded:
            _check_keys_of_loaded_model(own)
            loaded[own.name] = request.agent or _wrap(request, own)
    return loaded


def _request(given: Any, where: str) -> AgentRequest:
    from hacrl.models.agent import Agent

    if isinstance(given, str | Path):
        return AgentRequest({"model": str(given)})
    if isinstance(given, AgentSettings):
        return AgentRequest(plain_section(given))
    if isinstance(given, Agent):
        section = {"name": given.name, "model": _described(given.model), **_chat_template_keys(given)}
        return AgentRequest(section, given.model, given.tokenizer, given)
    if isinstance(given, Mapping):
        return _from_mapping(given, where)
    if isinstance(given, tuple | list) and len(given) == 2 and not isinstance(given[0], str):
        return _from_mapping({"model": given[0], "tokenizer": given[1]}, where)
    alone = "; a model needs its tokenizer: (model, tokenizer)" if hasattr(given, "generate") else ""
    raise ConfigError(f"agents: {where} is {type(given).__name__}; an agent is {_KINDS}{alone}")


def _from_mapping(given: Mapping[str, Any], where: str) -> AgentRequest:
    section = {key: plain_section(value) for key, value in given.items() if key != "tokenizer"}
    model, tokenizer = given.get("model"), given.get("tokenizer")
    if model is None or isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(f"agents: {where} has a tokenizer, but its model is not loaded: {model!r}")
        return AgentRequest(section if model is None else {**section, "model": str(model)})
    if not hasattr(model, "generate") or not hasattr(model, "config") or not callable(tokenizer):
        raise ConfigError(
            f"agents: {where} is ({type(model).__name__}, {type(tokenizer).__name__}); "
            "it must be a transformers causal language model and its tokenizer"
        )
    return AgentRequest({**section, "model": _described(model)}, model, tokenizer)


def _named(request: AgentRequest, name: str) -> AgentRequest:
    own = request.section.get("name", name)
    if own != name:
        raise ConfigError(f"agents: the entry {name!r} has the name {own!r}; use one name")
    return dataclasses.replace(request, section={**request.section, "name": name})


def _with_names(requests: Sequence[AgentRequest]) -> list[AgentRequest]:
    """Name unnamed agents after their models; add a number if the name is taken."""
    taken = {str(request.section["name"]).casefold() for request in requests if "name" in request.section}
    named = []
    for request in requests:
        if "name" not in request.section:
            base = _name_of(request)
            name, count = base, 1
            while name.casefold() in taken:
                count += 1
                name = f"{base}-{count}"
            taken.add(name.casefold())
            request = dataclasses.replace(request, section={"name": name, **request.section})
        named.append(request)
    return named


def _name_of(request: AgentRequest) -> str:
    """Return the last part of the model's id or path, or the architecture of a model without a path."""
    if request.model is not None:
        reference = getattr(request.model.config, "_name_or_path", "") or request.model.config.model_type
    else:
        endpoint = request.section.get("endpoint") or {}
        reference = str(request.section.get("model") or endpoint.get("model", ""))
    last = Path(reference.removeprefix(BUNDLED_PREFIX)).name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-") or "agent"


def _described(model: Any) -> str:
    """Describe a loaded model in config.yaml; such a run cannot be repeated from the file."""
    origin = getattr(model.config, "_name_or_path", "")
    return f"object:{type(model).__name__}" + (f" from {origin}" if origin else "")


def _chat_template_keys(agent: Agent) -> dict[str, Any]:
    """Return the config keys of the chat template that the agent already uses."""
    is_plain = agent.tokenizer.chat_template is not None and not agent.use_chat_template
    return {"chat_template": not is_plain, "chat_template_args": agent.chat_template_args}


def _check_models_differ(requests: Sequence[AgentRequest]) -> None:
    models = [id(request.model) for request in requests if request.model is not None]
    if len(set(models)) < len(models):
        raise ConfigError("agents: two agents share one model object; each needs its own to be trained")


def _check_keys_of_loaded_model(settings: AgentSettings) -> None:
    for key in plain_section(settings):
        if key not in _KEYS_OF_LOADED_MODELS:
            raise ConfigError(
                f"agents.{settings.name}.{key}: this key applies when hacrl loads the model, but it is "
                "loaded already; change the model yourself, or give its name or folder instead"
            )


def _wrap(request: AgentRequest, settings: AgentSettings) -> Agent:
    from hacrl.models.agent import Agent

    model, tokenizer = request.model, request.tokenizer
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer has no eos_token, so that no response could end"
        )
    largest, embeddings = max(tokenizer.get_vocab().values()), model.get_input_embeddings().num_embeddings
    if largest >= embeddings:
        raise ModelError(
            f"agent {settings.name!r}: the tokenizer has token {largest}, but the model has only "
            f"{embeddings} embeddings: they do not belong together"
        )
    if not settings.frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"agent {settings.name!r}: every weight of the model is frozen (requires_grad)")
    model.eval()  # with dropout, the learner's policy would differ from the sampler's
    return Agent(settings.name, model, tokenizer, settings.chat_template, settings.chat_template_args)
