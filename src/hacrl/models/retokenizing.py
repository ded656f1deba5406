"""Convert other agents' rollouts to the learner's tokens.

A rollout that cannot be converted exactly is dropped as a whole, and the reason is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from hacrl.models.tokenizing import BROKEN_CHARACTER, PlainIds, TextCodec
from hacrl.types import FinishReason, Rollout, full_loss_mask

DropReason = Literal[
    "too_long", "not_representable", "non_finite", "empty", "truncated", "environment_failed", "no_logprobs"
]


@dataclass(frozen=True, slots=True)
class LearnerTokens:
    """One response in the learner's tokens; ``reused`` if these are the source's own token ids."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    reused: bool
    loss_mask: tuple[bool, ...] = ()  # per response token: True for action tokens; default: all True
    # where stop tokens end actions, in order; an episode has several actions
    stops: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_mask", full_loss_mask(self.response_ids, self.loss_mask))


@dataclass(frozen=True, slots=True)
class _Cache:
    """Texts that were already encoded with one tokenizer."""

    plain: PlainIds = field(default_factory=dict)
    # (control tokens, prompt, text) -> the text's tokens as a continuation of the prompt
    continuations: dict[tuple[frozenset[int], tuple[int, ...], str], tuple[int, ...] | None] = field(
        default_factory=dict
    )


class Retokeniser:
    """Converts rollouts to learners' tokens in batches, and encodes every text of a step once.

    Learners that share a Retokeniser and have the same tokenizer also share encoded texts. Their chat
    templates and stop tokens may differ.
    """

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}  # by tokenizer fingerprint
        self._rollouts: object = None

    def start_step(self, rollouts: object) -> None:
        """Clear the cache, unless these are the same rollouts (the same object) as in the last call."""
        if rollouts is not self._rollouts:
            self._caches.clear()
            self._rollouts = rollouts

    def tokens(
        self, learner: TextCodec, rollouts: Sequence[Rollout], same_tokenizer: Sequence[bool]
    ) -> list[LearnerTokens | DropReason]:
        """Return each whole rollout in the learner's tokens, or the reason why it cannot be used.

        An episode's tokens are the source's own if tokenizer and dialect are the same. Otherwise the
        learner's dialect writes its turns: tool calls in the learner's format, observations as the learner's
        chat template has them.
        """
        reused = [
            same and (rollout.episode is None or rollout.episode.dialect == learner.dialect.fingerprint)
            for rollout, same in zip(rollouts, same_tokenizer, strict=True)
        ]
        prompts = [learner.encode_prompt(rollout.problem, _opening(rollout)) for rollout in rollouts]
        plans = [
            _reused(learner, rollout) if same else _rewritten(learner, rollout)
            for rollout, same in zip(rollouts, reused, strict=True)
        ]
        self._encode_texts(learner, prompts, plans)
        return [
            _learner_tokens(learner, rollout, prompt_ids, same, plan)
            for rollout, prompt_ids, same, plan in zip(rollouts, prompts, reused, plans, strict=True)
        ]

    def _encode_texts(
        self, learner: TextCodec, prompts: Sequence[tuple[int, ...]], plans: list[list[_Part] | None]
    ) -> None:
        """Encode the texts of all parts, each as a continuation of the prompt and the parts before it.

        A plan becomes None if one of its texts cannot be encoded.
        """
        contexts = list(prompts)
        for number in range(max((len(plan) for plan in plans if plan is not None), default=0)):
            current = {i: plan[number] for i, plan in enumerate(plans) if plan and number < len(plan)}
            texts = {i: part.text for i, part in current.items() if part.text is not None}
            encoded = self._encode(learner, list(texts.values()), [contexts[i] for i in texts])
            for (i, part), ids in zip(((i, current[i]) for i in texts), encoded, strict=True):
                if ids is None:
                    plans[i] = None
                else:
                    part.ids = (*ids, *part.ids)
            for i, part in current.items():
                contexts[i] = (*contexts[i], *part.ids)

    def _encode(
        self, learner: TextCodec, texts: Sequence[str], prompts: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...] | None]:
        cache = self._caches.setdefault(learner.tokenizer_fingerprint, _Cache())
        keys = [(learner.control_ids, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        new = [key for key in dict.fromkeys(keys) if key not in cache.continuations]
        encoded = learner.encode_responses(
            [text for *_, text in new], [prompt for _, prompt, _ in new], cache.plain
        )
        cache.continuations.update(zip(new, encoded, strict=True))
        return [cache.continuations[key] for key in keys]


@dataclass(slots=True)
class _Part:
    """A segment on its way to the learner's tokens: ``text`` is still to be encoded, in front of ``ids``."""

    text: str | None
    ids: tuple[int, ...] = ()


def _opening(rollout: Rollout) -> str:
    return "" if rollout.episode is None else rollout.episode.opening


def _has_stop_token(rollout: Rollout, number: int) -> bool:
    """Return whether a segment is an action that ends with a stop token."""
    segment = rollout.segments[number]
    if segment.kind != "action":
        return False
    is_last = number == len(rollout.segments) - 1
    return rollout.ends_with_stop_token if is_last else segment.finish_reason == "stop"


def _reused(learner: TextCodec, rollout: Rollout) -> list[_Part]:
    """Return the source's tokens; its stop tokens become the learner's if they do not end its responses."""
    parts = []
    for number, segment in enumerate(rollout.segments):
        ids = segment.token_ids
        if _has_stop_token(rollout, number) and ids[-1] not in learner.stop_ids:
            ids = (*ids[:-1], learner.stop_id)
        parts.append(_Part(None, ids))
    return parts


def _rewritten(learner: TextCodec, rollout: Rollout) -> list[_Part] | None:
    """Return what the learner's tokens are to say; None if the learner cannot write it as the source did."""
    parts: list[_Part] = []
    finish_reason: FinishReason = "stop"
    for number, segment in enumerate(rollout.segments):
        text: str | None = segment.text + segment.stop_text  # learners learn to write the stop string, too
        if segment.kind == "action":
            assert text is not None
            if BROKEN_CHARACTER in text:  # stands for lost bytes: the text is not what the source generated
                return None
            if segment.turns:
                text = learner.dialect.action(segment.turns[0], rollout.problem.tools)
            if text is None:
                return None
            parts.append(_Part(text, (learner.stop_id,) if _has_stop_token(rollout, number) else ()))
            finish_reason = segment.finish_reason or rollout.finish_reason
        elif segment.turns:
            if not learner.can_encode([turn.content for turn in segment.turns]):
                return None
            parts.append(_Part(None, learner.dialect.observation(segment.turns, finish_reason).ids))
        else:
            parts.append(_Part(text))
    return parts


def _learner_tokens(
    learner: TextCodec,
    rollout: Rollout,
    prompt_ids: tuple[int, ...],
    reused: bool,
    parts: list[_Part] | None,
) -> LearnerTokens | DropReason:
    """Join the parts, and add the loss mask."""
    if parts is None:
        return "not_representable"
    response_ids = tuple(token for part in parts for token in part.ids)
    limit = learner.context_length
    if limit is not None and len(prompt_ids) + len(response_ids) > limit:
        return "too_long"
    loss_mask = tuple(
        segment.kind == "action"
        for segment, part in zip(rollout.segments, parts, strict=True)
        for _ in part.ids
    )
    ends = list(accumulate(len(part.ids) for part in parts))
    stops = [end - 1 for number, end in enumerate(ends) if _has_stop_token(rollout, number)]
    return LearnerTokens(prompt_ids, response_ids, reused, loss_mask, tuple(stops))
