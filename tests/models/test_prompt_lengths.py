"""Prompts are encoded in batches as one by one, and the longest is found without encoding all."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from transformers import GenerationConfig

from hacrl.errors import TaskError
from hacrl.models import tokenizing
from hacrl.models.tokenizing import TextCodec
from hacrl.types import Problem, Turn
from tests.support.sevens import problem
from tests.support.tiny import character_tokenizer
from tests.support.tokenizer_kinds import (
    byte_bpe_tokenizer,
    byte_fallback_tokenizer,
    unigram_tokenizer,
)

KINDS: dict[str, Callable[[], Any]] = {
    "byte level": byte_bpe_tokenizer,
    "byte fallback": byte_fallback_tokenizer,
    "unigram": unigram_tokenizer,
}
WORDS = ("seven", "é", "𝔘𝔫𝔦", "x ** 2", " ", "\n", "日本語", "49", "ﬁ", "print(square(7))")


@cache
def tokenizer(kind: str) -> Any:
    return KINDS[kind]()


def made(kind: str) -> TextCodec:
    return TextCodec("ada", tokenizer(kind), GenerationConfig(eos_token_id=1), None)


def drawn(count: int) -> list[Problem]:
    """Prompts of 1 to 60 words of very different numbers of tokens a character."""
    draw = random.Random(0)
    texts = ["a" + "".join(draw.choices(WORDS, k=draw.randint(1, 60))) for _ in range(count)]
    return [Problem(str(number), text, "") for number, text in enumerate(texts)]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_in_a_batch_are_encoded_as_alone(kind: str) -> None:
    problems = drawn(20)
    one_by_one, together = made(kind), made(kind)
    expected = [one_by_one.encode_prompt(each) for each in problems]
    assert together.encode_prompts([*problems, problems[3]]) == [*expected, expected[3]]
    assert together.encode_prompt(problems[5]) == expected[5]  # from the cache
    assert together.encode_prompts([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_prompt_is_that_of_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "ENCODED_AT_ONCE", 3)
    problems = drawn(60)
    expected = max(len(made(kind).encode_prompt(each)) for each in problems)
    assert made(kind).longest_prompt(problems) == expected
    assert made(kind).longest_prompt([]) == 0


def test_few_prompts_are_encoded_to_find_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 1,000 bytes that are tokens of their own; none of the others has more than 200 + 64."""
    monkeypatch.setattr(tokenizing, "ENCODED_AT_ONCE", 2)
    codec = made("byte level")
    short = [Problem(str(number), f"{number} " * 40, "") for number in range(50)]
    longest = Problem("long", "ÿ" * 500, "")
    asked: list[int] = []
    encode = codec.encode_prompts
    monkeypatch.setattr(codec, "encode_prompts", lambda given: asked.append(len(given)) or encode(given))
    assert codec.longest_prompt([*short, longest]) == len(encode([longest])[0])
    assert asked == [2]


def test_all_prompts_are_encoded_where_characters_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an empty prompt is found before a run starts."""
    codec = TextCodec("ada", character_tokenizer(), GenerationConfig(eos_token_id=1), None)
    with pytest.raises(TaskError, match="problem 'empty' is an empty prompt"):
        codec.longest_prompt([problem("1+1:"), Problem("empty", "", "")])


def test_half_a_character_is_found_without_encoding() -> None:
    half = Problem("half", "7" * 3, "", (Turn("system", "\ud800"),))
    with pytest.raises(TaskError, match="half a character"):
        made("byte level").longest_prompt([Problem("long", "seven " * 300, ""), half])


def test_the_oldest_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PROMPT_CACHE_SIZE", 4)
    codec, problems = made("byte level"), drawn(6)
    expected = [made("byte level").encode_prompt(each) for each in problems]
    assert codec.encode_prompts(problems) == expected  # more than are kept
    assert [prompt.turns[0].content for prompt in codec._prompt_ids] == [each.prompt for each in problems[2:]]
    assert codec.encode_prompts(problems) == expected
