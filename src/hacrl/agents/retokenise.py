"""Other agents' text in the learner's tokens. Measured, not assumed: every loss of a rollout has a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hacrl.agents.codec import BROKEN_CHARACTER, Codec, PlainIds
from hacrl.types import Rollout

DropReason = Literal["too_long", "not_representable", "non_finite", "empty"]


@dataclass(frozen=True, slots=True)
class LearnerTokens:
    """One response as a learner's token ids; ``reused`` if they are the source's own."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    reused: bool


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
        """The learner's view of each rollout, whole or not at all: it is never cut to fit."""
        prompts = [learner.encode_prompt(rollout.problem) for rollout in rollouts]
        foreign = [
            i
            for i, (rollout, same) in enumerate(zip(rollouts, same_tokenizer, strict=True))
            # where the source's bytes are lost, the text is not what it said
            if not same and BROKEN_CHARACTER not in rollout.text
        ]
        texts = [rollouts[i].text for i in foreign]
        written = dict(zip(foreign, self._encode(learner, texts, [prompts[i] for i in foreign]), strict=True))
        return [
            _learner_tokens(learner, rollout, prompt_ids, same, written.get(i))
            for i, (rollout, prompt_ids, same) in enumerate(
                zip(rollouts, prompts, same_tokenizer, strict=True)
            )
        ]

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
    written: tuple[int, ...] | None,
) -> LearnerTokens | DropReason:
    """``written``: the text in the learner's tokens, of a rollout with another tokenizer."""
    stopped = rollout.finish_reason == "stop"
    response_ids = rollout.token_ids[: rollout.num_tokens - stopped] if same_tokenizer else written
    if response_ids is None:
        return "not_representable"
    if stopped:
        response_ids = (*response_ids, _stop_id(learner, rollout, same_tokenizer))
    limit = learner.context_length
    if limit is not None and len(prompt_ids) + len(response_ids) > limit:
        return "too_long"
    return LearnerTokens(prompt_ids, response_ids, reused=same_tokenizer)


def _stop_id(learner: Codec, rollout: Rollout, same_tokenizer: bool) -> int:
    """The source's own stop token if it ends the learner's responses too, else the learner's."""
    source_stop = rollout.token_ids[-1]
    return source_stop if same_tokenizer and source_stop in learner.stop_ids else learner.stop_id
