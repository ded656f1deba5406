"""Convert other agents' rollouts to the learner's tokens.

A rollout that cannot be converted exactly is dropped as a whole, and the reason is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hacrl.models.tokenizing import BROKEN_CHARACTER, PlainIds, TextCodec
from hacrl.types import Rollout, full_loss_mask

DropReason = Literal["too_long", "not_representable", "non_finite", "empty", "truncated", "no_logprobs"]


@dataclass(frozen=True, slots=True)
class LearnerTokens:
    """One response in the learner's tokens; ``reused`` if these are the source's own token ids."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    reused: bool
    loss_mask: tuple[bool, ...] = ()  # per response token: True for action tokens; default: all True

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
        """Return each whole rollout in the learner's tokens, or the reason why it cannot be used."""
        prompts = [learner.encode_prompt(rollout.problem) for rollout in rollouts]
        segments = self._encode_segments(learner, rollouts, prompts, same_tokenizer)
        return [
            _learner_tokens(learner, rollout, prompt_ids, same, segment_ids)
            for rollout, prompt_ids, same, segment_ids in zip(
                rollouts, prompts, same_tokenizer, segments, strict=True
            )
        ]

    def _encode_segments(
        self,
        learner: TextCodec,
        rollouts: Sequence[Rollout],
        prompts: Sequence[tuple[int, ...]],
        same_tokenizer: Sequence[bool],
    ) -> list[list[tuple[int, ...]] | None]:
        """Return the tokens of each rollout's segments, None for a rollout that the learner cannot encode.

        If the tokenizer is the same, these are the source's tokens without the stop token. Otherwise each
        segment's text is encoded as a continuation of the prompt and the segments before it.
        """
        segments: list[list[tuple[int, ...]] | None] = []
        for rollout, same in zip(rollouts, same_tokenizer, strict=True):
            if same:
                kept = [segment.token_ids for segment in rollout.segments]
                if rollout.ends_with_stop_token:
                    kept[-1] = kept[-1][:-1]
                segments.append(kept)
            else:  # a broken character stands for lost bytes: the text is not what the source generated
                is_broken = any(BROKEN_CHARACTER in part.text + part.stop_text for part in rollout.segments)
                segments.append(None if is_broken else [])
        contexts = list(prompts)
        for number in range(max((len(rollout.segments) for rollout in rollouts), default=0)):
            unfinished = [
                i
                for i, (rollout, same) in enumerate(zip(rollouts, same_tokenizer, strict=True))
                if not same and segments[i] is not None and number < len(rollout.segments)
            ]
            # learners learn to write the stop string, as the source did
            parts = [rollouts[i].segments[number] for i in unfinished]
            texts = [part.text + part.stop_text for part in parts]
            encoded = self._encode(learner, texts, [contexts[i] for i in unfinished])
            for i, ids in zip(unfinished, encoded, strict=True):
                before = segments[i]
                segments[i] = None if ids is None or before is None else [*before, ids]
                contexts[i] = (*contexts[i], *(ids or ()))
        return segments

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


def _learner_tokens(
    learner: TextCodec,
    rollout: Rollout,
    prompt_ids: tuple[int, ...],
    same_tokenizer: bool,
    segment_ids: list[tuple[int, ...]] | None,
) -> LearnerTokens | DropReason:
    """Add the stop token and the loss mask; ``segment_ids`` are the segments without the stop token."""
    if segment_ids is None:
        return "not_representable"
    if rollout.ends_with_stop_token:
        segment_ids = [*segment_ids[:-1], (*segment_ids[-1], _stop_id(learner, rollout, same_tokenizer))]
    response_ids = tuple(token for ids in segment_ids for token in ids)
    limit = learner.context_length
    if limit is not None and len(prompt_ids) + len(response_ids) > limit:
        return "too_long"
    loss_mask = tuple(
        segment.kind == "action"
        for segment, ids in zip(rollout.segments, segment_ids, strict=True)
        for _ in ids
    )
    return LearnerTokens(prompt_ids, response_ids, same_tokenizer, loss_mask)


def _stop_id(learner: TextCodec, rollout: Rollout, same_tokenizer: bool) -> int:
    """Return the source's own stop token if it ends the learner's responses too, else the learner's."""
    if not same_tokenizer:
        return learner.stop_id
    source_stop = rollout.segments[-1].token_ids[-1]
    return source_stop if source_stop in learner.stop_ids else learner.stop_id
