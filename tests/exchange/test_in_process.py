"""Rollouts in, groups out."""

from __future__ import annotations

import pytest

from hacrl.exchange.in_process import InProcessExchange
from hacrl.types import VerifiedRollout
from tests.support.rollouts import judged, rollout
from tests.support.tiny import char_agent, pair_agent

ADA, BOB = char_agent("ada"), pair_agent("bob")


def answers(agent, texts: dict[str, list[str]]) -> list[VerifiedRollout]:
    """Prompt -> responses; a response earns its length."""
    return [
        judged(rollout(agent, text, prompt=prompt), float(len(text)))
        for prompt, said in texts.items()
        for text in said
    ]


def test_responses_are_grouped_by_prompt_and_agent_in_order() -> None:
    exchange = InProcessExchange()
    exchange.publish(3, "bob", answers(BOB, {"1:": ["77"], "2:": [""]}))
    exchange.publish(3, "ada", answers(ADA, {"1:": ["1", "22"], "2:": ["333", "4444"]}))
    first, second = exchange.collect(3, ["ada", "bob"])
    assert (first.problem.prompt, second.problem.prompt) == ("1:", "2:")
    assert [v.rollout.text for v in first.responses["ada"]] == ["1", "22"]
    assert [v.rollout.text for v in second.responses["bob"]] == [""]
    assert first.rewards == {"ada": (1.0, 2.0), "bob": (2.0,)}
    assert second.rewards == {"ada": (3.0, 4.0), "bob": (0.0,)}


def test_prompts_come_in_the_order_of_asking() -> None:
    exchange = InProcessExchange()
    exchange.publish(1, "ada", answers(ADA, {"9:": ["1"], "1:": ["1"], "5:": ["1"]}))
    assert [group.problem.prompt for group in exchange.collect(1, ["ada"])] == ["9:", "1:", "5:"]


def test_steps_do_not_mix_and_are_forgotten() -> None:
    exchange = InProcessExchange()
    exchange.publish(1, "ada", answers(ADA, {"1:": ["1"]}))
    exchange.publish(2, "ada", answers(ADA, {"1:": ["22"]}))
    assert exchange.collect(2, ["ada"])[0].rewards == {"ada": (2.0,)}
    assert exchange.collect(1, ["ada"])[0].rewards == {"ada": (1.0,)}
    with pytest.raises(KeyError):
        exchange.collect(1, ["ada"])


def test_a_silent_agent_is_noticed() -> None:
    exchange = InProcessExchange()
    exchange.publish(1, "ada", answers(ADA, {"1:": ["1"]}))
    with pytest.raises(AssertionError, match="step 1: nothing published by \\['bob'\\]"):
        exchange.collect(1, ["ada", "bob"])
