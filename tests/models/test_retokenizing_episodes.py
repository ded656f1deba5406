"""Episodes of one family in another family's tokens and tool format."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from hacrl.models.retokenizing import LearnerTokens
from hacrl.models.tokenizing import TextCodec
from hacrl.types import Problem, Rollout, Segment, ToolCall, Turn
from tests.support.episodes import Action, play, said
from tests.support.families import (
    CHATML,
    FAMILIES,
    QUESTION,
    SMOLLM2_TEMPLATE,
    codec,
    family,
    family_tokenizer,
)
from tests.support.texts import learner_tokens
from tests.support.tiny import char_agent, pair_agent

T, F = True, False


def result(content: str) -> Turn:
    return Turn("tool", content, tool="add")


def calling(content: str, *sums: str) -> Turn:
    return Turn("assistant", content, tuple(ToolCall("add", arguments) for arguments in sums))


SUM, DOOR = '{"a": 2, "b": 3}', Turn("user", "The door is open.")
EPISODE = (
    Action(calling("I add two and three.", SUM), (result("5"),)),
    Action(calling("", '{"a": 5, "b": 4}'), (result("9 é\n<|im_end|> </s> <|eot_id|>"),)),
    said("It is 9.", finish_reason="length"),
)


@pytest.mark.parametrize(("learner", "source"), list(permutations(FAMILIES, 2)))
def test_every_family_learns_from_every_other_as_from_itself(learner: str, source: str) -> None:
    """The learner's tokens are those that the learner would have sampled and seen, saying the same."""
    mine, theirs = family(learner), family(source)
    own = play(mine, QUESTION, EPISODE, opening=" Go on.")
    found = learner_tokens(mine, play(theirs, QUESTION, EPISODE, opening=" Go on."), False)
    assert isinstance(found, LearnerTokens)
    assert found == LearnerTokens(own.prompt_ids, own.token_ids, False, own.loss_mask)
    assert found.stops == stops(own)
    assert learner_tokens(mine, own, True) == replace(found, reused=True)


def stops(own: Rollout) -> tuple[int, ...]:
    """Where the stop tokens of actions are: a plain count."""
    places, at = [], 0
    for segment in own.segments:
        at += len(segment.token_ids)
        if segment.kind == "action" and segment.finish_reason == "stop":
            places.append(at - 1)
    return tuple(places)


def test_same_tokenizer_with_another_template_is_rewritten() -> None:
    """SmolLM2's and Qwen3.5's templates with one tokenizer: prompts and tool calls differ."""
    mine = codec("mine", family_tokenizer(SMOLLM2_TEMPLATE, CHATML, "<|im_end|>"))
    theirs = family("qwen3.5")
    assert mine.tokenizer_fingerprint == theirs.tokenizer_fingerprint
    played = play(theirs, QUESTION, EPISODE)
    found = learner_tokens(mine, played, True)
    own = play(mine, QUESTION, EPISODE)
    assert found == LearnerTokens(own.prompt_ids, own.token_ids, False, own.loss_mask)
    assert "<function=add>" in played.segments[0].text
    assert learner_tokens(theirs, played, True) == LearnerTokens(
        played.prompt_ids, played.token_ids, True, played.loss_mask
    )


def test_ids_of_an_own_episode_are_those_that_were_sampled() -> None:
    """Even where the tokenizer or the template would write the text in another way."""
    played = play(family("qwen2.5"), QUESTION, EPISODE)
    reordered = (*played.segments[0].token_ids[-2::-1], played.segments[0].token_ids[-1])
    odd = replace(played.segments[0], token_ids=reordered)
    found = learner_tokens(family("qwen2.5"), replace(played, segments=(odd, *played.segments[1:])), True)
    assert isinstance(found, LearnerTokens)
    assert found.response_ids[: len(odd.token_ids)] == odd.token_ids


def test_two_characters_and_pairs_by_hand() -> None:
    """1: is the prompt 4 21; 11 and 9 are actions with a stop token, =2 is what the environment says.

    characters   4 4 1 | 18 5 | 12 1      pairs   33 1 | 18 5 | 12 1
    """
    char, pair = char_agent(), pair_agent()
    problem, actions = Problem("1:", "1:", ""), (said("11", "=2"), said("9"))
    assert play(char, problem, actions).token_ids == (4, 4, 1, 18, 5, 12, 1)
    assert play(pair, problem, actions).token_ids == (33, 1, 18, 5, 12, 1)
    found = learner_tokens(char, play(pair, problem, actions), False)
    assert found == LearnerTokens((4, 21), (4, 4, 1, 18, 5, 12, 1), False, (T, T, T, F, F, T, T))
    found = learner_tokens(pair, play(char, problem, actions), False)
    assert found == LearnerTokens((4, 21), (33, 1, 18, 5, 12, 1), False, (T, T, F, F, T, T))
    # cut by a limit in the middle: no stop token, neither an action's nor an observation's
    cut = said("11", "=2", "length"), said("9")
    found = learner_tokens(char, play(pair, problem, cut), False)
    assert found == LearnerTokens((4, 21), (4, 4, 18, 5, 12, 1), False, (T, T, F, F, T, T))


def test_every_stop_token_is_the_learner_s() -> None:
    """Llama may end a call with <|eom_id|> where its generation config lists that token."""
    llama = family("llama3.2")
    eom = llama.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    played = play(llama, QUESTION, EPISODE)
    first = replace(played.segments[0], token_ids=(*played.segments[0].token_ids[:-1], eom))
    played = replace(played, segments=(first, *played.segments[1:]))
    found = learner_tokens(family("gemma3"), played, False)
    assert found == learner_tokens(family("gemma3"), play(llama, QUESTION, EPISODE), False)
    # a learner with the same tokenizer that does not stop there, and one that does
    found = learner_tokens(llama, played, True)
    assert isinstance(found, LearnerTokens)
    assert found.response_ids[len(first.token_ids) - 1] == llama.stop_id
    stops_at_both = codec("both", llama.tokenizer)
    stops_at_both._generation_config.eos_token_id = [llama.stop_id, eom]
    found = learner_tokens(stops_at_both, played, True)
    assert isinstance(found, LearnerTokens)
    assert found.response_ids == played.token_ids


def test_a_cut_turn_is_ended_outside_of_the_loss() -> None:
    """The template ends the turn, not the policy: the end of the turn is part of the observation."""
    for name in ("qwen3", "llama3.2", "gemma3", "tinyllama"):
        mine = family(name)
        played = play(
            family("smollm2"), QUESTION, (Action(Turn("assistant", "I"), (DOOR,), "length"), said("9"))
        )
        found = learner_tokens(mine, played, False)
        assert isinstance(found, LearnerTokens)
        assert mine.turn_end is not None
        at = found.response_ids.index(mine.turn_end.id)
        assert not found.loss_mask[at]
        assert found.loss_mask[at - 1]
        assert found.stops == (len(found.response_ids) - 1,)


@pytest.mark.parametrize(
    ("learner", "turn"),
    [
        ("llama3.2", calling("", SUM, SUM)),  # one call a turn
        ("llama3.2", Turn("assistant", '{"name": "add", "parameters": {}}')),  # text that would be a call
        ("qwen3", Turn("assistant", '{"name": "add", "parameters": {"a": 1}}\ufffd')),  # lost bytes
        ("qwen3.5", calling("", '{"a": "7", "b": 1}')),  # the schema says that a is a number
    ],
)
def test_what_cannot_be_said_in_the_learner_s_format_is_dropped(learner: str, turn: Turn) -> None:
    played = play(family("smollm2"), QUESTION, (Action(turn, (result("5"),)), said("9")))
    assert learner_tokens(family(learner), played, False) == "not_representable"


def test_an_observation_that_the_learner_cannot_read_is_dropped() -> None:
    char, pair = char_agent(), pair_agent()
    problem = Problem("1:", "1:", "")
    odd = replace(play(pair, problem, (said("11", "=2"), said("9"))))
    seen = replace(odd.segments[1], turns=(Turn("user", "=two"),))
    odd = replace(odd, segments=(odd.segments[0], seen, odd.segments[2]))
    assert learner_tokens(char, odd, False) == "not_representable"


def test_too_long_counts_the_learner_s_observations() -> None:
    played = play(family("qwen3"), QUESTION, EPISODE)
    mine = family("tinyllama")
    tokens = learner_tokens(mine, played, False)
    assert isinstance(tokens, LearnerTokens)
    length = len(tokens.prompt_ids) + len(tokens.response_ids)
    for limit, fits in ((length, True), (length - 1, False)):
        bounded = TextCodec("bounded", mine.tokenizer, mine._generation_config, limit)
        assert learner_tokens(bounded, played, False) == (tokens if fits else "too_long")


def test_segments_without_turns_are_rewritten_as_text() -> None:
    char, pair = char_agent(), pair_agent()
    played = play(pair, Problem("1:", "1:", ""), (said("11", "=2"), said("9")))
    bare = tuple(replace(segment, turns=()) for segment in played.segments)
    expected = LearnerTokens((4, 21), (4, 4, 1, 18, 5, 12, 1), False, (T, T, T, F, F, T, T))
    assert learner_tokens(char, replace(played, segments=bare), False) == expected


def test_stop_strings_of_actions_are_learnt() -> None:
    """The action is 1, its stop string 1; the environment says =2."""
    char, pair = char_agent(), pair_agent()
    turns = (Turn("assistant", "11"),)
    first = Segment("action", "1", (33,), (-0.5,), (), "1", turns, "stop_string")
    played = play(pair, Problem("1:", "1:", ""), (said("11", "=2"), said("9")))
    played = replace(played, segments=(first, *played.segments[1:]))
    expected = LearnerTokens((4, 21), (4, 4, 18, 5, 12, 1), False, (T, T, F, F, T, T))
    assert learner_tokens(char, played, False) == expected
