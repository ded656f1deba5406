"""Continuous batching that runs out of memory: no token is lost, lengths keep their distribution."""

from __future__ import annotations

import pytest
import torch

from hacrl.engines.hf import engine as transformers_engine
from hacrl.engines.hf.continuous_batching import Interrupted, Request, decode_all
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.slot_decoder import SlotDecoder
from hacrl.errors import TrainingError
from hacrl.types import Rollout, Sampling
from tests.support.engines import engine_agent, sample_rollouts
from tests.support.forward import plain_logprobs
from tests.support.sevens import problem

FULL = "CUDA out of memory"


def fail_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> list[int]:
    """Run out of memory at these steps of all decoders; return a list that grows with every step."""
    made: list[int] = []
    real = SlotDecoder.step

    def step(self: SlotDecoder, size: int) -> None:
        made.append(size)
        if len(made) in steps:
            raise torch.OutOfMemoryError(FULL)
        real(self, size)

    monkeypatch.setattr(SlotDecoder, "step", step)
    return made


def test_an_interruption_reports_finished_responses_and_returns_the_others(monkeypatch) -> None:
    agent = engine_agent(leaning={"<eos>": -100.0})
    decoder = SlotDecoder(agent.model, 4, 32, Sampling(9), sorted(agent.stop_ids))
    requests = [Request(place, (3 + place, 4, 5), limit) for place, limit in enumerate([2, 9, 3, 9])]
    fail_at(monkeypatch, 6)  # only the check after 4 steps has happened by then
    told: list[tuple[Request, list[int]]] = []
    with torch.inference_mode(), pytest.raises(Interrupted) as broken:
        decode_all(decoder, requests, 0, lambda ended: told.extend((r, s.token_ids) for r, s in ended))
    assert [(request.index, len(ids)) for request, ids in told] == [(0, 2), (2, 3)]
    assert [(request.index, len(said.token_ids)) for request, said in broken.value.running] == [
        (1, 5),
        (3, 5),
    ]


@pytest.mark.parametrize("steps", [(1,), (6,), (3, 8, 9), (2, 4, 11)])
def test_interrupted_responses_are_whole_and_have_the_models_logprobs(monkeypatch, steps) -> None:
    agent = engine_agent(leaning={"<eos>": 1.0})
    fail_at(monkeypatch, *steps)
    problems = [problem(text) for text in ("1:", "(23+14)*2:", "7-4:")]
    heard: list[int] = []
    engine = TransformersEngine(agent, 64, continuous=True)
    rollouts = sample_rollouts(engine, problems, 8, Sampling(12), 3, lambda place, _: heard.append(place))
    assert sorted(heard) == list(range(24))  # each once
    assert [rollout.problem.id for rollout in rollouts] == [one.id for one in problems for _ in range(8)]
    assert len(engine.take_notes()) == len(steps)
    for rollout in rollouts:
        assert rollout.finish_reason == "stop" or rollout.num_tokens == 12
        with torch.no_grad():
            prompt = agent.encode_prompt(rollout.problem)
            expected = plain_logprobs(agent.model, prompt, rollout.token_ids, Sampling(12))
        torch.testing.assert_close(torch.tensor(rollout.token_logprobs), expected, atol=1e-4, rtol=0)


def test_interruptions_do_not_shorten_responses(monkeypatch) -> None:
    """Sampling tokens again would give responses a second chance to end early."""
    agent = engine_agent(leaning={"<eos>": 2.0})

    def lengths(seed: int) -> list[int]:
        engine = TransformersEngine(agent, 128, continuous=True)
        return [one.num_tokens for one in sample_rollouts(engine, [problem("1:")], 128, Sampling(30), seed)]

    usual = [length for seed in range(4) for length in lengths(seed)]
    disturbed: list[int] = []
    for seed in range(4):
        with pytest.MonkeyPatch.context() as patch:
            fail_at(patch, 13)
            disturbed += lengths(seed)
    long, still = (sum(length > 12 for length in some) / 512 for some in (usual, disturbed))
    # two shares of 512 each around a quarter differ by 0.027 on average; redrawn, they came to a third of it
    assert long > 0.15
    assert abs(long - still) < 4 * 0.027


def test_the_next_attempt_decodes_fewer_responses_at_a_time(monkeypatch) -> None:
    """4 slots fit by the estimate and fail in fact: 2 are next, not half of the 64 that were requested."""
    built: list[int] = []
    monkeypatch.setattr(transformers_engine, "slots_that_fit", lambda model, length: 4)

    class Crowded(SlotDecoder):
        def __init__(self, model, slots, *others) -> None:
            built.append(slots)
            super().__init__(model, slots, *others)

        def admit(self, groups) -> None:
            if self.cache.slots > 3:
                raise torch.OutOfMemoryError(FULL)
            super().admit(groups)

    monkeypatch.setattr(transformers_engine, "SlotDecoder", Crowded)
    engine = TransformersEngine(engine_agent(), 512, continuous=True)
    sample_rollouts(engine, [problem("1:")], 64, Sampling(4), 0)
    assert built == [4, 2]
    (note,) = engine.take_notes()
    assert "4 responses side by side did not fit" in note


def test_a_cache_with_non_finite_numbers_is_dropped() -> None:
    agent = engine_agent()
    engine = TransformersEngine(agent, 8, continuous=True)
    weight = agent.model.model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        sample_rollouts(engine, [problem("1:")], 2, Sampling(6), 0)
    with torch.no_grad():
        weight.copy_(good)
    assert len(sample_rollouts(engine, [problem("1:")], 2, Sampling(6), 0)) == 2


def test_a_seed_fixes_responses_whatever_was_generated_before() -> None:
    agent = engine_agent()
    problems = [problem(f"{number}+1:") for number in range(11)]

    def asked(engine: TransformersEngine) -> list[Rollout]:
        return sample_rollouts(engine, problems[:9], 1, Sampling(6), 5)

    used = TransformersEngine(agent, 512, continuous=True)
    sample_rollouts(used, problems, 1, Sampling(6), 1)  # its cache has two slots more than are needed then
    assert asked(used) == asked(TransformersEngine(agent, 512, continuous=True))
