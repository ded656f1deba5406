"""Ask an endpoint one question before a run begins: does it answer, and with log-probabilities of use?"""

from __future__ import annotations

import os

from hacrl.config.checks import without_logprobs
from hacrl.config.endpoint import EndpointSettings
from hacrl.config.schema import RunConfig
from hacrl.engines.endpoint.client import EndpointError, TooFewRepliesError
from hacrl.engines.endpoint.endpoint import Endpoint
from hacrl.engines.endpoint.replies import Reply
from hacrl.errors import ConfigError
from hacrl.seeding import derive_seed
from hacrl.types import Problem


def open_endpoint(config: RunConfig, name: str, settings: EndpointSettings, problem: Problem) -> Endpoint:
    """Return the endpoint after it has answered ``problem``.

    Raise ConfigError if it does not answer, or if the method needs log-probabilities that it does not give.
    """
    key = None
    if settings.api_key_env is not None:
        key = os.environ.get(settings.api_key_env)
        if not key:
            raise ConfigError(
                f"agents.{name}.endpoint.api_key_env: the environment variable {settings.api_key_env} is not "
                "set in the process that asks the endpoint"
            )
    endpoint = Endpoint(name, settings, key)
    why_not = _decide_logprobs(config, endpoint, problem)
    if why_not is None:
        return endpoint
    endpoint.uses_logprobs = False
    if settings.logprobs is True:
        raise ConfigError(f"agents.{name}.endpoint.logprobs=true, but {why_not}")
    if config.method.needs_source_logprobs:
        raise ConfigError(without_logprobs(config, name, f"logprobs: {why_not}"))
    if settings.logprobs == "auto":
        endpoint.notes.append(
            f"agent {name!r} is used without log-probabilities, which method.name={config.method.name!r} "
            f"does not need: {why_not}"
        )
    return endpoint


def _decide_logprobs(config: RunConfig, endpoint: Endpoint, problem: Problem) -> str | None:
    """Ask one question. Return why the endpoint is of no use for log-probabilities; None if it is of use."""
    setting, sampling = endpoint.settings.logprobs, config.rollout.sampling
    is_plain = (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
    if setting == "auto" and not is_plain:
        endpoint.uses_logprobs = False
        _ask(config, endpoint, problem)
        return (
            "rollout.temperature, top_k or top_p change what is sampled from, while endpoints usually report "
            "log-probabilities without them (logprobs=true takes them as they are)"
        )
    try:
        reply = _ask(config, endpoint, problem)
    except EndpointRefusedError:
        if setting != "auto":
            raise
        endpoint.uses_logprobs = False  # some endpoints refuse to be asked for log-probabilities
        _ask(config, endpoint, problem)
        return f"{endpoint.settings.url} refuses requests for them"
    if setting is False:
        return "they are not asked for"
    if not reply.logprobs:
        return f"{endpoint.settings.url} returned none that belong to its text"
    if not is_plain:
        endpoint.notes.append(
            f"agent {endpoint.name!r}: its log-probabilities are taken to be those of the distribution that "
            "is sampled from, with rollout.temperature, top_k and top_p"
        )
    return None


class EndpointRefusedError(ConfigError):
    """An endpoint that does not answer the first question."""


def _ask(config: RunConfig, endpoint: Endpoint, problem: Problem) -> Reply:
    seed = derive_seed(config.seed, "trial", endpoint.name)
    try:
        ((reply,),) = endpoint.ask([problem], 1, config.rollout.sampling, seed, lambda _: None)
    except TooFewRepliesError as error:
        raise EndpointRefusedError(
            f"agents.{endpoint.name}.endpoint: {endpoint.settings.url} did not answer a first question: "
            f"{error.reasons}"
        ) from error
    except EndpointError as error:
        raise ConfigError(str(error)) from error
    return reply
