"""Other agents' text in the learner's tokens. Measured, not assumed: every loss of a rollout has a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hacrl.models.tokenizing import BROKEN_CHARACTER, Codec, PlainIds
from hacrl.types import Rollout, full_loss_mask

DropReason = Literal["too_long", "not_representable", "non_finite", "empty"]


@dataclass(frozen=True, slots=True)
class LearnerTokens:
    """One response as a learner's token ids; ``reused`` if they are the source's own."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    reused: bool
    loss_mask: tuple[bool, ...] = ()  # per response token: True for action tokens; default: all True

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_mask", full_loss_mask(self.response_ids, self.loss_mask))


@dataclass(frozen=True, slots=True)
class _Family:
    """What has been encoded with one tokenizer."""

    plain: PlainIds = field(default_factory=dict)
    # (tokens that are no text, prompt, text) -> the text's tokens behind the prompt
    written: dict[tuple[frozenset[int], tuple[int, ...], str], tuple[int, ...] | None] = field(
        default_factory=dict
    )


class Retokeniser:
    """Writes rollouts in learners' tokens, many at a time and every text once.

    Learners that have one between them also share what is encoded, as far as their tokenizers are the same;
    their chat templates and stop tokens need not be.
    """

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        self._rollouts: object = None

    def look_at(self, rollouts: object) -> None:
        """Forget what was encoded, unless these are the very rollouts (a step's) that were looked at last."""
        if rollouts is not self._rollouts:
            self._families.clear()
            self._rollouts = rollouts

    def tokens(
        self, learner: Codec, rollouts: Sequence[Rollout], same_tokenizer: Sequence[bool]
    ) -> list[LearnerTokens | DropReason]:
        """Return the learner's view of each rollout, whole or not at all: none is cut to fit."""
        prompts = [learner.encode_prompt(rollout.problem) for rollout in rollouts]
        written = self._write_segments(learner, rollouts, prompts, same_tokenizer)
        return [
            _learner_tokens(learner, rollout, prompt_ids, same, segments)
            for rollout, prompt_ids, same, segments in zip(
                rollouts, prompts, same_tokenizer, written, strict=True
            )
        ]

    def _write_segments(
        self,
        learner: Codec,
        rollouts: Sequence[Rollout],
        prompts: Sequence[tuple[int, ...]],
        same_tokenizer: Sequence[bool],
    ) -> list[list[tuple[int, ...]] | None]:
        """Return the tokens of each segment of each rollout, None for what the learner cannot write.

        The source's tokens are kept where the tokenizer is the same, without the stop token. Otherwise each
        segment's text is encoded as a continuation of the prompt and the segments before it.
        """
        written: list[list[tuple[int, ...]] | None] = []
        for rollout, same in zip(rollouts, same_tokenizer, strict=True):
            if same:
                kept = [segment.token_ids for segment in rollout.segments]
                if rollout.finish_reason == "stop":
                    kept[-1] = kept[-1][:-1]
                written.append(kept)
            else:  # a broken character stands for bytes that are lost: the text is not what the source said
                written.append(None if BROKEN_CHARACTER in rollout.text else [])
        contexts = list(prompts)
        for number in range(max((len(rollout.segments) for rollout in rollouts), default=0)):
            waiting = [
                i
                for i, (rollout, same) in enumerate(zip(rollouts, same_tokenizer, strict=True))
                if not same and written[i] is not None and number < len(rollout.segments)
            ]
            texts = [rollouts[i].segments[number].text for i in waiting]
            encoded = self._encode(learner, texts, [contexts[i] for i in waiting])
            for i, ids in zip(waiting, encoded, strict=True):
                before = written[i]
                written[i] = None if ids is None or before is None else [*before, ids]
                contexts[i] = (*contexts[i], *(ids or ()))
        return written

    def _encode(
        self, learner: Codec, texts: Sequence[str], prompts: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, ...] | None]:
        family = self._families.setdefault(learner.tokenizer_fingerprint, _Family())
        keys = [(learner.control_ids, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        new = [key for key in dict.fromkeys(keys) if key not in family.written]
        encoded = learner.encode_responses(
            [text for *_, text in new], [prompt for _, prompt, _ in new], family.plain
        )
        family.written.update(zip(new, encoded, strict=True))
        return [family.written[key] for key in keys]


def learner_tokens(learner: Codec, rollout: Rollout, same_tokenizer: bool) -> LearnerTokens | DropReason:
    """One rollout; see :meth:`Retokeniser.tokens`."""
    return Retokeniser().tokens(learner, [rollout], [same_tokenizer])[0]


def _learner_tokens(
    learner: Codec,
    rollout: Rollout,
    prompt_ids: tuple[int, ...],
    same_tokenizer: bool,
    written: list[tuple[int, ...]] | None,
) -> LearnerTokens | DropReason:
    """``written``: the segments in the learner's tokens, without the stop token."""
    if written is None:
        return "not_representable"
    if rollout.finish_reason == "stop":
        written = [*written[:-1], (*written[-1], _stop_id(learner, rollout, same_tokenizer))]
    response_ids = tuple(token for ids in written for token in ids)
    limit = learner.context_length
    if limit is not None and len(prompt_ids) + len(response_ids) > limit:
        return "too_long"
    loss_mask = tuple(
        segment.kind == "action" for segment, ids in zip(rollout.segments, written, strict=True) for _ in ids
    )
    return LearnerTokens(prompt_ids, response_ids, same_tokenizer, loss_mask)


def _stop_id(learner: Codec, rollout: Rollout, same_tokenizer: bool) -> int:
    """Return the source's own stop token if it ends the learner's responses too, else the learner's."""
    if not same_tokenizer:
        return learner.stop_id
    source_stop = rollout.segments[-1].token_ids[-1]
    return source_stop if source_stop in learner.stop_ids else learner.stop_id
