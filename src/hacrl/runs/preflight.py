"""Check a run before anything is written and before any weights are loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec

from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError, ModelError, TaskError
from hacrl.models.device import agent_device, check_device
from hacrl.models.loading import load_text_codec
from hacrl.models.lora import needs_peft
from hacrl.models.model_sources import resolve_model
from hacrl.models.tokenizing import TextCodec
from hacrl.tasks.base import CheckedTask, SelfTesting, Task
from hacrl.tasks.stream import ProblemStream
from hacrl.training.lr_schedule import LearningRateSchedule
from hacrl.types import Problem

SAMPLED_PROBLEMS = 100  # training problems whose prompts are searched for unknown tokens
UNKNOWN_SHARE_LIMIT = 0.1  # a larger share of unknown tokens in the prompts is noted


def preflight(config: RunConfig, task: Task, loaded: Mapping[str, TextCodec] | None = None) -> CheckedTask:
    """Check models, devices, tokenizers and problems; return the problems that fit, devices and notes."""
    devices = check_agents(config, loaded or ())
    check_problem_counts(config, task)
    check_problem_ids(task)
    if isinstance(task, SelfTesting):
        task.self_test()
    codecs = [(loaded or {}).get(agent.name) or load_text_codec(agent) for agent in config.agents]
    train, left_out = keep_fitting_problems(
        config, task.train, codecs, "training", config.rollout.max_new_tokens
    )
    if len(train) < config.rollout.prompts_per_step:
        raise TaskError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step}, but only {len(train)} of "
            f"{len(task.train)} training problems are not longer than rollout.max_prompt_tokens="
            f"{config.rollout.max_prompt_tokens}; raise max_prompt_tokens or lower prompts_per_step"
        )
    new_tokens = config.evaluation.sampling(config.rollout.max_new_tokens).max_new_tokens
    held_out = task.test[: config.evaluation.most_problems]
    test, test_left_out = keep_fitting_problems(config, held_out, codecs, "held-out", new_tokens)
    notes = [*getattr(task, "notes", ()), *left_out, *test_left_out, *unknown_token_notes(codecs, train)]
    if config.evaluation.problems is None and not task.test:
        notes.append(f"task {task.name!r} holds out no problems, so the agents are not evaluated")
    notes += LearningRateSchedule.of(config).notes
    return CheckedTask(task, train, test, devices, tuple(notes))


def check_agents(config: RunConfig, loaded: Collection[str]) -> dict[str, str]:
    """Check that all devices, local models and packages exist; return agent -> device."""
    devices = {}
    for agent in config.agents:
        if agent.name not in loaded:
            try:
                resolve_model(agent.model)
            except ModelError as error:
                raise ConfigError(f"agents.{agent.name}.{error}") from error
            if agent.lora is not None and find_spec("peft") is None:
                raise ConfigError(needs_peft(agent.name))
        devices[agent.name] = agent_device(config, agent)
        check_device(devices[agent.name], "device" if agent.device is None else f"agents.{agent.name}.device")
    return devices


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


def keep_fitting_problems(
    config: RunConfig, problems: Sequence[Problem], codecs: Sequence[TextCodec], kind: str, new_tokens: int
) -> tuple[Sequence[Problem], list[str]]:
    """Return the problems whose prompts fit every agent, and a note on the others.

    A prompt that is too long for one agent is dropped for all, because all agents get the same problems.
    """
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
        f"{left_out} {kind} problems are left out: their prompts are longer than "
        f"rollout.max_prompt_tokens={longest} for at least one agent"
    )
    return kept, [note]


def unknown_token_notes(codecs: Sequence[TextCodec], problems: Sequence[Problem]) -> list[str]:
    """Return a note on each agent whose tokenizer maps a large share of the prompts to its unknown token."""
    notes = []
    for codec in codecs:
        unknown = getattr(codec.tokenizer, "unk_token_id", None)
        if unknown is None or unknown in codec.stop_ids:  # some tokenizers reuse the end-of-text token
            continue
        prompts = [codec.encode_prompt(problem) for problem in problems[:SAMPLED_PROBLEMS]]
        share = sum(ids.count(unknown) for ids in prompts) / sum(map(len, prompts))
        if share > UNKNOWN_SHARE_LIMIT:
            notes.append(
                f"agent {codec.name!r} cannot read the prompts: {share:.0%} of their tokens are unknown to "
                "its tokenizer"
            )
    return notes


def _does_not_fit(problem: Problem, kind: str, codec: TextCodec, length: int, new_tokens: int) -> str:
    assert codec.context_length is not None
    prompt_limit = codec.context_length - new_tokens
    shorter = "lower rollout.max_new_tokens" if kind == "training" else "lower evaluation.max_new_tokens"
    fix = (
        f"set rollout.max_prompt_tokens={prompt_limit} to leave such problems out, or {shorter}"
        if prompt_limit > 0
        else shorter
    )
    return (
        f"{kind} problem {problem.id[:80]!r} is {length} tokens long for agent {codec.name!r}; with "
        f"max_new_tokens={new_tokens} it needs {length + new_tokens} tokens, but the model's context length "
        f"is {codec.context_length}: {fix}"
    )
