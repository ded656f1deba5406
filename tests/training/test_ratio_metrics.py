"""Both definitions of the ratio between learner and source, as metrics, against plain forward passes."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from hacrl.config.schema import NaiveSettings
from hacrl.models.agent import Agent
from hacrl.types import Sampling
from tests.support.forward import plain_logprobs
from tests.training.runs import Runs

# shared rollouts; an advantage is zero only if all rewards of a prompt are equal
NAIVE = NaiveSettings(clip_low=0.9, clip_high=9.0)
AGENTS = ("char", "pair", "twin")  # char and twin share a tokenizer, pair reads digits in pairs
TEMPERATURE = 0.7


@pytest.mark.parametrize("learn_stop_token", [True, False])
def test_both_ratios_of_every_pair_from_scratch(runs: Runs, learn_stop_token: bool) -> None:
    run = runs(
        *AGENTS,
        method=replace(NAIVE, learn_stop_token=learn_stop_token),
        steps=1,
        learning={"updates_per_step": 1, "micro_batch_tokens": 64},
        rollout={"temperature": TEMPERATURE, "rollouts_per_prompt": 6, "max_new_tokens": 6},
        # enough that some responses stop and some prompts have different rewards
    )
    sampling = Sampling(6, TEMPERATURE)
    said = {agent: run.watcher.rollouts[1, agent] for agent in AGENTS}
    rewards = defaultdict(set)
    for rollouts in said.values():
        for one in rollouts:
            rewards[one.rollout.problem.id].add(one.reward)
    lengths_differ = stops = 0
    for learner in AGENTS:
        agent = Agent.load(runs.agent(learner), "cpu")  # as it was when it made its first update
        metrics = run.of(learner)[0]["learning"]["sources"]
        for source in AGENTS:
            same_tokenizer = "pair" not in (learner, source) or learner == source
            by_source, by_own = [], []
            for one in (verified.rollout for verified in said[source]):
                if len(rewards[one.problem.id]) == 1:
                    continue  # no advantage, not learnt from
                stopped = one.finish_reason == "stop"
                stops += stopped
                if same_tokenizer:
                    own_ids = list(one.token_ids[: len(one.token_ids) - stopped])
                elif "<" in one.text:
                    continue  # random agents say <pad> and <unk>, which are no text
                else:
                    own_ids = agent.tokenizer(one.text, add_special_tokens=False).input_ids
                own_ids = own_ids + [agent.tokenizer.eos_token_id] * (stopped and learn_stop_token)
                source_logprobs = one.token_logprobs
                if stopped and not learn_stop_token:
                    source_logprobs = source_logprobs[:-1]
                if not own_ids or not source_logprobs:
                    continue
                prompt = agent.tokenizer(one.problem.prompt).input_ids
                with torch.no_grad():
                    logprob = plain_logprobs(agent.model, prompt, own_ids, sampling).sum().item()
                theirs = math.fsum(source_logprobs)
                by_source.append(math.exp((logprob - theirs) / len(source_logprobs)))
                by_own.append(math.exp(logprob / len(own_ids) - theirs / len(source_logprobs)))
                lengths_differ += len(own_ids) != len(source_logprobs)
            reported = metrics[source]
            assert reported["used"] == len(by_source) > 0
            expected = sum(by_source) / len(by_source), sum(by_own) / len(by_own)
            assert reported["ratio_by_source_length"] == pytest.approx(expected[0], rel=1e-5)
            assert reported["ratio_by_own_length"] == pytest.approx(expected[1], rel=1e-5)
            assert reported["ratio_mean"] == pytest.approx(expected[0], rel=1e-5)  # the one the loss uses
            if same_tokenizer:
                assert reported["ratio_by_own_length"] == pytest.approx(
                    reported["ratio_by_source_length"], rel=1e-6
                )
            if learner == source:
                assert reported["ratio_by_own_length"] == pytest.approx(1.0, abs=1e-5)
    assert lengths_differ > 10
    assert stops > 3


def test_the_definitions_differ_if_token_counts_do(runs: Runs) -> None:
    """The loss uses the definition that the settings choose."""
    one, other = (
        runs(
            "char",
            "pair",
            method=NaiveSettings(clip_low=0.9, clip_high=9.0, ratio_length=length),
            steps=1,
            learning={"updates_per_step": 1},
            rollout={"rollouts_per_prompt": 6, "max_new_tokens": 6},
        ).of("pair")[0]["learning"]["sources"]["char"]
        for length in ("source", "own")
    )
    for key in ("used", "ratio_by_source_length", "ratio_by_own_length"):
        assert one[key] == other[key]
    assert abs(one["ratio_by_source_length"] - one["ratio_by_own_length"]) > 0.01
    assert one["ratio_mean"] == pytest.approx(one["ratio_by_source_length"], rel=1e-6)
    assert other["ratio_mean"] == pytest.approx(other["ratio_by_own_length"], rel=1e-6)
