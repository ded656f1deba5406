"""Keep the problems whose prompts fit every agent, or say which settings make them fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.config.schema import RunConfig
from hacrl.errors import TaskError
from hacrl.models.tokenizing import TextCodec
from hacrl.types import Problem


@dataclass(frozen=True)
class Fitting:
    """The problems that a run uses, and notes on those that ``rollout.max_prompt_tokens`` leaves out."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Prompt:
    """One problem and the length of its prompt for each agent."""

    problem: Problem
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Its length for the agent that needs the most tokens."""
        return max(self.lengths)


@dataclass(frozen=True)
class _Split:
    """Training or held-out problems, and how long responses to them may be."""

    kind: str
    prompts: tuple[_Prompt, ...]
    new_tokens: int
    setting: str  # that says so

    def room(self, prompt: _Prompt, codecs: Sequence[TextCodec]) -> int | None:
        """Return the most new tokens that fit every agent after the prompt; None: there is no limit."""
        rooms = [
            codec.context_length - length
            for codec, length in zip(codecs, prompt.lengths, strict=True)
            if codec.context_length is not None
        ]
        return min(rooms, default=None)

    def too_long(self, codecs: Sequence[TextCodec]) -> list[_Prompt]:
        """Return the prompts that leave some agent too little room."""
        rooms = [(prompt, self.room(prompt, codecs)) for prompt in self.prompts]
        return [prompt for prompt, room in rooms if room is not None and room < self.new_tokens]


def fit_problems(
    config: RunConfig, train: Sequence[Problem], test: Sequence[Problem], codecs: Sequence[TextCodec]
) -> Fitting:
    """Return the problems whose prompts are not longer than ``rollout.max_prompt_tokens`` for any agent.

    A prompt that is too long for one agent is left out for all, because all agents get the same problems.
    Raise TaskError if a prompt that is left does not fit some agent's context beside a whole response, or if
    fewer problems are left than a step needs.
    """
    rollout, evaluation = config.rollout, config.evaluation
    if _all_fit(config, train, test, codecs):
        return Fitting(train, test, ())
    own = evaluation.max_new_tokens is not None
    splits = (
        _Split("training", _prompts(train, codecs), rollout.max_new_tokens, "rollout.max_new_tokens"),
        _Split(
            "held-out",
            _prompts(test, codecs),
            evaluation.sampling(rollout.sampling).max_new_tokens,
            "evaluation.max_new_tokens" if own else "rollout.max_new_tokens",
        ),
    )
    kept = [_without_long(split, rollout.max_prompt_tokens) for split in splits]
    if any(split.too_long(codecs) for split in kept):
        raise TaskError(_does_not_fit(config, kept, codecs))
    if len(kept[0].prompts) < rollout.prompts_per_step:
        raise TaskError(_too_few(config, splits[0], len(kept[0].prompts)))
    notes = tuple(
        f"{left_out} {split.kind} problems are left out: their prompts are longer than "
        f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} for at least one agent"
        for split, short in zip(splits, kept, strict=True)
        if (left_out := len(split.prompts) - len(short.prompts))
    )
    if not notes:
        return Fitting(train, test, ())
    fitting = [[prompt.problem for prompt in split.prompts] for split in kept]
    return Fitting(fitting[0], fitting[1], notes)


def _all_fit(
    config: RunConfig, train: Sequence[Problem], test: Sequence[Problem], codecs: Sequence[TextCodec]
) -> bool:
    """Return whether nothing is left out. That takes the longest prompts alone, which are found quickly."""
    rollout, evaluation = config.rollout, config.evaluation.sampling(config.rollout.sampling)
    if rollout.max_prompt_tokens is not None or len(train) < rollout.prompts_per_step:
        return False
    return all(
        codec.longest_prompt(problems) + new_tokens <= (codec.context_length or math.inf)
        for codec in codecs
        for problems, new_tokens in ((train, rollout.max_new_tokens), (test, evaluation.max_new_tokens))
    )


def _prompts(problems: Sequence[Problem], codecs: Sequence[TextCodec]) -> tuple[_Prompt, ...]:
    encoded = [codec.encode_prompts(problems) for codec in codecs]
    return tuple(
        _Prompt(problem, tuple(map(len, prompts)))
        for problem, prompts in zip(problems, zip(*encoded, strict=True), strict=True)
    )


def _without_long(split: _Split, longest: int | None) -> _Split:
    kept = tuple(prompt for prompt in split.prompts if longest is None or prompt.longest <= longest)
    return _Split(split.kind, kept, split.new_tokens, split.setting)


def _too_few(config: RunConfig, split: _Split, kept: int) -> str:
    """Return the message for a limit that leaves fewer problems than a step needs."""
    rollout = config.rollout
    lengths = sorted(prompt.longest for prompt in split.prompts)
    enough = lengths[rollout.prompts_per_step - 1]
    return (
        f"rollout.prompts_per_step={rollout.prompts_per_step}, but only {kept} of {len(lengths)} training "
        f"problems are not longer than rollout.max_prompt_tokens={rollout.max_prompt_tokens}; raise "
        f"max_prompt_tokens to {enough} or more ({lengths[-1]} keeps all), or lower prompts_per_step"
    )


def _does_not_fit(config: RunConfig, splits: Sequence[_Split], codecs: Sequence[TextCodec]) -> str:
    """Return how many problems do not fit, the worst of them, and the settings that work."""
    counts = " and ".join(
        f"{len(split.too_long(codecs)):,} of {len(split.prompts):,} {split.kind} problems"
        for split in splits
        if split.too_long(codecs)
    )
    fixes = _shorter_responses(splits, codecs)
    fixes += _shorter_prompts(config, splits, codecs, is_last_resort=not fixes)
    fix = "; or ".join(fixes) or "no setting helps: use shorter prompts, or models with a longer context"
    return f"{counts} do not fit the agents' contexts. {_worst(splits, codecs)}: {fix}"


def _worst(splits: Sequence[_Split], codecs: Sequence[TextCodec]) -> str:
    """Return a sentence on the prompt that exceeds an agent's context by the most tokens."""
    prompts = [
        (codec.context_length - length - split.new_tokens, length, codec, split, prompt.problem)
        for split in splits
        for prompt in split.prompts
        for codec, length in zip(codecs, prompt.lengths, strict=True)
        if codec.context_length is not None
    ]
    _, length, codec, split, problem = min(prompts, key=lambda found: found[0])
    return (
        f"The longest is {split.kind} problem {problem.id[:80]!r} with {length} tokens for agent "
        f"{codec.name!r}: with {split.setting}={split.new_tokens} it needs {length + split.new_tokens}, but "
        f"the model's context length is {codec.context_length}"
    )


def _shorter_responses(splits: Sequence[_Split], codecs: Sequence[TextCodec]) -> list[str]:
    """Return the settings with which all problems fit, if responses can be so short."""
    limits: dict[str, int] = {}
    for split in splits:
        if split.too_long(codecs):
            rooms = [room for prompt in split.prompts if (room := split.room(prompt, codecs)) is not None]
            limits[split.setting] = min(*rooms, limits.get(split.setting, split.new_tokens))
    if min(limits.values()) < 1:
        return []
    return [f"set {' and '.join(f'{key}={limit}' for key, limit in limits.items())} to keep all problems"]


def _shorter_prompts(
    config: RunConfig, splits: Sequence[_Split], codecs: Sequence[TextCodec], *, is_last_resort: bool
) -> list[str]:
    """Return the limit on prompts that leaves out no more problems than it must, if it leaves enough.

    A limit that leaves nothing to evaluate on is a last resort.
    """
    limit = min(prompt.longest for split in splits for prompt in split.too_long(codecs)) - 1
    kept = [sum(prompt.longest <= limit for prompt in split.prompts) for split in splits]
    loses_evaluation = bool(splits[1].prompts) and not kept[1]
    if kept[0] < config.rollout.prompts_per_step or (loses_evaluation and not is_last_resort):
        return []
    counts = " and ".join(
        f"{count:,} of {len(split.prompts):,} {split.kind}"
        for count, split in zip(kept, splits, strict=True)
        if split.prompts
    )
    return [f"set rollout.max_prompt_tokens={limit} to keep {counts} problems"]
