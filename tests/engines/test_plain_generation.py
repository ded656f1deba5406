"""Models with recurrent or convolution layers: what is sampled has the learner's log-probabilities."""

from __future__ import annotations

import pytest
import torch

from hacrl.config.schema import RolloutSettings
from hacrl.engines.base import GenerationRequest
from hacrl.engines.hf import batch_decoding, plain_generation
from hacrl.engines.hf.batch_decoding import decodes_in_step
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.kind import TransformersKind
from hacrl.engines.hf.plain_generation import generate_plainly, generates_with_cache
from hacrl.engines.kinds import EngineSpec
from hacrl.errors import ModelError, TrainingError
from hacrl.models.agent import Agent
from hacrl.models.logprobs import response_logprobs
from hacrl.types import Sampling
from tests.support.architectures import TOKENIZER, is_known, tiny_model
from tests.support.forward import plain_logprobs

HYBRIDS = [
    name
    for name in (
        "falcon_h1",
        "jamba",
        "lfm2",
        "mamba2",
        "minimax",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "zamba2",
    )
    if is_known(name)
]
PROMPTS = [(4, 5, 6, 7, 8), (9, 3), (10, 11, 12, 13, 14), (4,), (7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7)]
SAMPLING = Sampling(12, temperature=0.8)


def agent_of(name: str, **changes) -> Agent:
    return Agent(name, tiny_model(name, **changes), TOKENIZER)


def sample(
    agent: Agent, sampling: Sampling = SAMPLING, samples: int = 3, stop_ids: frozenset[int] = frozenset()
):
    request = GenerationRequest(PROMPTS, samples, sampling, stop_ids, seed=1)
    return TransformersEngine(agent).generate(request)


@pytest.mark.parametrize("name", HYBRIDS)
def test_sampler_learner_and_a_plain_forward_pass_agree(name: str) -> None:
    agent = agent_of(name)
    samples = sample(agent)
    pairs = [(PROMPTS[number // 3], one.token_ids) for number, one in enumerate(samples)]
    with torch.no_grad():
        logprobs_BT, mask_BT = response_logprobs(agent.model, pairs, SAMPLING, agent.device)
        for row, (prompt, ids) in enumerate(pairs):
            expected = plain_logprobs(agent.model, prompt, ids, SAMPLING)  # alone: no padding, no cache
            sampled = torch.tensor(samples[row].logprobs)
            torch.testing.assert_close(sampled, expected, atol=1e-4, rtol=0)
            torch.testing.assert_close(logprobs_BT[row][mask_BT[row]], expected, atol=1e-4, rtol=0)
    assert torch.tensor([value for one in samples for value in one.logprobs]).std() > 0.1


@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_do_not_depend_on_padding(name: str) -> None:
    model = tiny_model(name)
    pairs = [((4, 5, 6), (7, 8) * 8), ((9,), (10, 11)), ((4, 5, 6), (12, 13, 14))]
    together, _ = response_logprobs(model, pairs, SAMPLING, torch.device("cpu"))
    alone = sum(plain_logprobs(model, *pair, SAMPLING).sum() for pair in pairs)
    weights = list(model.parameters())
    found, expected = (
        torch.autograd.grad(total, weights, allow_unused=True) for total in (together.sum(), alone)
    )
    scale = max(float(gradient.abs().max()) for gradient in expected if gradient is not None)
    assert scale > 0.1
    for mine, plain in zip(found, expected, strict=True):
        assert (mine is None) == (plain is None)
        if mine is not None:
            torch.testing.assert_close(mine, plain, atol=2e-5 * scale, rtol=1e-3)


def test_padding_in_front_would_change_a_state() -> None:
    model = tiny_model("recurrent_gemma")
    assert not batch_decoding._same_when_padded(model)
    assert batch_decoding._same_when_padded(tiny_model("bloom"))


@pytest.mark.parametrize(
    ("name", "in_step"), [("bloom", True), ("llama", True), ("lfm2", False), ("mamba", False)]
)
def test_who_decodes_in_step(name: str, in_step: bool) -> None:
    assert decodes_in_step(tiny_model(name)) is in_step


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_a_response_ends_with_its_stop_token(name: str) -> None:
    agent, stops = agent_of(name), frozenset({4, 5, 6})
    samples = sample(agent, Sampling(30), 4, stops)
    lengths = {len(one.token_ids) for one in samples}
    assert len(lengths) > 3
    for one in samples:
        assert not stops & {*one.token_ids[:-1]}
        assert one.token_ids[-1] in stops or len(one.token_ids) == 30
        assert len(one.logprobs) == len(one.token_ids)


@pytest.mark.parametrize(
    "sampling", [Sampling(8, top_k=4), Sampling(8, top_p=0.7), Sampling(8, temperature=0)]
)
def test_every_kind_of_sampling(sampling: Sampling) -> None:
    agent = agent_of("lfm2")
    for number, one in enumerate(sample(agent, sampling)):
        with torch.no_grad():
            logits = agent.model(input_ids=torch.tensor([[*PROMPTS[number // 3], *one.token_ids]])).logits[0]
        for place, token in enumerate(one.token_ids, start=len(PROMPTS[number // 3]) - 1):
            rank = int((logits[place] > logits[place, token]).sum())
            assert rank == 0 if sampling.temperature == 0 else rank < (sampling.top_k or 1_000)
        if sampling.temperature == 0:
            assert set(one.logprobs) == {0.0}
        else:
            expected = plain_logprobs(agent.model, PROMPTS[number // 3], one.token_ids, sampling)
            torch.testing.assert_close(torch.tensor(one.logprobs), expected.detach(), atol=1e-4, rtol=0)


def test_equal_seeds_draw_equal_responses_in_any_batch() -> None:
    agent = agent_of("qwen3_5_text")
    request = GenerationRequest(PROMPTS, 2, SAMPLING, frozenset(), seed=3)
    first, again = (TransformersEngine(agent).generate(request) for _ in range(2))
    assert first == again
    assert (
        TransformersEngine(agent).generate(GenerationRequest(PROMPTS, 2, SAMPLING, frozenset(), 4)) != first
    )


def test_the_folders_generation_settings_change_nothing() -> None:
    """A repetition penalty would make the sampler another policy than the learner's."""
    agent = agent_of("lfm2")
    plain = sample(agent)
    agent.model.generation_config.repetition_penalty = 5.0
    agent.model.generation_config.temperature = 0.1
    agent.model.generation_config.do_sample = True
    assert sample(agent) == plain
    assert agent.model.generation_config.repetition_penalty == 5.0


def test_adapters_take_part() -> None:
    from peft import LoraConfig, get_peft_model

    agent = agent_of("qwen3_5_text")
    model = get_peft_model(agent.model, LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
    adapted = Agent("adapted", model.eval(), TOKENIZER)
    for number, one in enumerate(sample(adapted)):
        expected = plain_logprobs(model, PROMPTS[number // 3], one.token_ids, SAMPLING).detach()
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-4, rtol=0)


def spec_of(agent: Agent, tmp_path) -> EngineSpec:
    return EngineSpec(agent, None, RolloutSettings(), [], 64, tmp_path, None, 0)  # type: ignore[arg-type]


def test_without_a_right_cache_every_token_computes_its_sequence(tmp_path) -> None:
    """transformers' RWKV answers something else with its state than without."""
    agent = agent_of("rwkv", rescale_every=0)
    assert not generates_with_cache(agent.model)
    samples = sample(agent)
    for number, one in enumerate(samples):
        expected = plain_logprobs(agent.model, PROMPTS[number // 3], one.token_ids, SAMPLING).detach()
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-4, rtol=0)
    (note,) = TransformersKind().make(spec_of(agent, tmp_path)).take_notes()
    assert note.startswith("agent 'rwkv': RwkvForCausalLM does not compute the same with a cache as without")


def test_a_model_that_cannot_generate_is_refused_before_anything_is_written(tmp_path, monkeypatch) -> None:
    agent = agent_of("mamba2")
    monkeypatch.setattr(type(agent.model), "generate", lambda *_, **__: 1 / 0)
    words = (
        r"agent 'mamba2': Mamba2ForCausalLM cannot generate in transformers: ZeroDivisionError.*engine: vllm"
    )
    with pytest.raises(ModelError, match=words):
        TransformersKind().make(spec_of(agent, tmp_path))


def test_a_sampler_with_other_numbers_is_noticed(monkeypatch) -> None:
    model = tiny_model("mamba2")
    draw = plain_generation.draw
    monkeypatch.setattr(plain_generation, "draw", lambda scores, *rest: draw(scores * 1.3, *rest))
    with pytest.raises(ModelError, match="its log-probabilities differ from those of a forward pass by"):
        generates_with_cache(model)


def test_logits_that_are_not_finite_name_the_agent() -> None:
    agent = agent_of("mamba2")
    assert generates_with_cache(agent.model)
    with torch.no_grad():
        agent.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="agent 'mamba2' gives logits that are not finite"):
        sample(agent)


def test_responses_come_back_in_the_prompts_order() -> None:
    model = tiny_model("lfm2")
    generator = torch.Generator().manual_seed(0)
    greedy = Sampling(4, temperature=0)
    together = generate_plainly(model, PROMPTS, 2, greedy, (), generator)
    for number, prompt in enumerate(PROMPTS):
        alone = generate_plainly(model, [prompt], 2, greedy, (), generator)
        assert together[2 * number : 2 * number + 2] == alone
