"""Retokenising other agents' text: "119" is three tokens of characters, and two of digit pairs."""

from __future__ import annotations

from dataclasses import replace

from transformers import BloomConfig, BloomForCausalLM

from hacrl.models.agent import Agent
from hacrl.models.retokenizing import LearnerTokens
from hacrl.types import Segment
from tests.support.rollouts import problem, rollout
from tests.support.texts import decode_response, encode_response, learner_tokens
from tests.support.tiny import (
    byte_tokenizer,
    char_agent,
    pair_agent,
    sentencepiece_like_tokenizer,
    tiny_qwen,
)

CHAR, PAIR = char_agent(), pair_agent()


def test_pairs_to_characters() -> None:
    # prompt "1:" is 4 21; "119" in pairs is 33 12, in characters 4 4 12; each ends with its own stop token
    said = rollout(PAIR, "119")
    assert said.token_ids == (33, 12, 1)
    assert learner_tokens(CHAR, said, same_tokenizer=False) == LearnerTokens((4, 21), (4, 4, 12, 1), False)


def test_characters_to_pairs() -> None:
    said = rollout(CHAR, "119")
    assert said.token_ids == (4, 4, 12, 1)
    assert learner_tokens(PAIR, said, same_tokenizer=False) == LearnerTokens((4, 21), (33, 12, 1), False)


def test_prompt_is_the_learner_s() -> None:
    said = rollout(CHAR, "7", prompt="23:")  # characters 5 6 21, pairs 45 21
    tokens = learner_tokens(PAIR, said, same_tokenizer=False)
    assert tokens == LearnerTokens((45, 21), (10, 1), False)


def test_no_stop_token_if_the_source_did_not_stop() -> None:
    tokens = learner_tokens(CHAR, rollout(PAIR, "119", stopped=False), same_tokenizer=False)
    assert tokens == LearnerTokens((4, 21), (4, 4, 12), False)


def test_stop_token_of_the_learner_not_of_the_source() -> None:
    other = char_agent()
    other.tokenizer.eos_token = "#"  # id 20
    tokens = learner_tokens(other, rollout(PAIR, "119"), same_tokenizer=False)
    assert tokens == LearnerTokens((4, 21), (4, 4, 12, 20), False)


def test_a_stop_string_is_learnt_and_no_stop_token_is_added() -> None:
    """The source wrote 11 9; its stop string is 9. In characters: 4 4 12, and nothing after it."""
    whole = rollout(PAIR, "119", stopped=False)
    segment = replace(whole.segments[0], text="11", stop_text="9")
    said = replace(whole, segments=(segment,), finish_reason="stop_string")
    assert (said.text, said.token_ids) == ("11", (33, 12))
    tokens = learner_tokens(CHAR, said, same_tokenizer=False)
    assert tokens == LearnerTokens((4, 21), (4, 4, 12), False)
    assert learner_tokens(PAIR, said, same_tokenizer=True) == LearnerTokens((4, 21), (33, 12), True)
    broken = replace(segment, stop_text="\ufffd")  # lost bytes in the stop text count, too
    assert learner_tokens(CHAR, replace(said, segments=(broken,)), False) == "not_representable"


def test_empty_response_is_its_stop_token() -> None:
    tokens = learner_tokens(CHAR, rollout(PAIR, ""), same_tokenizer=False)
    assert tokens == LearnerTokens((4, 21), (1,), False)


def test_ids_are_reused_even_if_they_are_not_the_usual_encoding() -> None:
    # sampled "3" and "7" one by one (6, 10), which the tokenizer would write as "37" (22 + 37 = 59)
    said = rollout(PAIR, "37", token_ids=(6, 10, 1))
    twin = pair_agent("twin", seed=9)
    assert learner_tokens(twin, said, same_tokenizer=True) == LearnerTokens((4, 21), (6, 10, 1), True)
    assert learner_tokens(twin, said, same_tokenizer=False) == LearnerTokens((4, 21), (59, 1), False)


def test_text_that_the_learner_cannot_encode() -> None:
    # letters have no token: <unk> decodes to something else
    assert learner_tokens(CHAR, rollout(PAIR, "1a"), same_tokenizer=False) == "not_representable"
    assert (
        learner_tokens(CHAR, rollout(PAIR, "1a", stopped=False), same_tokenizer=False) == "not_representable"
    )


def test_half_a_character_cannot_be_encoded() -> None:
    said = replace(rollout(PAIR, "119"), segments=(Segment("action", "1\ud83d", (4, 5), (-1.0, -1.0)),))
    assert learner_tokens(CHAR, said, same_tokenizer=False) == "not_representable"


def test_a_spelled_out_special_token_is_not_taken_for_one() -> None:
    # as text "1<eos>2" is seven characters of a source; the learner's tokenizer would make a stop token of it
    assert CHAR.tokenizer("1<eos>2").input_ids == [4, 1, 5]
    assert learner_tokens(CHAR, rollout(PAIR, "1<eos>2"), same_tokenizer=False) == "not_representable"


def test_sentencepiece_tokenizers_do_not_gain_or_lose_a_leading_space() -> None:
    """Encoded alone, "74" would become "▁74", which behind a prompt reads " 74"."""
    tokenizer = sentencepiece_like_tokenizer()
    agent = Agent("sp", tiny_qwen(tokenizer), tokenizer)
    piece = tokenizer.get_vocab()
    prompt = agent.encode_prompt(problem("The is :"))
    assert tokenizer("74", add_special_tokens=False).input_ids == [piece["▁74"]]
    # as a learner
    assert encode_response(agent, "74", prompt) == (piece["74"],)
    assert encode_response(agent, " 74", prompt) == (piece["▁74"],)
    # as a source
    assert decode_response(agent, (piece["▁74"],), prompt) == " 74"
    assert decode_response(agent, (piece["74"],), prompt) == "74"


def test_text_with_lost_bytes_is_dropped_for_other_tokenizers() -> None:
    """Half of "é" reads as U+FFFD, which is three bytes of its own: other tokens than the source's."""
    tokenizer = byte_tokenizer()
    source = Agent("bytes", tiny_qwen(tokenizer), tokenizer)
    first_half, second_half = tokenizer("é", add_special_tokens=False).input_ids
    prompt = source.encode_prompt(problem("1:"))
    assert decode_response(source, (first_half, second_half), prompt) == "é"
    text = decode_response(source, (first_half,), prompt)
    assert text == "\ufffd"
    broken = rollout(source, text, token_ids=(first_half, 1))
    assert len(tokenizer(text, add_special_tokens=False).input_ids) == 3  # it could be written, but wrongly
    assert learner_tokens(source, broken, same_tokenizer=False) == "not_representable"
    # agents that share the tokenizer take the ids, which are sound
    assert learner_tokens(source, broken, same_tokenizer=True).response_ids == (first_half, 1)


def test_a_stop_token_the_learner_does_not_stop_at_is_replaced() -> None:
    """Equal vocabularies, different stop tokens: the source's "#" (id 20) does not stop the learner."""
    said = rollout(CHAR, "12", token_ids=(4, 5, 20))
    assert learner_tokens(char_agent("base"), said, same_tokenizer=True).response_ids == (4, 5, 1)
    both = char_agent("both")
    both.model.generation_config.eos_token_id = [1, 20]
    assert learner_tokens(both, said, same_tokenizer=True).response_ids == (4, 5, 20)


def test_too_long_is_dropped_whole_at_the_exact_limit() -> None:
    # a context of 64 and a prompt of 2: 62 response tokens fit, the stop token included
    fits = rollout(PAIR, "1" * 61)
    tokens = learner_tokens(CHAR, fits, same_tokenizer=False)
    assert isinstance(tokens, LearnerTokens)
    assert tokens.response_ids == (4,) * 61 + (1,)
    assert learner_tokens(CHAR, rollout(PAIR, "1" * 62), same_tokenizer=False) == "too_long"
    unstopped = learner_tokens(CHAR, rollout(PAIR, "1" * 62, stopped=False), same_tokenizer=False)
    assert isinstance(unstopped, LearnerTokens)
    # the same text takes half as many tokens in pairs
    assert learner_tokens(PAIR, rollout(CHAR, "1" * 62), same_tokenizer=False).response_ids == (33,) * 31 + (
        1,
    )


def test_a_model_without_a_stated_context_takes_any_length() -> None:
    config = BloomConfig(vocab_size=22, hidden_size=16, n_layer=1, n_head=2)  # no absolute positions
    boundless = Agent("bloom", BloomForCausalLM(config), CHAR.tokenizer)
    tokens = learner_tokens(boundless, rollout(PAIR, "1" * 300), same_tokenizer=False)
    assert tokens == LearnerTokens((4, 21), (4,) * 300 + (1,), False)
