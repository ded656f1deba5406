"""Continuous batching: the schedule worked out by hand, and the forward passes that it takes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hacrl.engines.hf import continuous_batching as continuous
from hacrl.engines.hf.continuous_batching import NotFinite, Request, decode_all
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.slot_decoder import CannotRecord, SampledTokens, SlotDecoder
from hacrl.models.agent import Agent
from hacrl.models.packing_support import supports_packing
from hacrl.types import Problem, Sampling
from tests.support.compiler import use_compiler
from tests.support.engines import sample_rollouts
from tests.support.tiny import char_agent, sharpened, with_logit_bias

LONG, SHORT, ONE = (3, 4, 5, 6, 7, 8), (9, 10, 11), (12,)


@pytest.fixture
def agent() -> Agent:
    """An agent whose responses never stop by themselves."""
    agent = sharpened(char_agent(), 5.0)
    with_logit_bias(agent, {"<eos>": -100.0})
    return agent


def run(agent: Agent, slots: int, requests: list[Request], sampling: Sampling, seed: int = 0):
    """Return batch sizes decoded, prompt tokens computed, and responses in the order of finishing."""
    supports_packing(agent.model)  # the trial forward pass must not be counted
    decoder = SlotDecoder(agent.model, slots, 32, sampling, sorted(agent.stop_ids))
    computed: list[int] = []
    prefilled: list[int] = []
    ended: list[tuple[Request, SampledTokens]] = []

    def watch(module, arguments, keywords):
        kept = isinstance(keywords["slots"], continuous.PrefilledPrompts)
        (prefilled if kept else computed).append(keywords["input_ids"].shape[1])

    handle = agent.model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        with torch.inference_mode():
            decode_all(decoder, requests, seed, ended.extend)
    finally:
        handle.remove()
    return computed, prefilled, ended


def test_a_waiting_request_takes_the_slot_of_a_finished_one(agent, monkeypatch) -> None:
    """Two slots and limits 5, 2, 4, 1: one has 5 tokens, then 1; the other 2, then 4."""
    monkeypatch.setattr(continuous, "STEPS_BETWEEN_CHECKS", 1)
    requests = [Request(place, SHORT, limit) for place, limit in enumerate([5, 2, 4, 1])]
    computed, _, ended = run(agent, 2, requests, Sampling(5))
    # tokens 1-2 of A and B; B ends; 3-5 of A with 1-3 of C; A ends; 4 of C with 1 of D
    assert computed == [2] * 6
    assert [request.index for request, _ in ended] == [1, 0, 2, 3]
    assert [len(said.token_ids) for _, said in ended] == [2, 5, 4, 1]


def test_the_batch_shrinks_to_the_next_power_of_two(agent, monkeypatch) -> None:
    monkeypatch.setattr(continuous, "STEPS_BETWEEN_CHECKS", 1)
    requests = [Request(place, SHORT, limit) for place, limit in enumerate([1, 1, 3, 3, 3, 4])]
    computed, _, _ = run(agent, 6, requests, Sampling(4))
    # six, all slots; four are left for two tokens; one for the last
    assert computed == [6, 4, 4, 1]


@pytest.mark.parametrize("between", [1, 3, 4, 7])
def test_rarer_checks_change_no_response(agent, monkeypatch, between) -> None:
    """Finished rows record no more tokens until a check frees their slot."""
    monkeypatch.setattr(continuous, "STEPS_BETWEEN_CHECKS", between)
    limits = [5, 2, 4, 1, 7, 7, 3]
    requests = [Request(place, (LONG, SHORT, ONE)[place % 3], limit) for place, limit in enumerate(limits)]
    _, _, ended = run(agent, 3, requests, Sampling(7, temperature=0))
    said = {request.index: (request, said) for request, said in ended}
    assert sorted(said) == list(range(7))
    for request, one in said.values():
        ids = list(request.prompt)
        for _ in range(request.limit):
            with torch.no_grad():
                ids.append(int(agent.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        assert one.token_ids == ids[len(request.prompt) :]


def test_a_prompt_is_computed_once_for_all_responses_to_it(agent, monkeypatch) -> None:
    requests = [Request(place, (LONG, SHORT, ONE)[place // 4], 2) for place in range(12)]
    _, prefilled, _ = run(agent, 5, requests, Sampling(2))
    assert prefilled == [5 + 2]  # all tokens but the last, which is decoded
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 8)
    _, prefilled, _ = run(agent, 5, requests, Sampling(2))
    assert prefilled == [5, 2]  # 6 and 3 are too many together


def test_a_prompt_that_comes_back_after_another_is_computed_again(agent) -> None:
    requests = [Request(place, (LONG, SHORT, LONG)[place], 3) for place in range(3)]
    _, prefilled, ended = run(agent, 1, requests, Sampling(3, temperature=0))
    said = {request.index: said.token_ids for request, said in ended}
    assert said[0] == said[2] != said[1]
    assert prefilled == [5 + 2 + 5]


def test_a_prompt_that_comes_back_while_it_is_kept_is_not_computed_again(agent, monkeypatch) -> None:
    """Of A B A C, the second A needs no computing; the next to be computed is C."""
    monkeypatch.setattr(continuous, "PREFILL_TOKENS", 16)
    first, second, other = tuple(range(3, 13)), (4, 5, 6, 7, 8), tuple(range(5, 15))
    requests = [Request(place, prompt, 3) for place, prompt in enumerate([first, second, first, other])]
    _, prefilled, ended = run(agent, 2, requests, Sampling(3))
    assert prefilled == [9 + 4, 9]
    assert sorted(request.index for request, _ in ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("slots", [3, 5, 8])
def test_the_slot_that_a_prompt_is_read_from_holds_the_same_prompt(agent, monkeypatch, slots) -> None:
    """Also after slots have changed their prompts; and most steps share a slot."""
    monkeypatch.setattr(continuous, "STEPS_BETWEEN_CHECKS", 2)
    limits = [3, 9, 5, 1, 8, 2, 7, 7, 1, 4, 9, 2, 6, 3, 5, 8]
    requests = [
        Request(place, (LONG, SHORT, ONE, LONG)[place // 4], limit) for place, limit in enumerate(limits)
    ]
    decoder = SlotDecoder(agent.model, slots, 32, Sampling(9), sorted(agent.stop_ids))
    step, shared = decoder.step, []

    def checked(size: int) -> None:
        step(size)
        rows = decoder._rows[:size].tolist()
        for row in rows:
            host, tokens = decoder.cache.prompt_slots[row], decoder._prompt_length[row]
            for states in decoder.cache.states:
                assert torch.equal(states[:, row, :tokens], states[:, host, :tokens])
        shared.append(len(set(decoder.cache.prompt_slots[rows].tolist())) < len(rows))

    monkeypatch.setattr(decoder, "step", checked)
    with torch.inference_mode():
        decode_all(decoder, requests, 0, lambda _: None)
    assert sum(shared) > len(shared) / 2


def test_from_which_slot_each_prompt_is_read() -> None:
    cache = SlotDecoder(char_agent().model, 6, 8, Sampling(1), [1]).cache
    cache.set_prompts({0: 7, 1: 7, 2: 7, 3: 8, 4: 8})
    assert cache.prompt_slots.tolist() == [0, 0, 0, 3, 3, 5, 6]
    cache.set_prompts({0: 9, 5: 8})  # 1 and 2 have prompt 7 still
    assert cache.prompt_slots.tolist() == [0, 1, 1, 3, 3, 3, 6]
    cache.set_prompts({1: 8, 3: 9})
    assert cache.prompt_slots.tolist() == [0, 1, 2, 0, 1, 1, 6]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at them
def test_compiled_layers_sample_the_same_tokens(agent, monkeypatch) -> None:
    """With a compiler that traces as on a GPU but generates no code."""
    use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
    requests = [Request(place, (LONG, SHORT, ONE)[place % 3], 2 + place) for place in range(7)]
    said = []
    for compiles in (False, True):
        decoder = SlotDecoder(agent.model, 3, 32, Sampling(9), sorted(agent.stop_ids), compiles)
        ended: dict[int, SampledTokens] = {}
        with torch.inference_mode():
            decode_all(
                decoder,
                requests,
                5,
                lambda some, ended=ended: ended.update({r.index: one for r, one in some}),
            )
        assert (decoder.compiles, decoder.compile_error) == (compiles, "")
        said.append([ended[place] for place in range(7)])
    for plain, fused in zip(*said, strict=True):
        assert fused.token_ids == plain.token_ids
        assert fused.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_layer_is_compiled_once_for_all(monkeypatch) -> None:
    """Compiling takes half a minute for one layer of a real model, so every layer must not need its own."""
    from torch._dynamo.utils import counters

    graphs = []
    for layers in (1, 4):
        use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
        torch._dynamo.reset()
        counters.clear()
        agent = char_agent(layers=layers)
        supports_packing(agent.model)
        decoder = SlotDecoder(agent.model, 3, 32, Sampling(5), sorted(agent.stop_ids), compiles=True)
        requests = [Request(place, (LONG, SHORT, ONE)[place % 3], 2 + place % 4) for place in range(7)]
        with torch.inference_mode():
            decode_all(decoder, requests, 5, lambda _: None)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


def test_batch_sizes() -> None:
    decoder = SlotDecoder(char_agent().model, 700, 8, Sampling(1), [1])
    expected = {1: 1, 2: 2, 3: 4, 33: 64, 64: 64, 65: 80, 80: 80, 81: 96, 97: 112, 113: 128, 128: 128}
    expected |= {129: 160, 192: 192, 193: 224, 385: 448, 449: 512, 513: 640, 641: 700}
    sizes = {running: decoder._batch_size(running) for running in expected}
    assert sizes == expected


def test_non_finite_logits_are_noticed(agent) -> None:
    with torch.no_grad():
        agent.model.get_output_embeddings().weight.fill_(float("nan"))
    for sampling in (Sampling(4), Sampling(4, temperature=0)):
        with pytest.raises(NotFinite):
            run(agent, 2, [Request(0, SHORT, 4)], sampling)


def test_a_model_that_cannot_be_recorded_is_decoded_in_step(agent, monkeypatch) -> None:
    """E.g. one that chooses experts by looking at numbers, which a graph cannot."""

    def step(decoder: SlotDecoder, size: int) -> None:
        raise CannotRecord("operation not permitted when stream is capturing")

    problems = [Problem(text, text, "") for text in ("1+1:", "(2+3)*4:")]
    expected = sample_rollouts(TransformersEngine(agent, continuous=False), problems, 3, Sampling(4), seed=1)
    monkeypatch.setattr(SlotDecoder, "step", step)
    engine = TransformersEngine(agent, continuous=True)
    assert sample_rollouts(engine, problems, 3, Sampling(4), seed=1) == expected
    assert engine.take_notes() == [
        f"agent {agent.name!r}: decoding could not be recorded as a CUDA graph (operation not permitted when "
        "stream is capturing), so responses are decoded in step, which is slower"
    ]
    assert sample_rollouts(engine, problems, 3, Sampling(4), seed=1) == expected
    assert engine.take_notes() == []
