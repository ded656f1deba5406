"""An engine with its own weights: exact copies, and updates in the middle of responses."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from hacrl.config.schema import AgentSettings, LoraSettings
from hacrl.engines.answering import decode_rollouts
from hacrl.engines.base import GenerationRequest
from hacrl.engines.hf.detached import DetachedEngine
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.live_update import LiveUpdate
from hacrl.engines.sync_check import EngineError, PolicyMismatchError
from hacrl.models.agent import Agent
from hacrl.models.lora import add_adapters
from hacrl.types import Sampling
from tests.support.architectures import TOKENIZER, tiny_model
from tests.support.engines import PROBLEMS, change_weights, engine_agent, probe_prompts, sample_rollouts
from tests.support.live_updates import UpdateInGeneration, cached_logprobs

ENDING = {"<eos>": 2.0}
SAMPLING = Sampling(24, temperature=0.9)
WAYS = pytest.mark.parametrize("continuous", [False, True], ids=["in step", "continuously"])


def request_of(
    agent: Agent, samples: int = 4, sampling: Sampling = SAMPLING, ends: bool = True
) -> GenerationRequest:
    stop_ids = frozenset(agent.stop_ids) if ends else frozenset({-1})
    return GenerationRequest(probe_prompts(agent), samples, sampling, stop_ids, seed=3)


def detached(agent: Agent, **settings: Any) -> DetachedEngine:
    return DetachedEngine(agent, probe_prompts(agent), **settings)


@WAYS
@pytest.mark.parametrize("batch", [3, 512])
def test_equal_weights_give_equal_samples(continuous: bool, batch: int) -> None:
    agent = engine_agent(leaning=ENDING)
    own, shared = (
        detached(agent, max_batch=batch, continuous=continuous),
        TransformersEngine(agent, batch, continuous=continuous),
    )
    for version in range(3):
        request = request_of(agent)
        found, expected = own.generate(request), shared.generate(request)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert [one.logprobs for one in found] == [one.logprobs for one in expected]  # to the last bit
        assert {one.versions for one in found} <= {((version, n),) for n in range(1, 25)}
        assert all(sum(n for _, n in one.versions) == len(one.token_ids) for one in found)
        assert {one.versions for one in expected} == {()}
        change_weights(agent, seed=version)


@WAYS
@pytest.mark.parametrize("at", [1, 2, 7])
def test_tokens_before_an_update_are_of_the_old_weights_and_those_after_it_of_the_new(
    continuous: bool, at: int
) -> None:
    agent = engine_agent(leaning={"<eos>": 0.5})
    engine = detached(agent, continuous=continuous)
    updated = UpdateInGeneration(engine, [at])
    request = request_of(agent)
    samples = updated.generate(request)
    assert sorted(updated.models) == [0, 1]
    assert [report.policy_version for report in updated.reports] == [1]
    assert updated.reports[0].logprob_gap < 1e-5
    crossing = [sample for sample in samples if len(sample.versions) == 2]
    assert len(crossing) >= 10
    old_tokens = {sample.versions[0][1] for sample in crossing}
    if not continuous:
        # The pass in which the update is announced gives the logits of the token with that number, from 1.
        assert old_tokens == {at}
        assert {s.versions for s in samples if len(s.token_ids) <= at} <= {((0, n),) for n in range(at + 1)}
    else:
        # The first pass computes the prompts, the next ones a token each; there is a check every 4 steps.
        assert old_tokens == {-(-max(1, at - 1) // 4) * 4}
    wrong = 0.0
    for number, sample in enumerate(samples):
        prompt = request.prompts[number // request.samples_per_prompt]
        expected = torch.tensor(cached_logprobs(updated.models, prompt, sample, SAMPLING))
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=2e-5, rtol=0)
        only_old = cached_logprobs({0: updated.models[0], 1: updated.models[0]}, prompt, sample, SAMPLING)
        wrong = max(wrong, float((torch.tensor(sample.logprobs) - torch.tensor(only_old)).abs().max()))
    assert wrong > 0.1  # the new weights are others indeed


@WAYS
def test_a_response_may_see_several_updates(continuous: bool) -> None:
    agent = engine_agent()
    updated = UpdateInGeneration(detached(agent, continuous=continuous), [3, 9])
    request = request_of(agent, samples=2, ends=False)
    samples = updated.generate(request)
    spans = ((0, 3), (1, 6), (2, 15)) if not continuous else ((0, 4), (1, 4), (2, 16))
    assert {sample.versions for sample in samples} == {spans}
    for number, sample in enumerate(samples):
        expected = cached_logprobs(updated.models, request.prompts[number // 2], sample, SAMPLING)
        torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(expected), atol=5e-5, rtol=0)
    rollouts = decode_rollouts(agent, [(PROBLEMS[i // 2], sample) for i, sample in enumerate(samples)])
    for rollout in rollouts:
        assert (rollout.policy_version, rollout.versions) == (0, spans)
        assert (rollout.oldest_version, rollout.newest_version) == (0, 2)


def test_responses_that_start_after_an_update_are_wholly_of_the_new_weights() -> None:
    """With 4 slots for 20 responses; prompts that were computed before the update are computed again."""
    agent = engine_agent(leaning={"<eos>": 0.5})
    updated = UpdateInGeneration(detached(agent, max_batch=4, continuous=True), [9])
    request = request_of(agent)
    samples = updated.generate(request)
    kinds = Counter(tuple(version for version, _ in sample.versions) for sample in samples)
    assert kinds[(0, 1)] >= 1
    assert kinds[(1,)] >= 8
    for number, sample in enumerate(samples):
        expected = cached_logprobs(updated.models, request.prompts[number // 4], sample, SAMPLING)
        torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(expected), atol=5e-5, rtol=0)


def test_a_model_with_a_state_is_updated_in_the_middle_of_responses() -> None:
    agent = Agent("lfm2", tiny_model("lfm2"), TOKENIZER)
    prompts = [(4, 5, 6, 7, 8), (9, 3, 5, 6, 7), (9, 3)]
    engine = DetachedEngine(agent, prompts)
    updated = UpdateInGeneration(engine, [3])
    request = GenerationRequest(prompts, 2, Sampling(8), frozenset(), seed=1)
    samples = updated.generate(request)
    # prompts of equal length are generated together: the update comes in the middle of the first two
    assert [s.versions for s in samples] == [((0, 3), (1, 5))] * 4 + [((1, 8),)] * 2
    for number, sample in enumerate(samples):
        expected = cached_logprobs(updated.models, prompts[number // 2], sample, Sampling(8))
        torch.testing.assert_close(torch.tensor(sample.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


def test_adapters_are_copied() -> None:
    agent = engine_agent()
    settings = AgentSettings(name="ada", model="-", lora=LoraSettings(rank=4, alpha=12.0))
    agent.model = add_adapters(agent.model, settings, seed=0)
    engine = detached(agent)
    plain = engine.generate(request_of(agent))
    with torch.no_grad():
        for name, weight in agent.model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    agent.policy_version = 1
    adapted = engine.generate(request_of(agent))
    assert [s.token_ids for s in adapted] != [s.token_ids for s in plain]
    shared = TransformersEngine(agent).generate(request_of(agent))
    assert [(s.token_ids, s.logprobs) for s in adapted] == [(s.token_ids, s.logprobs) for s in shared]


def test_an_engine_that_does_not_follow_the_policy_keeps_its_weights() -> None:
    agent = engine_agent(leaning=ENDING)
    engine = detached(agent)
    before = engine.generate(request_of(agent))
    engine.follows_policy = False
    change_weights(agent, seed=1)
    assert engine.generate(request_of(agent)) == before
    engine.sync()
    after = engine.generate(request_of(agent))
    assert {sample.versions[0][0] for sample in after} == {1}
    assert [s.token_ids for s in after] != [s.token_ids for s in before]


def test_weights_that_did_not_arrive_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = engine_agent(leaning=ENDING)
    engine = detached(agent)
    engine.sync()
    change_weights(agent, seed=1)
    monkeypatch.setattr("hacrl.engines.hf.detached.copy_changed_weights", lambda model, target: None)
    with pytest.raises(PolicyMismatchError, match="the copy of agent 'ada' that samples on cpu is not at"):
        engine.sync()
    with pytest.raises(PolicyMismatchError):  # nothing unproven is sampled
        engine.generate(request_of(agent))


def test_a_copy_is_made_again_after_closing() -> None:
    agent = engine_agent(leaning=ENDING)
    engine = detached(agent)
    before = engine.generate(request_of(agent))
    engine.close()
    engine.close()
    assert engine.generate(request_of(agent)) == before


def test_the_learners_weights_are_not_the_copys() -> None:
    agent = engine_agent(tied=True)
    engine = detached(agent)
    engine.sync()
    assert engine._copy is not None
    mine, copied = dict(agent.model.named_parameters()), dict(engine._copy.policy.model.named_parameters())
    assert mine.keys() == copied.keys()  # tied weights are tied in the copy
    for name, weight in copied.items():
        assert weight.equal(mine[name])
        assert weight.data_ptr() != mine[name].data_ptr()
        assert not weight.requires_grad


def test_a_thread_that_does_not_come_to_the_end_of_its_token_is_not_awaited_for_ever() -> None:
    updates = LiveUpdate("the copy", version=0, limit=0.05)
    with (
        updates.generation(),
        pytest.raises(EngineError, match="the copy cannot go on: it did not finish its token within"),
        updates.update(),
    ):
        raise AssertionError("unreachable")
    with updates.update():  # the failed one is forgotten
        assert updates.is_announced
        with (
            pytest.raises(EngineError, match="its weights were not updated within"),
            updates.generation(),
        ):
            raise AssertionError("unreachable")
    with (
        updates.generation(),
        pytest.raises(EngineError, match="one request at a time"),
        updates.generation(),
    ):
        raise AssertionError("unreachable")


def test_an_update_is_made_if_the_generation_fails_meanwhile() -> None:
    updates = LiveUpdate("the copy", version=0, limit=60.0)
    is_made = threading.Event()

    def update() -> None:
        with updates.update():
            is_made.set()

    thread = threading.Thread(target=update)

    def generate() -> None:
        with updates.generation():
            thread.start()
            while not updates.is_announced:
                thread.join(0.001)
            assert not is_made.is_set()
            raise KeyError("the generation fails")

    with pytest.raises(KeyError):
        generate()
    thread.join(60)
    assert is_made.is_set()


def test_sampling_beside_learning_changes_no_number() -> None:
    """The learner's gradients and the copy's samples are those that each computes alone."""
    agent = engine_agent()
    twin = copy.deepcopy(agent.model)
    engine = detached(agent)
    request = request_of(agent, sampling=Sampling(60), ends=False)
    alone = engine.generate(request)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(request)))
    thread.start()
    losses, expected = [], []
    for model, into in ((agent.model, losses), (twin, expected)):
        for number in range(20):
            ids = torch.tensor([[3, 4, 5 + number % 5, 6]])
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            into.append(loss.item())
    thread.join(60)
    assert found == [alone]
    assert losses == expected
    for mine, theirs in zip(agent.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_rollouts_know_the_policies_of_their_tokens() -> None:
    agent = engine_agent(leaning={"<eos>": -100.0})
    rollouts = sample_rollouts(detached(agent), PROBLEMS, 1, Sampling(5), seed=1)
    for rollout in rollouts:  # one policy: as from any other engine
        assert rollout.segments[0].versions == ()
        assert rollout.versions == ((0, 5),)
        assert (rollout.oldest_version, rollout.newest_version) == (0, 0)
