"""What every rollout engine promises. A module that has an engine subclasses :class:`EngineContract`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any, Protocol

import pytest

from hacrl.engines.base import Engine, GenerationRequest
from hacrl.models.agent import Agent
from hacrl.types import Rollout, Sampling
from tests.support.engines import (
    LONG,
    MODELS_OWN_EOS,
    ONE_TOKEN,
    PROBLEMS,
    change_weights,
    engine_agent,
    greedy_ids,
    logprob_gap,
    mean_gap,
    next_token_probabilities,
    probe_prompts,
    sample_rollouts,
)

EXACT = 1e-4
ENDING = {"<eos>": 2.0}  # responses end at different places


class EngineOf(Protocol):
    """Makes engines; ``seeded`` matters to those that are not repeatable otherwise."""

    def __call__(self, agent: Agent, seeded: bool = True) -> Engine: ...


class EngineContract:
    """Tests of one engine, over agents of one shape. Subclasses provide a fixture ``engine_of``."""

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(12),
            Sampling(12, temperature=0.7),
            Sampling(12, temperature=1.6),
            Sampling(12, top_k=5),
            Sampling(12, top_p=0.8),
            Sampling(12, temperature=0.7, top_k=9, top_p=0.9),
        ],
        ids=str,
    )
    def test_logprobs_are_those_of_a_plain_forward_pass(
        self, engine_of: EngineOf, sampling: Sampling
    ) -> None:
        agent = engine_agent(leaning=ENDING)
        problems = [*PROBLEMS, ONE_TOKEN]
        rollouts = sample_rollouts(engine_of(agent), problems, 5, sampling, seed=1)
        assert [r.problem.id for r in rollouts] == [p.id for p in problems for _ in range(5)]
        assert len(agent.encode_prompt(ONE_TOKEN)) == 1
        assert len({r.token_ids for r in rollouts}) > 15
        assert len({r.num_tokens for r in rollouts}) > 3
        assert logprob_gap(agent, rollouts, sampling) < EXACT

    @pytest.mark.parametrize("seeded", [True, False])
    @pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=0.7, top_k=6, top_p=0.9)])
    def test_tokens_are_as_frequent_as_they_are_likely(
        self, engine_of: EngineOf, sampling: Sampling, seeded: bool
    ) -> None:
        draws = 400
        agent = engine_agent()
        rollouts = sample_rollouts(engine_of(agent, seeded=seeded), PROBLEMS[1:2], draws, sampling, seed=7)
        counts = Counter(r.token_ids[0] for r in rollouts)
        likely = next_token_probabilities(agent, agent.encode_prompt(PROBLEMS[1]), sampling)
        assert all(likely[token] > 0 for token in counts)
        common = [token for token, p in enumerate(likely) if draws * p >= 10]
        assert len(common) >= 4
        for token in common:  # 5 standard errors of a binomial count
            p = likely[token]
            assert abs(counts[token] - draws * p) < 5 * math.sqrt(draws * p * (1 - p)), (token, p)

    def test_the_stop_token_is_last_and_only_last(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning=ENDING)
        rollouts = sample_rollouts(engine_of(agent), PROBLEMS, 8, Sampling(10), seed=3)
        assert {r.finish_reason for r in rollouts} == {"stop", "length"}
        for rollout in rollouts:
            assert rollout.agent == "ada"
            assert len(rollout.token_logprobs) == rollout.num_tokens
            assert (rollout.finish_reason == "stop") == (rollout.token_ids[-1] == 1)
            assert 1 not in rollout.token_ids[:-1]
            assert rollout.finish_reason == "stop" or rollout.num_tokens == 10
            spoken = [token for token in rollout.token_ids if token != 1]
            assert rollout.text == agent.tokenizer.decode(spoken)

    def test_responses_have_seeds_and_limits_of_their_own(self, engine_of: EngineOf) -> None:
        """Those of equal prompts and seeds are equal up to their limits, in another request too."""
        agent = engine_agent(leaning=ENDING)
        engine = engine_of(agent)
        prompts = [agent.encode_prompt(one) for one in PROBLEMS[:3]]
        stop_ids = frozenset(agent.stop_ids)
        seeds, limits = tuple(range(11, 29)), (1, 9, 4, 9, 2, 6) * 3
        whole = engine.generate(GenerationRequest(prompts, 6, Sampling(9), stop_ids, 0, response_seeds=seeds))
        alone = [prompt for prompt in prompts for _ in range(6)][::-1]
        limited = engine.generate(
            GenerationRequest(
                alone, 1, Sampling(9), stop_ids, 5, response_seeds=seeds[::-1], limits=limits[::-1]
            )
        )
        expected = [one.token_ids[:limit] for one, limit in zip(whole, limits, strict=True)]
        assert [one.token_ids for one in limited[::-1]] == expected
        assert len({len(one.token_ids) for one in whole}) > 1

    def test_every_stop_token_of_the_agent_ends_a_response(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning={"#": 2.5, "<eos>": 2.0}, stop_ids=(1, 20))
        rollouts = sample_rollouts(engine_of(agent), PROBLEMS, 8, Sampling(30), seed=3)
        assert {r.token_ids[-1] for r in rollouts if r.finish_reason == "stop"} == {1, 20}
        for rollout in rollouts:
            assert not {1, 20} & set(rollout.token_ids[:-1])
            assert "#" not in rollout.text

    def test_what_only_the_models_config_calls_eos_ends_nothing(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning={"5": 3.0, "<eos>": 0.0})
        assert agent.model.config.eos_token_id == MODELS_OWN_EOS
        assert agent.stop_ids == {1}
        rollouts = sample_rollouts(engine_of(agent), PROBLEMS, 4, Sampling(20), seed=3)
        before_the_last = Counter(token for r in rollouts for token in r.token_ids[:-1])
        assert before_the_last[MODELS_OWN_EOS] > 50
        assert all(r.token_ids[-1] == 1 or r.num_tokens == 20 for r in rollouts)

    def test_a_stop_string_ends_a_response(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning={"5": 1.5, "7": 1.5, "<eos>": -100.0})
        sampling = Sampling(24, stop=("57", "="))
        rollouts = sample_rollouts(engine_of(agent), PROBLEMS, 6, sampling, seed=3)
        ended = [rollout for rollout in rollouts if rollout.finish_reason == "stop_string"]
        assert len({rollout.num_tokens for rollout in ended}) > 1
        for rollout in rollouts:
            whole = agent.tokenizer.decode(rollout.token_ids)
            assert rollout.text + rollout.segments[0].stop_text == whole
            assert not {"57", "="} & {rollout.text[i : i + n] for i in range(24) for n in (1, 2)}
            assert rollout.finish_reason == ("stop_string" if whole.endswith(("57", "=")) else "length")
            assert rollout.segments[0].stop_text in (("57", "=") if rollout in ended else ("",))
            assert rollout in ended or rollout.num_tokens == 24
        assert logprob_gap(agent, rollouts, sampling) < EXACT
        assert {rollout.segments[0].stop_text for rollout in ended} == {"57", "="}

    def test_a_response_that_never_ends_is_cut(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning={"<eos>": -100.0})
        for said in sample_rollouts(engine_of(agent), PROBLEMS, 2, Sampling(17), seed=0):
            assert (said.finish_reason, said.num_tokens) == ("length", 17)

    def test_an_empty_response_is_one_stop_token(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning={"<eos>": 100.0})
        for said in sample_rollouts(engine_of(agent), PROBLEMS, 2, Sampling(17), seed=0):
            assert (said.finish_reason, said.text, said.token_ids) == ("stop", "", (1,))
            assert said.token_logprobs == pytest.approx((0.0,), abs=1e-6)

    def test_greedy_is_argmax_and_certain(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning=ENDING)
        rollouts = sample_rollouts(engine_of(agent), PROBLEMS, 2, Sampling(12, temperature=0), seed=0)
        for rollout in rollouts:
            assert rollout.token_ids == greedy_ids(agent, agent.encode_prompt(rollout.problem), 12)
            assert rollout.token_logprobs == (0.0,) * rollout.num_tokens
        assert len({r.token_ids for r in rollouts}) > 2

    def test_a_response_with_a_seed_of_its_own_depends_on_no_other(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning=ENDING)
        engine, sampling, stop_ids = engine_of(agent), Sampling(12), frozenset(agent.stop_ids)
        prompts, seeds = probe_prompts(agent)[:3], (11, 7, 2**63 - 1, 3, 0, 8)
        request = GenerationRequest(prompts, 2, sampling, stop_ids, 0, response_seeds=seeds)
        together = [sample.token_ids for sample in engine.generate(request)]
        assert len(set(together)) == 6
        last = replace(request, prompts=prompts[2:], response_seeds=seeds[4:], seed=9)
        assert [sample.token_ids for sample in engine.generate(last)] == together[4:]
        turned = replace(request, prompts=prompts[::-1], response_seeds=seeds[::-1])
        assert [sample.token_ids for sample in engine.generate(turned)] == together[::-1]

    def test_a_seed_fixes_the_responses(self, engine_of: EngineOf) -> None:
        engine = engine_of(engine_agent(leaning=ENDING))
        first = sample_rollouts(engine, PROBLEMS, 4, Sampling(8), seed=5)
        again = sample_rollouts(engine, PROBLEMS, 4, Sampling(8), seed=5)
        other = sample_rollouts(engine, PROBLEMS, 4, Sampling(8), seed=6)
        assert [r.token_ids for r in again] == [r.token_ids for r in first]
        assert sum(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True)) > 12
        assert all(len({r.token_ids for r in first[i : i + 4]}) > 1 for i in range(0, 20, 4))

    def test_everyone_is_told_of_once(self, engine_of: EngineOf) -> None:
        told: list[tuple[int, Rollout]] = []
        engine = engine_of(engine_agent(leaning=ENDING))
        rollouts = sample_rollouts(engine, PROBLEMS, 3, Sampling(8), 2, lambda *one: told.append(one))
        assert sorted(place for place, _ in told) == list(range(15))
        assert all(rollouts[place] == rollout for place, rollout in told)

    def test_generation_follows_the_agents_policy(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning=ENDING)
        engine = engine_of(agent)
        sampling = Sampling(12)
        before = sample_rollouts(engine, PROBLEMS, 4, sampling, seed=1)
        assert {r.policy_version for r in before} == {0}
        assert logprob_gap(agent, before, sampling) < EXACT
        for version in (1, 2):
            change_weights(agent, seed=version)
            check_report(engine.sync(), version)
            after = sample_rollouts(engine, PROBLEMS, 4, sampling, seed=1)
            assert {r.policy_version for r in after} == {version}
            assert logprob_gap(agent, after, sampling) < EXACT
            assert mean_gap(agent, before, sampling) > 0.3  # the policy is another one indeed

    def test_nothing_is_remembered_of_an_older_policy(self, engine_of: EngineOf) -> None:
        """Keys and values of a long prompt may be kept, but only as long as the weights are the same."""
        agent = engine_agent(leaning=ENDING)
        engine = engine_of(agent)
        sampling = Sampling(6)
        for _ in range(2):
            assert logprob_gap(agent, sample_rollouts(engine, [LONG], 4, sampling, seed=1), sampling) < EXACT
        change_weights(agent, seed=1)
        after = sample_rollouts(
            engine, [LONG], 4, sampling, seed=1
        )  # brings the engine to the policy by itself
        assert {r.policy_version for r in after} == {1}
        assert logprob_gap(agent, after, sampling) < EXACT

    def test_generating_leaves_weights_and_gradients_alone(self, engine_of: EngineOf) -> None:
        agent = engine_agent(leaning=ENDING)
        before = {name: weight.clone() for name, weight in agent.model.state_dict().items()}
        engine = engine_of(agent)
        sample_rollouts(engine, PROBLEMS, 2, Sampling(5), seed=0)
        engine.sleep()
        assert all(weight.equal(before[name]) for name, weight in agent.model.state_dict().items())
        assert all(p.requires_grad and p.grad is None for p in agent.model.parameters())


def check_report(report: Any, version: int) -> None:
    """Engines that share the learner's weights have nothing to report."""
    if report is not None:
        assert report.policy_version == version
        assert report.logprob_gap < EXACT
