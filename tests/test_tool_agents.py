"""What the agents of recipes/tool_use.yaml are taught is what an episode of their task looks like."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from make_tool_agents import AGENTS, TOOL_SYMBOLS, ToolAgent, encode, in_the_head, write_episode
from teaching import IGNORED, LARGEST
from transformers import GenerationConfig

from hacrl.environments.bundled.written_calculator import WrittenCalculator
from hacrl.models.tokenizing import TextCodec
from hacrl.tasks.arithmetic import Step, parse_expression
from hacrl.types import Problem, Turn

EXPRESSION = parse_expression("(23+14)*2")


def agent_that_calls(for_terms: float, for_factors: float) -> ToolAgent:
    return replace(AGENTS["pairs"], calls_for_terms=for_terms, calls_for_factors=for_factors)


def test_an_episode_with_two_calls_one_call_and_none():
    rng = random.Random(0)
    both = write_episode(EXPRESSION, agent_that_calls(1, 1), rng)
    assert both == [(True, "[23+14]"), (False, "37"), (True, ";[37*2]"), (False, "74"), (True, "#74")]
    first, observed, last = write_episode(EXPRESSION, agent_that_calls(0, 1), rng)
    middle = int(first[1].removeprefix("23+14=").partition(";")[0])  # from the head, so often wrong
    assert (first, observed) == ((True, f"23+14={middle};[{middle}*2]"), (False, str(2 * middle)))
    assert last == (True, f"#{2 * middle}")
    (alone,) = write_episode(EXPRESSION, agent_that_calls(0, 0), rng)
    assert alone[0]
    assert alone[1].startswith("23+14=")


def test_what_comes_from_the_head_is_mostly_wrong():
    rng = random.Random(0)
    results = [in_the_head(23, Step("+", 14), rng) for _ in range(4000)]
    # Four in five slip; the standard error of the share is sqrt(.2 * .8 / 4000) = 0.006.
    assert results.count(37) / 4000 == pytest.approx(0.2, abs=0.025)
    assert all(0 <= result <= LARGEST for result in results)


@pytest.mark.parametrize("name", list(AGENTS))
def test_taught_tokens_are_those_of_a_played_episode(name: str):
    """Prompt, actions with their stop tokens, and observations as the agent's dialect writes them."""
    tokenizer = AGENTS[name].tokenizer(TOOL_SYMBOLS)
    codec = TextCodec(name, tokenizer, GenerationConfig(eos_token_id=tokenizer.eos_token_id), 128)
    parts = write_episode(EXPRESSION, agent_that_calls(1, 1), random.Random(0))
    environment = WrittenCalculator()
    environment.reset(answer="74")
    played = list(codec.encode_prompt(Problem("p", "(23+14)*2:", "74")))
    labels = [IGNORED] * len(played)
    for action in [text for is_own, text in parts if is_own]:
        ids = [*tokenizer(action, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        observation, reward, done = environment.step(action)
        answer = () if done else codec.dialect.observation([Turn("user", observation)], "stop").ids
        played += [*ids, *answer]
        labels += [*ids, *[IGNORED] * len(answer)]
    assert (reward, done) == (1.0, True)
    taught, marked = encode(tokenizer, [("(23+14)*2:", parts)])
    assert taught[0].tolist() == played
    assert marked[0].tolist() == labels
