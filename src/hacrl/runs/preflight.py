"""What can be checked of a run before anything is written and before any weights are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError, ModelError, TaskError
from hacrl.models.device import agent_device, check_device
from hacrl.models.loading import load_text_codec
from hacrl.models.model_sources import resolve_model
from hacrl.models.tokenizing import TextCodec
from hacrl.tasks.base import CheckedTask, SelfTesting, Task
from hacrl.tasks.stream import ProblemStream
from hacrl.types import Problem

LOOKED_AT = 100  # problems
MUCH = 0.1  # of the prompts' tokens


def preflight(config: RunConfig, task: Task, loaded: Mapping[str, TextCodec] | None = None) -> CheckedTask:
    """Models that can be found, devices that are there, tokenizers that can stop, problems that fit."""
    devices = check_agents(config, loaded or ())
    check_sizes(config, task)
    check_ids(task)
    if isinstance(task, SelfTesting):
        task.self_test()
    codecs = [(loaded or {}).get(agent.name) or load_text_codec(agent) for agent in config.agents]
    train, left_out = fitting_problems(config, task.train, codecs, "training", config.rollout.max_new_tokens)
    if len(train) < config.rollout.prompts_per_step:
        raise TaskError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step}, but only {len(train)} of "
            f"{len(task.train)} training problems are not longer than rollout.max_prompt_tokens="
            f"{config.rollout.max_prompt_tokens}; raise that, or ask for fewer"
        )
    new_tokens = config.evaluation.sampling(config.rollout.max_new_tokens).max_new_tokens
    held_out = task.test[: config.evaluation.most_problems]
    test, test_left_out = fitting_problems(config, held_out, codecs, "held-out", new_tokens)
    notes = [*getattr(task, "notes", ()), *left_out, *test_left_out, *unreadable(codecs, train)]
    if config.evaluation.problems is None and not task.test:
        notes.append(f"task {task.name!r} holds out no problems, so the agents are not evaluated")
    return CheckedTask(task, train, test, devices, tuple(notes))


def check_agents(config: RunConfig, loaded: Collection[str]) -> dict[str, str]:
    """Agent -> device; every reference that is not a hub id must exist."""
    devices = {}
    for agent in config.agents:
        if agent.name not in loaded:
            try:
                resolve_model(agent.model)
            except ModelError as error:
                raise ConfigError(f"agents.{agent.name}.{error}") from error
        devices[agent.name] = agent_device(config, agent)
        check_device(devices[agent.name], "device" if agent.device is None else f"agents.{agent.name}.device")
    return devices


def check_sizes(config: RunConfig, task: Task) -> None:
    """Enough problems for a step and for the evaluation."""
    ProblemStream(task.train, config.rollout.prompts_per_step, config.seed)
    asked = config.evaluation.problems
    if asked is not None and asked > len(task.test):
        raise ConfigError(
            f"evaluation.problems={asked}, but task {task.name!r} holds out only {len(task.test)} problems; "
            "ask for fewer, leave it out to use what there is, or hold out more"
        )


def check_ids(task: Task) -> None:
    """Ids name problems: what is tested on is not learnt from, and responses are grouped by them."""
    seen: dict[str, str] = {}
    for kind, problems in (("training", task.train), ("held-out", task.test)):
        for problem in problems:
            if problem.id in seen:
                raise TaskError(
                    f"task {task.name!r}: the id {problem.id[:80]!r} stands for a {seen[problem.id]} and a "
                    f"{kind} problem; every problem needs an id of its own, and none may be in both"
                )
            seen[problem.id] = kind


def fitting_problems(
    config: RunConfig, problems: Sequence[Problem], codecs: Sequence[TextCodec], kind: str, new_tokens: int
) -> tuple[Sequence[Problem], list[str]]:
    """The problems every agent has room for. All are asked the same, so one that is too long goes for all."""
    longest = config.rollout.max_prompt_tokens
    kept, left_out = [], 0
    for problem in problems:
        lengths = [len(codec.encode_prompt(problem)) for codec in codecs]
        if longest is not None and max(lengths) > longest:
            left_out += 1
            continue
        for codec, length in zip(codecs, lengths, strict=True):
            if codec.context_length is not None and length + new_tokens > codec.context_length:
                raise TaskError(_does_not_fit(problem, kind, codec, length, new_tokens))
        kept.append(problem)
    if not left_out:
        return problems, []
    note = (
        f"{left_out} {kind} problems left out: longer than rollout.max_prompt_tokens={longest} for an agent"
    )
    return kept, [note]


def unreadable(codecs: Sequence[TextCodec], problems: Sequence[Problem]) -> list[str]:
    """A note on each agent for which much of the prompts is one token that stands for anything."""
    notes = []
    for codec in codecs:
        unknown = getattr(codec.tokenizer, "unk_token_id", None)
        if unknown is None or unknown in codec.stop_ids:  # some give this role to their end of text
            continue
        prompts = [codec.encode_prompt(problem) for problem in problems[:LOOKED_AT]]
        share = sum(ids.count(unknown) for ids in prompts) / sum(map(len, prompts))
        if share > MUCH:
            notes.append(
                f"agent {codec.name!r} cannot read the prompts: {share:.0%} of their tokens are unknown to "
                "its tokenizer"
            )
    return notes


def _does_not_fit(problem: Problem, kind: str, codec: TextCodec, length: int, new_tokens: int) -> str:
    assert codec.context_length is not None
    room = codec.context_length - new_tokens
    shorter = "lower rollout.max_new_tokens" if kind == "training" else "lower evaluation.max_new_tokens"
    fix = (
        f"set rollout.max_prompt_tokens={room} to leave such problems out, or {shorter}"
        if room > 0
        else shorter
    )
    return (
        f"{kind} problem {problem.id[:80]!r} is {length} tokens long for agent {codec.name!r}; with "
        f"max_new_tokens={new_tokens} it needs {length + new_tokens}, the model's context has "
        f"{codec.context_length}: {fix}"
    )
