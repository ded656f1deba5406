"""Batched encoding and decoding equal single ones; a text is encoded once for equal tokenizers.

The plain way stands here, as it is described: one text, one lead, one decoding of prompt and response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hacrl.models.agent import Agent
from hacrl.models.retokenizing import LearnerTokens, Retokeniser
from tests.models.test_tokenizer_kinds import CORPUS, TOKENIZERS
from tests.support.rollouts import rollout
from tests.support.smollm2 import needs_smollm2
from tests.support.texts import decode_response, learner_tokens
from tests.support.tiny import (
    byte_tokenizer,
    char_agent,
    character_tokenizer,
    pair_agent,
    sentencepiece_like_tokenizer,
    tiny_qwen,
)
from tests.support.tokenizer_kinds import agent_with, byte_bpe_tokenizer


class Pointless(PreTrainedTokenizerFast):
    """A tokenizer class with its own decoding, which drops points."""

    def _decode(self, *args: Any, **options: Any) -> str:
        return super()._decode(*args, **options).replace(".", "")


def pointless_tokenizer() -> Pointless:
    return Pointless(tokenizer_object=byte_bpe_tokenizer().backend_tokenizer, eos_token="<|im_end|>")


ALL: dict[str, Callable[[], Any]] = {
    **TOKENIZERS,
    "bytes": byte_tokenizer,
    "sentencepiece_like": sentencepiece_like_tokenizer,
    "written in Python": ByT5Tokenizer,
    "own decoding": pointless_tokenizer,
}
KINDS = [pytest.param(kind, marks=needs_smollm2 if kind == "smollm2" else ()) for kind in ALL]


@cache
def agent(kind: str) -> Agent:
    return agent_with(ALL[kind](), kind)


@cache
def size(kind: str) -> int:
    return len(agent(kind).tokenizer)


def plain_decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def one_decoded(kind: str, ids: Sequence[int], prompt: Sequence[int]) -> str:
    tokenizer = agent(kind).tokenizer
    before, whole = plain_decode(tokenizer, prompt), plain_decode(tokenizer, [*prompt, *ids])
    return whole[len(before) :] if whole.startswith(before) else plain_decode(tokenizer, ids)


def one_encoded(kind: str, text: str, prompt: Sequence[int]) -> tuple[int, ...] | None:
    def plain(text: str) -> list[int]:
        return agent(kind).tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    for lead in ("", ":", "\n"):
        lead_ids, ids = plain(lead) if lead else [], plain(lead + text)
        rest = tuple(ids[len(lead_ids) :])
        is_text = agent(kind).control_ids.isdisjoint(rest)
        if ids[: len(lead_ids)] == lead_ids and is_text and one_decoded(kind, rest, prompt) == text:
            return rest
    return None


some_text = st.text(max_size=20) | st.sampled_from(CORPUS) | st.text("0123456789+-*: \n▁", max_size=12)
some_prompt = st.integers(0, 3)  # the agent's prompt, or tokens that may end inside a character
some_ids = st.lists(st.integers(0, 2**20), max_size=12)


def prompt_ids(kind: str, chosen: int, loose: Sequence[int]) -> tuple[int, ...]:
    if chosen == 0:
        return ()
    if chosen == 1:
        return tuple(agent(kind).tokenizer("12+30:").input_ids)
    return tuple(one % size(kind) for one in loose)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(asked=st.lists(st.tuples(some_text, some_prompt, some_ids), max_size=6), twice=st.booleans())
def test_batched_encoding_equals_single_encoding(kind: str, asked, twice: bool) -> None:
    texts = [text for text, _, _ in asked] * (1 + twice)
    prompts = [prompt_ids(kind, chosen, loose) for _, chosen, loose in asked] * (1 + twice)
    expected = [one_encoded(kind, text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
    assert agent(kind).encode_responses(texts, prompts) == expected
    known: dict[str, tuple[int, ...]] = {}
    agent(kind).encode_responses(texts[:3], prompts[:3], known)
    assert agent(kind).encode_responses(texts, prompts, known) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_corpus_at_once(kind: str) -> None:
    prompt = agent(kind).tokenizer("12+30:").input_ids
    expected = [one_encoded(kind, text, prompt) for text in CORPUS]
    assert agent(kind).encode_responses(CORPUS, [prompt] * len(CORPUS)) == expected
    writes_anything = kind in ("byte_bpe", "bytes", "written in Python")
    assert (None in expected) != writes_anything


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(said=st.lists(st.tuples(some_ids, some_prompt, some_ids), max_size=6))
def test_batched_decoding_equals_single_decoding(kind: str, said) -> None:
    responses = [tuple(one % size(kind) for one in ids) for ids, _, _ in said]
    prompts = [prompt_ids(kind, chosen, loose) for _, chosen, loose in said]
    expected = [one_decoded(kind, ids, prompt) for ids, prompt in zip(responses, prompts, strict=True)]
    assert agent(kind).decode_responses(responses, prompts) == expected


def test_a_character_that_begins_in_the_prompt() -> None:
    """Decoded alone, the second half of "é" would be a broken character."""
    first, second = agent("bytes").tokenizer("é").input_ids
    assert agent("bytes").decode_responses([(second,), (first, second)], [(first,), ()]) == ["\ufffd", "é"]
    # three quarters of "🎉" are one broken character, however they are shared out: here the prompt has it all
    first, second, third, _ = agent("bytes").tokenizer("🎉").input_ids
    [letter] = agent("bytes").tokenizer("a").input_ids
    assert decode_response(agent("bytes"), (third, letter), (first, second)) == "a"
    assert decode_response(agent("bytes"), (third, letter), ()) == "\ufffda"
    # with a whole character before it, the half that follows is broken all the same
    assert decode_response(agent("bytes"), (second,), agent("bytes").tokenizer("e").input_ids) == "\ufffd"


class Counting(Agent):
    """Records the texts that its tokenizer encodes."""

    def _encode_plain(self, texts, known) -> None:
        before = set(known)
        super()._encode_plain(texts, known)
        self.encoded = [*getattr(self, "encoded", []), *(text for text in known if text not in before)]


def counting(name: str, template: str | None = None, eos: str = "<eos>") -> Counting:
    tokenizer = character_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = template, eos
    return Counting(name, tiny_qwen(tokenizer), tokenizer)


TEMPLATE = "{% for m in messages %}{{ m.content + '=' }}{% endfor %}"


def test_a_text_is_encoded_once_for_equal_tokenizers() -> None:
    """Chat templates may differ; the tokenizer is the same."""
    source = pair_agent("source")
    rollouts = [rollout(source, text) for text in ("119", "74", "119", "7a", "119")]
    shared = Retokeniser()
    first, twin, asked_otherwise = counting("first"), counting("twin"), counting("other", TEMPLATE)
    for learner in (first, twin, asked_otherwise):
        tokens = shared.tokens(learner, rollouts, [False] * 5)
        assert tokens == [learner_tokens(learner, one, same_tokenizer=False) for one in rollouts]
        assert isinstance(tokens[0], LearnerTokens)
        assert tokens[0].response_ids == (4, 4, 12, 1)
        assert tokens[3] == "not_representable"
    # "7a" is tried behind either lead, too; "" is what the first lead is
    assert first.encoded[:4] == ["", "119", "74", "7a"]
    fresh = counting("fresh")
    shared.tokens(fresh, rollouts, [False] * 5)
    assert not hasattr(fresh, "encoded") or fresh.encoded == []
    assert asked_otherwise.encode_prompt(rollouts[0].problem) != first.encode_prompt(rollouts[0].problem)


def test_equal_tokenizers_with_different_stop_tokens() -> None:
    """ "#" (20) ends one learner's responses and is text to the other."""
    said = [rollout(pair_agent(), text) for text in ("1#2", "12")]
    base, stops_at_mark = counting("base"), counting("mark", eos="#")
    assert base.tokenizer_fingerprint == stops_at_mark.tokenizer_fingerprint
    for learners in ([base, stops_at_mark], [stops_at_mark, base]):
        shared = Retokeniser()
        found = {one.name: shared.tokens(one, said, [False, False]) for one in learners}
        assert found["base"] == [
            LearnerTokens((4, 21), (4, 20, 5, 1), False),
            LearnerTokens((4, 21), (4, 5, 1), False),
        ]
        assert found["mark"] == ["not_representable", LearnerTokens((4, 21), (4, 5, 20), False)]


def test_rollouts_of_equal_and_other_tokenizers_in_one_batch() -> None:
    char, pair = char_agent(), pair_agent()
    said = [rollout(pair, "119"), rollout(char, "119"), rollout(pair, "1a"), rollout(pair, "1\ufffd")]
    assert Retokeniser().tokens(char, said, [False, True, False, False]) == [
        LearnerTokens((4, 21), (4, 4, 12, 1), False),
        LearnerTokens((4, 21), (4, 4, 12, 1), True),
        "not_representable",
        "not_representable",
    ]
    assert Retokeniser().tokens(char, [], []) == []
