"""Single texts and rollouts through the batched functions of text codecs."""

from __future__ import annotations

from collections.abc import Sequence

from hacrl.models.retokenizing import DropReason, LearnerTokens, Retokeniser
from hacrl.models.tokenizing import TextCodec
from hacrl.types import Rollout


def encode_response(codec: TextCodec, text: str, prompt_ids: Sequence[int]) -> tuple[int, ...] | None:
    return codec.encode_responses([text], [prompt_ids])[0]


def decode_response(codec: TextCodec, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> str:
    return codec.decode_responses([token_ids], [prompt_ids])[0]


def learner_tokens(learner: TextCodec, rollout: Rollout, same_tokenizer: bool) -> LearnerTokens | DropReason:
    return Retokeniser().tokens(learner, [rollout], [same_tokenizer])[0]
