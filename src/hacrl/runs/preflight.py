"""Check a run before anything is written and before any weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec

from hacrl.config.schema import EndpointSettings, RunConfig
from hacrl.errors import ConfigError, ModelError, TaskError
from hacrl.executors.registry import chosen_devices
from hacrl.models.architecture import architecture_support, check_architecture, loads_text_part
from hacrl.models.device import agent_device, check_device, rank_devices
from hacrl.models.loading import load_model_config, load_text_codec
from hacrl.models.lora import needs_peft
from hacrl.models.model_sources import resolve_model
from hacrl.models.tokenizing import TextCodec
from hacrl.runs.fitting import fit_problems
from hacrl.runs.response_length import response_length_warnings
from hacrl.tasks.base import CheckedTask, SelfTesting, Task
from hacrl.tasks.stream import ProblemStream
from hacrl.training.health.tokenizers import prompt_token_notes
from hacrl.training.lr_schedule import LearningRateSchedule
from hacrl.types import Problem

SAMPLED_PROBLEMS = 100  # training problems whose prompts are searched for unknown tokens
UNKNOWN_SHARE_LIMIT = 0.1  # a larger share of unknown tokens in the prompts is noted


def preflight(config: RunConfig, task: Task, loaded: Mapping[str, TextCodec] | None = None) -> CheckedTask:
    """Check models, devices, tokenizers and problems; return the problems that fit, devices and notes."""
    devices = check_agents(config, loaded or ())
    check_task(config, task)
    check_single_turns(config, task)
    codecs = [(loaded or {}).get(agent.name) or load_text_codec(agent) for agent in config.local_agents]
    held_out = task.test[: config.evaluation.most_problems]
    fitting = fit_problems(config, task.train, held_out, codecs)
    notes = [*getattr(task, "notes", ()), *fitting.notes, *unknown_token_notes(codecs, fitting.train)]
    notes += architecture_notes(config, loaded or {})
    notes += prompt_token_notes(codecs, fitting.train)
    if config.evaluation.problems is None and not task.test:
        notes.append(f"task {task.name!r} holds out no problems, so the agents are not evaluated")
    notes += LearningRateSchedule.of(config).notes
    notes += frozen_notes(config)
    warnings = response_length_warnings(config, task, fitting.train, codecs)
    return CheckedTask(task, fitting.train, fitting.test, devices, tuple(notes), tuple(warnings))


def check_agents(config: RunConfig, loaded: Collection[str]) -> dict[str, str]:
    """Check that all devices, local models and packages exist; return agent -> device."""
    chosen = chosen_devices(config)
    is_placed, devices = chosen is not None, chosen or {}
    for agent in config.agents:
        if agent.endpoint is not None:
            check_endpoint(agent.name, agent.endpoint)
            devices[agent.name] = devices.get(agent.name, "cpu")
            continue
        if agent.name not in loaded:
            try:
                resolve_model(agent.model)
            except ModelError as error:
                raise ConfigError(f"agents.{agent.name}.{error}") from error
            if agent.lora is not None and find_spec("peft") is None:
                raise ConfigError(needs_peft(agent.name))
        elif agent.replicas.count > 1:
            raise ConfigError(
                f"agents.{agent.name}.replicas.count={agent.replicas.count}: every copy has a process that "
                "builds the model anew, so the agent's model must be a name or a folder, not an object; or "
                "use one copy"
            )
        if not is_placed:
            devices[agent.name] = agent_device(config, agent)
            key = "device" if agent.device is None else f"agents.{agent.name}.device"
            check_device(devices[agent.name], key)
            for number, device in enumerate(agent.replicas.devices or ()):
                check_device(device, f"agents.{agent.name}.replicas.devices[{number}]")
    check_ranks(config, loaded)
    if not is_placed:
        check_rank_devices(config, devices)
    return devices


def check_endpoint(agent: str, endpoint: EndpointSettings) -> None:
    """Check that an endpoint can be asked: the client is installed and the key is there."""
    if find_spec("aiohttp") is None:
        raise ConfigError(f"agents.{agent}.endpoint needs aiohttp: pip install 'hacrl[server]'")
    if endpoint.api_key_env is not None and not os.environ.get(endpoint.api_key_env):
        raise ConfigError(
            f"agents.{agent}.endpoint.api_key_env: the environment variable {endpoint.api_key_env} is not "
            f"set; export {endpoint.api_key_env}=KEY, or leave api_key_env out for an endpoint without a key"
        )


def check_single_turns(config: RunConfig, task: Task) -> None:
    """Check that no endpoint is asked to play an episode."""
    for agent in config.agents:
        if agent.endpoint is not None and any(one.environment for one in (*task.train, *task.test)):
            raise ConfigError(
                f"agents.{agent.name}.endpoint: an endpoint answers single turns, and task {task.name!r} has "
                "an environment with several; use a local model with frozen: true"
            )


def check_ranks(config: RunConfig, loaded: Collection[str]) -> None:
    """Check that agents with several ranks can be sharded."""
    for agent in config.agents:
        if agent.ranks == 1:
            continue
        key = f"agents.{agent.name}.ranks"
        if agent.name in loaded:
            raise ConfigError(
                f"{key}={agent.ranks}: every rank loads its share of the model, so the agent's model must be "
                "a name or a folder, not an object"
            )
        if config.learning.compile:
            raise ConfigError(
                f"learning.compile=true, but layers of an agent with several ranks are not compiled ({key}="
                f"{agent.ranks}): leave compile out, or set it to false"
            )


def check_rank_devices(config: RunConfig, devices: Mapping[str, str]) -> None:
    """Check that every rank has a device, on a GPU one that no other agent learns on."""
    for agent in config.agents:
        if agent.ranks == 1:
            continue
        key = f"agents.{agent.name}.ranks"
        own = rank_devices(devices[agent.name], agent.ranks)
        for device in own:
            check_device(device, key)
        for other in config.agents:
            shared = set(own) & set(rank_devices(devices[other.name], other.ranks)) - {"cpu"}
            if other.name != agent.name and shared:
                raise ConfigError(
                    f"{key}={agent.ranks} takes {own[0]} to {own[-1]}, and agent {other.name!r} is on "
                    f"{min(shared)} too: set agents.{other.name}.device to another GPU"
                )


def check_task(config: RunConfig, task: Task) -> None:
    """Check the task's problems, and try its code."""
    check_problem_counts(config, task)
    check_problem_ids(task)
    if isinstance(task, SelfTesting):
        task.self_test()


def check_problem_counts(config: RunConfig, task: Task) -> None:
    """Check that there are enough problems for a step and for the evaluation."""
    ProblemStream(task.train, config.rollout.prompts_per_step, config.seed)
    requested = config.evaluation.problems
    if requested is not None and requested > len(task.test):
        raise ConfigError(
            f"evaluation.problems={requested}, but task {task.name!r} holds out only {len(task.test)} "
            "problems; lower it, leave it out to use all of them, or hold out more"
        )


def check_problem_ids(task: Task) -> None:
    """Check that every problem id is unique: ids group responses and keep test problems out of training."""
    seen: dict[str, str] = {}
    for kind, problems in (("training", task.train), ("held-out", task.test)):
        for problem in problems:
            if problem.id in seen:
                raise TaskError(
                    f"task {task.name!r}: a {seen[problem.id]} and a {kind} problem have the same id "
                    f"{problem.id[:80]!r}; every problem needs its own id, and no problem may be in both sets"
                )
            seen[problem.id] = kind


def architecture_notes(config: RunConfig, loaded: Mapping[str, TextCodec]) -> list[str]:
    """Return notes on agents that cannot pack sequences, or that are only a part of their model.

    Raise ModelError for a loaded model that cannot be an agent; others were checked with their tokenizers.
    """
    notes = []
    for agent in config.local_agents:
        model = getattr(loaded.get(agent.name), "model", None)
        model_config = load_model_config(agent) if model is None else model.config
        if model is not None:
            check_architecture(agent.name, agent.model, model_config)
        support = architecture_support(model_config, agent.attention)
        if support.path == "plain" and not agent.frozen:
            notes.append(
                f"agent {agent.name!r} trains plainly, without packed sequences and shared prompts, which is "
                f"slower ({model_config.model_type}: {support.reason})"
            )
        if model is None and loads_text_part(model_config):
            notes.append(
                f"agent {agent.name!r}: only the text part of {agent.model!r} is loaded, trained and saved"
            )
    return notes


def frozen_notes(config: RunConfig) -> list[str]:
    """Return a note if frozen agents are sampled and the method makes no use of it."""
    frozen = [agent.name for agent in config.agents if agent.frozen]
    if not frozen or config.method.uses_other_agents:
        return []
    return [
        f"method.name={config.method.name!r}: no agent learns from another one, so the frozen agents "
        f"({', '.join(frozen)}) are sampled for nothing; leave them out, or use a method that shares rollouts"
    ]


def unknown_token_notes(codecs: Sequence[TextCodec], problems: Sequence[Problem]) -> list[str]:
    """Return a note on each agent whose tokenizer maps a large share of the prompts to its unknown token."""
    notes = []
    for codec in codecs:
        unknown = getattr(codec.tokenizer, "unk_token_id", None)
        if unknown is None or unknown in codec.stop_ids:  # some tokenizers reuse the end-of-text token
            continue
        prompts = codec.encode_prompts(problems[:SAMPLED_PROBLEMS])
        share = sum(ids.count(unknown) for ids in prompts) / sum(map(len, prompts))
        if share > UNKNOWN_SHARE_LIMIT:
            notes.append(
                f"agent {codec.name!r} cannot read the prompts: {share:.0%} of their tokens are unknown to "
                "its tokenizer"
            )
    return notes
