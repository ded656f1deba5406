"""Chunked log-probabilities: the same numbers and gradients without all logits at once."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from hacrl.config.schema import AgentSettings, LoraSettings
from hacrl.models import lm_head as output_layer
from hacrl.models.logprobs import response_logprobs
from hacrl.models.lora import add_adapters
from hacrl.types import Sampling
from tests.support.tiny import character_tokenizer, tiny_gpt2, tiny_llama, tiny_qwen

PAIRS = [((1, 2, 3), (4, 5)), ((6,), (7, 8, 9, 10, 11, 12)), ((2, 2, 2, 2, 2), (3,)), ((5, 1), (9, 9, 9))]
SAMPLINGS = [Sampling(8), Sampling(8, temperature=0.6), Sampling(8, temperature=1.3, top_k=5, top_p=0.8)]


def tiny_gemma(tokenizer, seed=0):
    """A model that caps its logits, so that its output layer alone does not compute them."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        num_key_value_heads=1,
        final_logit_softcapping=0.05,
        attn_implementation="eager",
        **sizes,
    )
    return Gemma2ForCausalLM(config).eval()


def computed(model, sampling, monkeypatch, max_logits):
    monkeypatch.setattr(output_layer, "MAX_LOGITS", max_logits)
    model.zero_grad()
    values, mask = response_logprobs(model, PAIRS, sampling, torch.device("cpu"))
    (values * torch.linspace(-1, 2, values.numel()).reshape(values.shape)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return values.detach(), mask, gradients


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("make", [tiny_qwen, tiny_llama, tiny_gpt2, tiny_gemma])
@pytest.mark.parametrize("max_logits", [1, 200, 10**4])
def test_chunks_of_any_size_give_the_same(make, sampling, max_logits, monkeypatch):
    model = make(character_tokenizer()).double()
    values, mask, gradients = computed(model, sampling, monkeypatch, 10**9)
    pieces, mask_again, gradients_again = computed(model, sampling, monkeypatch, max_logits)
    assert torch.equal(mask, mask_again)
    assert torch.allclose(values, pieces, rtol=0, atol=1e-6)
    assert gradients.keys() == gradients_again.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, gradients_again[name], rtol=1e-5, atol=1e-6), name


def test_adapters_take_part(monkeypatch):
    settings = AgentSettings(name="a", model="m", lora=LoraSettings(rank=2))
    model = add_adapters(tiny_qwen(character_tokenizer()), settings, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    values, _, gradients = computed(model, Sampling(8), monkeypatch, 10**9)
    pieces, _, gradients_again = computed(model, Sampling(8), monkeypatch, 30)
    assert torch.allclose(values, pieces, rtol=0, atol=1e-5)
    assert set(gradients) == set(gradients_again)
    assert all("lora_" in name for name in gradients)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, gradients_again[name], rtol=1e-4, atol=1e-5), name


def test_no_more_logits_than_allowed_ever_exist(monkeypatch):
    """Count logits in the output layer, forward and again in the backward pass."""
    model = tiny_qwen(character_tokenizer())
    vocabulary = model.lm_head.weight.shape[0]
    output_layer.separate_head(model)  # the trial runs before counting
    made = []
    model.lm_head.register_forward_hook(lambda module, given, output: made.append(output.numel()))
    computed(model, Sampling(8), monkeypatch, 3 * vocabulary)
    tokens = sum(len(response) for _, response in PAIRS)
    assert max(made) == 3 * vocabulary
    assert sum(made) == 2 * tokens * vocabulary  # only response tokens, forward and backward
    assert len(made) == 2 * (tokens // 3)


def test_a_model_that_caps_its_logits_is_not_chunked(monkeypatch):
    model = tiny_gemma(character_tokenizer())
    values, _, _ = computed(model, Sampling(8), monkeypatch, 1)
    ids = torch.tensor([[*PAIRS[1][0], *PAIRS[1][1]]])
    plain = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(values[1], plain[:6].detach(), atol=1e-5)
    apart = model.lm_head(model.model(input_ids=ids).last_hidden_state).log_softmax(-1)
    uncapped = apart[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert (values[1] - uncapped[:6].detach()).abs().max() > 0.01


def test_a_cap_is_noticed_even_with_small_logits() -> None:
    """With new weights 30 tanh(x / 30) equals x to six digits; after training it does not."""
    model = tiny_gemma(character_tokenizer())
    model.config.final_logit_softcapping = 30.0
    assert output_layer.separate_head(model) is None
    model = tiny_gemma(character_tokenizer())
    model.config.final_logit_softcapping = None
    assert output_layer.separate_head(model) is model.get_output_embeddings()


def test_compiled_chunks_are_larger_unless_logits_are_sorted():
    most = output_layer.max_chunk_logits
    assert most(Sampling(8), is_compiled=False) == 2**26
    assert most(Sampling(8, temperature=0.6), is_compiled=True) == 2**28
    assert most(Sampling(8, top_k=5), is_compiled=True) == 2**26
    assert most(Sampling(8, top_p=0.9), is_compiled=True) == 2**26
