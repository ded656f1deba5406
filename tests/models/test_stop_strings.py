"""Where a stop string ends a response, worked out by hand for tokens of several kinds."""

from __future__ import annotations

import pytest

from hacrl.models.stop_strings import Ending, StopStrings
from hacrl.models.tokenizing import TextCodec
from tests.support.tiny import (
    byte_tokenizer,
    character_tokenizer,
    pair_tokenizer,
    sentencepiece_like_tokenizer,
)


class NoEnd:
    """A generation config without stop tokens."""

    eos_token_id = None


def codec(tokenizer) -> TextCodec:
    return TextCodec("ada", tokenizer, NoEnd(), None)


def endings(tokenizer, texts: list[str], stop: tuple[str, ...]) -> list[Ending | None]:
    """Of responses to the prompt ``1:``."""
    agent = codec(tokenizer)
    prompt = tuple(tokenizer("1:", add_special_tokens=False).input_ids)
    responses = [tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    return StopStrings(agent, stop).endings(responses, [prompt] * len(texts), texts)


def test_a_response_ends_with_the_first_token_that_completes_a_string() -> None:
    assert endings(character_tokenizer(), ["12=7#34#5", "12", "#", "12=#"], ("7#", "#")) == [
        Ending(5, "12=", "7#"),  # both strings end with this token; the text ends before the earlier one
        None,
        Ending(1, "", "#"),
        Ending(4, "12=", "#"),
    ]


def test_what_the_last_token_writes_behind_the_string_is_no_part_of_the_text() -> None:
    """The tokens are 11, 47, 7 and 1, 17 (pairs of digits from the left)."""
    found = endings(pair_tokenizer(), ["11477", "4"], ("4",))
    assert found == [Ending(2, "11", "47"), Ending(1, "", "4")]


def test_a_string_may_be_spread_over_tokens() -> None:
    """11 47 7: the string 14 begins inside the first token."""
    assert endings(pair_tokenizer(), ["11477"], ("14",)) == [Ending(2, "1", "147")]


def test_a_string_within_a_token_of_several_bytes() -> None:
    """Every byte is a token: é has two, and half of it is not a character yet."""
    assert endings(byte_tokenizer(), ["aéb", "ae"], ("é",)) == [Ending(3, "a", "é"), None]


def test_spaces_of_sentencepiece_are_where_the_response_has_them() -> None:
    tokenizer = sentencepiece_like_tokenizer()
    prompt = tuple(tokenizer("The", add_special_tokens=False).input_ids)
    ids = tuple(tokenizer.convert_tokens_to_ids(["▁is", "▁74", "is"]))
    agent = codec(tokenizer)
    assert agent.decode_responses([ids], [prompt]) == [" is 74is"]
    stop = StopStrings(agent, (" 7",))
    assert stop.endings([ids], [prompt], [" is 74is"]) == [Ending(2, " is", " 74")]


@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 65])
def test_the_end_is_found_at_every_place(length: int) -> None:
    text = "1" * (length - 1) + "#" + "1" * 9
    (ending,) = endings(character_tokenizer(), [text], ("#",))
    assert ending == Ending(length, "1" * (length - 1), "#")


def test_the_end_of_a_response_shows_a_string_that_has_just_appeared() -> None:
    tokenizer = character_tokenizer()
    stop = StopStrings(codec(tokenizer), ("12=7", "#"))
    assert stop.window >= 4
    tails = [tokenizer(text, add_special_tokens=False).input_ids for text in ("912=7", "12=", "#1", "1")]
    assert stop.are_in(tails) == [True, False, True, False]
    assert stop.are_in([]) == []
