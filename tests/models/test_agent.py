"""Agents: prompts, stop tokens, tokenizer fingerprints, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl.config.schema import AgentSettings
from hacrl.errors import TaskError
from hacrl.models.agent import Agent
from hacrl.types import Problem, Turn
from tests.support.sevens import problem
from tests.support.texts import decode_response, encode_response
from tests.support.tiny import (
    absolute_agent,
    char_agent,
    character_tokenizer,
    pair_agent,
    save_agents,
    sharpened,
    tiny_qwen,
)

TEMPLATE = "({{ messages[0].content }}){% if add_generation_prompt %}={% endif %}"


def agent_with_template(use_chat_template: bool) -> Agent:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Agent("chatty", tiny_qwen(tokenizer), tokenizer, use_chat_template)


def test_prompt_without_template_is_the_plain_text() -> None:
    # specials are 0-2, digits 3-12, then +-*()=;#: from 13
    assert char_agent().encode_prompt(problem("1+9:")) == (4, 13, 12, 21)
    # pairs of digits come after the 22 others: 19 is 22 + 19
    assert pair_agent().encode_prompt(problem("19+9:")) == (41, 13, 12, 21)


def test_own_chat_template_is_used_unless_switched_off() -> None:
    # "(1:)=" with the template, "1:" without
    assert agent_with_template(True).encode_prompt(problem("1:")) == (16, 4, 21, 17, 18)
    assert agent_with_template(False).encode_prompt(problem("1:")) == (4, 21)


def test_special_tokens_are_added_once() -> None:
    """A tokenizer's begin token is added to plain prompts, not to templates or responses."""
    for use_chat_template, expected in ((True, (16, 4, 17, 18)), (False, (0, 4))):
        agent = agent_with_template(use_chat_template)
        agent.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<pad> $A", special_tokens=[("<pad>", 0)]
        )
        assert agent.encode_prompt(problem("1")) == expected
        assert encode_response(agent, "1", ()) == (4,)


def test_response_ends_in_the_own_stop_token_only_if_the_source_stopped() -> None:
    assert encode_response(char_agent(), "119", ()) == (4, 4, 12)
    assert encode_response(pair_agent(), "119", ()) == (33, 12)


def test_decoding_shows_every_token() -> None:
    assert decode_response(char_agent(), (4, 13, 2, 12), ()) == "1+<unk>9"
    assert decode_response(pair_agent(), [33, 12, 4, 4], [5]) == "11911"


def test_stop_ids_join_tokenizer_and_generation_config() -> None:
    agent = char_agent()
    assert agent.stop_ids == {1}
    several = char_agent()
    several.model.generation_config.eos_token_id = [20, 1, 19]
    assert several.stop_ids == {1, 19, 20}
    without = char_agent()
    without.model.generation_config.eos_token_id = None
    assert without.stop_ids == {1}
    other = char_agent()
    other.model.generation_config.eos_token_id = 20
    assert other.stop_ids == {1, 20}


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(TaskError, match="empty prompt for agent 'char'"):
        char_agent().encode_prompt(problem(""))


@pytest.mark.parametrize("turn", ["system", "user"])
def test_half_a_character_in_a_prompt_is_named(turn) -> None:
    """JSON can write one, as ``\\ud83d``; UTF-8 and tokenizers cannot hold it."""
    texts = {"system": "3", "user": "4", turn: "1\ud83d2"}
    asked = Problem("p", texts["user"], "", (Turn("system", texts["system"]),))
    with pytest.raises(
        TaskError, match=rf"problem '.*': the {turn}'s text contains half a character, U\+D83D"
    ):
        char_agent().encode_prompt(asked)


def test_context_is_the_model_s() -> None:
    assert char_agent().context_length == 64
    assert absolute_agent().context_length == 64  # n_positions in GPT-2's own words
    assert bundled_context("qwen-large") == 128


def bundled_context(name: str) -> int | None:
    return Agent.load(AgentSettings(name=name, model=f"bundled:{name}"), "cpu").context_length


def test_fingerprint_is_the_tokenizer_s(tmp_path: Path) -> None:
    first, second = save_agents(tmp_path / "a"), save_agents(tmp_path / "b")
    loaded = {
        (where, name): Agent.load(AgentSettings(name=name, model=folder), "cpu").tokenizer_fingerprint
        for where, saved in (("a", first), ("b", second))
        for name, folder in saved.items()
    }
    assert loaded["a", "char"] == loaded["b", "char"]
    assert loaded["a", "pair"] == loaded["b", "pair"]
    assert loaded["a", "char"] != loaded["a", "pair"]


def test_fingerprint_covers_what_changes_response_ids_and_nothing_else() -> None:
    plain = char_agent()
    assert plain.tokenizer_fingerprint == absolute_agent("other", seed=3).tokenizer_fingerprint
    # an instruction-tuned variant: another template and other stop tokens, the same ids for the same text
    assert plain.tokenizer_fingerprint == agent_with_template(True).tokenizer_fingerprint
    more_stops = char_agent()
    more_stops.model.generation_config.eos_token_id = [1, 20]  # stops at "#" too
    assert plain.tokenizer_fingerprint == more_stops.tokenizer_fingerprint
    used = char_agent()
    used.tokenizer("1+1", truncation=True, max_length=2)  # leaves its setting behind in the tokenizer
    assert plain.tokenizer_fingerprint == used.tokenizer_fingerprint
    other_words = char_agent()
    other_words.tokenizer.add_tokens(["plus"])
    assert plain.tokenizer_fingerprint != other_words.tokenizer_fingerprint


def test_the_stop_token_is_the_one_the_chat_template_ends_an_answer_with() -> None:
    """As with Gemma: eos is one token (here id 1), a chat turn ends with another (here "#", id 20)."""
    agent = char_agent()
    assert agent.stop_id == 1
    agent.tokenizer.chat_template = (
        "{% for m in messages %}{{ '(' if m.role == 'user' else ')' }}{{ m.content }}#{% endfor %}"
        "{% if add_generation_prompt %}){% endif %}"
    )
    agent.model.generation_config.eos_token_id = [1, 20]
    chatty = Agent("chatty", agent.model, agent.tokenizer)
    assert chatty.stop_id == 20
    assert Agent("plain", agent.model, agent.tokenizer, use_chat_template=False).stop_id == 1
    # a template that ends turns without a control token: the stop token is eos
    agent.model.generation_config.eos_token_id = 1
    assert Agent("base", agent.model, agent.tokenizer).stop_id == 1


@pytest.mark.parametrize("make", [char_agent, pair_agent, absolute_agent])
def test_a_saved_agent_loads_with_transformers_alone(make, tmp_path: Path) -> None:
    agent = sharpened(make())
    agent.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(model) is type(agent.model)
    text = "(23+14)*2:"
    assert tuple(tokenizer(text).input_ids) == agent.encode_prompt(problem(text))
    assert tokenizer.eos_token_id == 1
    ids = torch.tensor([tokenizer(text).input_ids])
    assert torch.equal(model.eval()(ids).logits, agent.model(ids).logits)
