"""Text codecs: prompts through chat templates, and stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hacrl.config.schema import AgentSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import ModelError
from hacrl.models.agent import Agent
from hacrl.models.loading import load_text_codec
from hacrl.models.tokenizing import TextCodec, plain_conversation
from hacrl.types import Problem, Sampling, Turn
from tests.support.engines import sample_rollouts
from tests.support.rollouts import rollout
from tests.support.sevens import problem
from tests.support.texts import learner_tokens
from tests.support.tiny import char_agent, character_tokenizer, tiny_qwen, with_logit_bias

# ChatML with a thinking switch, in this tokenizer's few characters: "(" user, ")" assistant, "*" system,
# <end> ends a turn, "--" is an empty block of thoughts
CHAT = (
    "{% for m in messages %}"
    "{{ {'user': '(', 'assistant': ')', 'system': '*'}[m.role] }}{{ m.content }}<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}){% if enable_thinking is defined and not enable_thinking %}--{% endif %}"
    "{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT
)
END = 22  # the id of <end>, behind the 22 others


def tokenizer_with(template: str | None, end: str = "<end>", named: bool = True) -> PreTrainedTokenizerFast:
    """``named``: as one of the tokenizer's extra special tokens; else only marked as special."""
    tokenizer = character_tokenizer()
    if named:
        tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    else:
        tokenizer.add_tokens([AddedToken(end, special=True)])
    tokenizer.chat_template = template
    return tokenizer


def codec(template: str | None = CHAT, named: bool = True, eos: Any = 1, **options: Any) -> TextCodec:
    generation = GenerationConfig(eos_token_id=eos)
    return TextCodec("ada", tokenizer_with(template, named=named), generation, 64, **options)


def ids(text: str) -> tuple[int, ...]:
    return tuple(tokenizer_with(None)(text).input_ids)


def test_a_conversation_goes_through_the_template() -> None:
    asked = Problem("p", "3:", "7", (Turn("system", "1"), Turn("user", "2:"), Turn("assistant", "9")))
    # * 1 <end> ( 2 : <end> ) 9 <end> ( 3 : <end> )
    expected = (15, 4, END, 16, 5, 21, END, 17, 12, END, 16, 6, 21, END, 17)
    assert codec().encode_prompt(asked) == expected == ids("*1<end>(2:<end>)9<end>(3:<end>)")


def test_arguments_reach_the_template() -> None:
    assert codec().encode_prompt(problem("3:")) == ids("(3:<end>)")
    without = codec(chat_template_args={"enable_thinking": False})
    assert without.encode_prompt(problem("3:")) == ids("(3:<end>)--")
    explicit = codec(chat_template_args={"enable_thinking": True})
    assert explicit.encode_prompt(problem("3:")) == ids("(3:<end>)")
    plain = codec(None, chat_template_args={"enable_thinking": False})
    assert plain.encode_prompt(problem("3:")) == ids("3:")


def test_arguments_come_from_the_settings(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHAT)
    Agent("ada", tiny_qwen(tokenizer), tokenizer).save(tmp_path / "ada")
    settings = AgentSettings(
        name="ada", model=str(tmp_path / "ada"), chat_template_args={"enable_thinking": False}
    )
    for loaded in (Agent.load(settings, "cpu"), load_text_codec(settings)):
        assert loaded.encode_prompt(problem("3:")) == ids("(3:<end>)--")


@pytest.mark.parametrize("named", [True, False])
def test_the_token_that_ends_a_turn_ends_a_response(named: bool) -> None:
    """A base model with a chat template: eos is <eos>, and its generation config knows nothing else."""
    base = codec(named=named)
    assert (base.stop_id, base.stop_ids) == (END, {1, END})
    plain = codec(named=named, use_chat_template=False)
    assert (plain.stop_id, plain.stop_ids) == (1, {1})


def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt() -> None:
    """As tokenizers are that were saved with ``add_eos_token``."""
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    assert tokenizer("3:").input_ids[-1] == tokenizer.eos_token_id == 1
    asked = TextCodec("ends", tokenizer, GenerationConfig(), None).encode_prompt(problem("3:"))
    assert asked == tuple(character_tokenizer()("3:").input_ids)


def test_a_turn_that_ends_in_plain_text_adds_no_stop_token() -> None:
    template = "{% for m in messages %}{{ m.content }};;{% endfor %}"
    assert (codec(template).stop_id, codec(template).stop_ids) == (1, {1})


def test_text_before_the_ending_does_not_count() -> None:
    # the newline-like "#" belongs to the template, <end> is what ends the turn
    template = "{% for m in messages %}{{ m.content }}#;<end>{% endfor %}"
    assert codec(template).stop_id == END


def test_a_template_that_drops_responses_adds_no_stop_token() -> None:
    """It begins with a special token, which would end responses if it were taken for an ending."""
    template = "<end>{{ messages[0].content }}"
    assert (codec(template).stop_id, codec(template).stop_ids) == (1, {1})


@pytest.mark.parametrize(
    ("eos", "stops"),
    [(None, {1, END}), (1, {1, END}), (20, {1, 20, END}), ([20, 19], {1, 19, 20, END}), ([], {1, END})],
)
def test_stops_of_the_generation_config_are_added(eos: Any, stops: set[int]) -> None:
    assert codec(eos=eos).stop_ids == stops
    assert codec(eos=eos, use_chat_template=False).stop_ids == stops - {END}


def test_a_stop_of_the_generation_config_can_be_what_ends_turns() -> None:
    template = "{% for m in messages %}{{ m.content }}#{% endfor %}"  # "#" is id 20, an ordinary token
    assert codec(template, eos=[1, 20]).stop_id == 20
    assert codec(template, eos=1).stop_id == 1


def test_stop_tokens_are_the_same_with_and_without_weights(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHAT)
    agent = Agent("ada", tiny_qwen(tokenizer), tokenizer)
    agent.model.generation_config.eos_token_id = [1, 20]
    agent.save(tmp_path / "ada")
    settings = AgentSettings(name="ada", model=str(tmp_path / "ada"))
    (tmp_path / "ada" / "model.safetensors").rename(tmp_path / "elsewhere")
    assert load_text_codec(settings).stop_ids == agent.stop_ids == {1, 20, END}
    # without a generation config of its own, the model's config says it
    (tmp_path / "ada" / "generation_config.json").unlink()
    config = tmp_path / "ada" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [19]}))
    assert load_text_codec(settings).stop_ids == {1, 19, END}


def test_generation_ends_with_the_turn() -> None:
    tokenizer = tokenizer_with(CHAT)
    agent = with_logit_bias(Agent("ada", tiny_qwen(tokenizer), tokenizer), {"<end>": 2.0})
    rollouts = sample_rollouts(TransformersEngine(agent), [problem("3:")], 16, Sampling(12), seed=0)
    stopped = [one for one in rollouts if one.finish_reason == "stop"]
    assert len(stopped) > 8
    for one in stopped:
        assert one.token_ids[-1] in {1, END}
        assert END not in one.token_ids[:-1]
        assert "<end>" not in one.text
    assert any(one.token_ids[-1] == END for one in stopped)


def test_retokenised_responses_end_with_the_learners_stop_token() -> None:
    """What an agent learns to say last is what its own template puts there."""
    tokenizer = tokenizer_with(CHAT)
    learner = Agent("ada", tiny_qwen(tokenizer), tokenizer)
    tokens = learner_tokens(learner, rollout(char_agent(), "74"), same_tokenizer=False)
    assert tokens.response_ids == (10, 7, END)


@pytest.mark.parametrize(
    ("template", "context", "args", "words"),
    [
        (
            NO_SYSTEM,
            (Turn("system", "1"),),
            {},
            ["conversation of system, user", "System role not supported", "leave the system prompt out"],
        ),
        (NO_SYSTEM, (Turn("system", "1"),), {}, ["agents.ada.chat_template=false"]),
        ("{{ messages[0].content + 1 }}", (), {}, ["conversation of user", "concatenate"]),
        ("{{ messages[7].content }}", (), {}, ["has no element 7"]),
        ("{% for %}", (), {}, ["conversation of user"]),
        (CHAT, (), {"add_generation_prompt": False}, ["chat_template_args={'add_generation_prompt': False}"]),
        (CHAT, (), {"tokenize": True}, ["chat_template_args={'tokenize': True}", "multiple values"]),
    ],
)
def test_a_template_that_fails_names_the_agent(
    template: str, context: tuple[Turn, ...], args: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        codec(template, chat_template_args=args).encode_prompt(Problem("p", "3:", "7", context))
    for word in ["agent 'ada': its chat template cannot write", *words]:
        assert word in str(caught.value)


def test_a_template_without_system_prompts_works_without_them() -> None:
    assert codec(NO_SYSTEM).encode_prompt(problem("3:")) == ids("(3:<end>)")
    assert codec(NO_SYSTEM).stop_id == END


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([Turn("user", "1+1:")], "1+1:"),
        ([Turn("system", "Add."), Turn("user", "1+1:")], "Add.\n\n1+1:\n"),
        (
            [Turn("user", "1+1:"), Turn("assistant", "2"), Turn("user", "2+2:")],
            "1+1:\n2\n\n2+2:\n",
        ),
        (
            [Turn("system", "Add."), Turn("user", "1+1:"), Turn("assistant", "2"), Turn("user", "2+2:")],
            "Add.\n\n1+1:\n2\n\n2+2:\n",
        ),
    ],
)
def test_a_conversation_without_a_template_is_plain_text(turns: list[Turn], text: str) -> None:
    assert plain_conversation(turns) == text


def test_context_turns_are_encoded_without_a_template() -> None:
    asked = Problem("p", "3:", "7", (Turn("user", "2:"), Turn("assistant", "9")))
    newlines = 2  # unknown to this tokenizer, one or two alike: "2:\n9\n\n3:\n"
    assert codec(None).encode_prompt(asked) == (5, 21, newlines, 12, newlines, 6, 21, newlines)
    assert codec(CHAT, use_chat_template=False).encode_prompt(asked) == codec(None).encode_prompt(asked)


def test_sampler_and_learner_agree_behind_a_template() -> None:
    from tests.support.forward import plain_logprobs

    tokenizer = tokenizer_with(CHAT)
    agent = with_logit_bias(Agent("ada", tiny_qwen(tokenizer), tokenizer), {"<end>": 2.0})
    asked = Problem("p", "3:", "7", (Turn("user", "2:"), Turn("assistant", "9")))
    for one in sample_rollouts(TransformersEngine(agent), [asked, problem("1:")], 3, Sampling(8), seed=1):
        prompt = ids("(2:<end>)9<end>(3:<end>)") if one.problem is asked else ids("(1:<end>)")
        with torch.no_grad():
            expected = plain_logprobs(agent.model, prompt, one.token_ids, Sampling(8))
        torch.testing.assert_close(torch.tensor(one.token_logprobs), expected, atol=1e-5, rtol=0)
