"""Which engine generates an agent's responses, checked early and made late."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.engines.base import RolloutEngine
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import ConfigError
from hacrl.models.agent import Agent
from hacrl.seeding import derive_seed
from hacrl.tasks.base import CheckedTask

ENGINE_FOLDER = "engines"  # in a run's folder: logs, and what servers start from


def check_engines(config: RunConfig) -> None:
    """Before models load: what the agents' engines need is there."""
    asked = [agent for agent in config.agents if config.engine(agent) == "vllm"]
    urls = [agent.vllm.url.rstrip("/") for agent in asked if agent.vllm.url]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(
                f"agents: two agents have vllm.url {url}; every agent needs a server of its own"
            )
    for agent in asked:
        from hacrl.engines.vllm.checks import check_vllm

        check_vllm(agent.name, agent.vllm)


def engine_notes(config: RunConfig, devices: Mapping[str, str]) -> tuple[str, ...]:
    """What the user should know of engines that hacrl is to start, by the agents' devices."""
    started = [agent for agent in config.agents if config.engine(agent) == "vllm" and agent.vllm.url is None]
    if not started:
        return ()
    from hacrl.engines.vllm.checks import PROCESSOR_LIMIT, processor_limit
    from hacrl.engines.vllm.launch import runs_on_cpu

    names = [one.name for one in started if not runs_on_cpu(torch.device(devices[one.name]), one.vllm)]
    limit = processor_limit()
    if not names or limit is None:
        return ()
    # no error: other GPUs and versions may compute as they should
    note = (
        f"{PROCESSOR_LIMIT}={limit} would limit the vLLM engines of {', '.join(names)}. On an H200, vLLM's "
        "log-probabilities were wrong by nats under such a limit, and responses that disagree with the "
        "learner are refused: unset it"
    )
    return (note,)


def make_engine(
    config: RunConfig, settings: AgentSettings, agent: Agent, checked: CheckedTask
) -> RolloutEngine:
    """The agent's engine; one that runs elsewhere is started when it is first needed."""
    if config.engine(settings) == "transformers":
        return TransformersEngine(agent, config.rollout.max_batch, compiles=config.rollout.compile)
    from hacrl.engines.sync_check import PROBED_PROMPTS
    from hacrl.engines.vllm.launch import make_vllm_engine

    folder = Path(config.output) / ENGINE_FOLDER / agent.name
    probes = (checked.train or checked.test)[:PROBED_PROMPTS]
    longest, most = longest_exchange(config, agent, checked), settings.vllm.max_length
    if most is not None and most < longest:
        raise ConfigError(
            f"agents.{agent.name}.vllm.max_length={most}, but the longest prompt and a full response are "
            f"{longest} tokens; raise it or leave it out"
        )
    return make_vllm_engine(agent, settings.vllm, probes, longest, folder, engine_seed(config, agent.name))


def engine_seed(config: RunConfig, agent: str) -> int:
    """Of an agent's engine, in this run."""
    return derive_seed(config.seed, "engine", agent)


def longest_exchange(config: RunConfig, agent: Agent, checked: CheckedTask) -> int:
    """Tokens of the longest prompt with a response of full length, over training and evaluation."""
    training, evaluation = config.rollout.sampling, config.evaluation.sampling(config.rollout.max_new_tokens)
    parts = [(checked.train, training.max_new_tokens), (checked.test, evaluation.max_new_tokens)]
    lengths = [
        len(agent.encode_prompt(problem)) + new_tokens
        for problems, new_tokens in parts
        for problem in problems
    ]
    return max(lengths)
