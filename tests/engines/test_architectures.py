"""Sampler and learner agree on many architectures: positions of all kinds, sliding windows, experts."""

from __future__ import annotations

import pytest
import torch
import transformers

from hacrl.engines.hf import batch_decoding as decoding
from hacrl.engines.hf.batch_decoding import can_share_prompts
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.slot_cache import supports_slots
from hacrl.models.agent import Agent
from hacrl.models.logprobs import packed_logprobs, padded_logprobs, response_logprobs
from hacrl.models.packing import packed_tokens
from hacrl.models.packing_support import supports_packing
from hacrl.types import Problem, Sampling
from tests.support.engines import sample_rollouts
from tests.support.tiny import character_tokenizer

TOKENIZER = character_tokenizer()
COMMON = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
    "bos_token_id": None,
    "max_position_embeddings": 64,
}
GROUPED = {**COMMON, "num_key_value_heads": 1, "intermediate_size": 48, "head_dim": 16}
ARCHITECTURES = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": len(TOKENIZER)},
    "OPT": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "Bloom": {"vocab_size": len(TOKENIZER), "hidden_size": 32, "n_layer": 2, "n_head": 2},
    "GPTNeoX": {**COMMON, "intermediate_size": 48},
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 6},
    "Gemma2": {**GROUPED, "sliding_window": 6},
    "Phi3": {**COMMON, "num_key_value_heads": 1, "intermediate_size": 48},
    "Qwen3Moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
PROBLEMS = [Problem(text, text, "0") for text in ("(23+14)*2:", "1:", "(39-19)+7:")]  # of different lengths
SAMPLING = Sampling(max_new_tokens=12, temperature=0.8)


def agent_of(name: str, options: dict) -> Agent:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(
        config
    ).eval()
    with torch.no_grad():  # random heads are nearly uniform: sharper ones show a wrong position or mask
        model.get_output_embeddings().weight.mul_(8.0)
    return Agent(name, model, TOKENIZER)


RAGGED = {"GPT2", "OPT", "GPTNeoX", "Llama", "Mistral", "Phi3", "Qwen3Moe"}  # can be laid end to end


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_which_models_can_be_packed(name: str) -> None:
    """Bloom has attention code of its own; Gemma 2 caps its scores, which the kernel does not."""
    assert supports_packing(agent_of(name, ARCHITECTURES[name]).model) == (name in RAGGED)


@pytest.mark.parametrize("name", sorted(RAGGED))
def test_padded_and_packed_are_the_same(name: str) -> None:
    model = agent_of(name, ARCHITECTURES[name]).model
    shared = (5, 9, 9, 4) * 3
    pairs = [
        ((3, 4, 5), (6, 7) * 8),
        (shared, (10, 11, 12)),
        ((9,), (10, 11, 12, 13)),
        (shared, (13,)),
        (shared, (11, 8) * 5),
        ((9,), (4,)),
    ]
    assert packed_tokens(pairs) == 3 + 16 + 12 + 3 + 1 + 4 + 1 + 10 + 1
    found = []
    for compute in (padded_logprobs, packed_logprobs):
        model.zero_grad()
        logprobs = compute(model, pairs, SAMPLING, torch.device("cpu"))
        (logprobs * torch.linspace(-1, 2, 96).reshape(6, 16)).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((logprobs.detach(), gradients))
    (padded, gradients), (packed, gradients_again) = found
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)
    assert gradients.keys() == gradients_again.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradients_again[key], gradient, atol=2e-4, rtol=1e-4)


SEE_ALL = RAGGED - {"Mistral"}  # and not a window


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_which_models_can_share_prompts(name: str) -> None:
    model = agent_of(name, ARCHITECTURES[name]).model
    assert can_share_prompts(model) == (name in SEE_ALL)
    assert not can_share_prompts(model.to(torch.bfloat16))  # scores would be rounded


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "padded") for name in ARCHITECTURES),
        *((name, "grouped") for name in sorted(SEE_ALL)),
        *((name, "continuous") for name in sorted(RAGGED)),
    ],
)
def test_sampler_and_learner_agree(monkeypatch, name: str, way: str) -> None:
    agent = agent_of(name, ARCHITECTURES[name])
    monkeypatch.setattr(decoding, "can_share_prompts", lambda model: way == "grouped")
    slots = 4 if way == "continuous" else 512  # for 9 responses
    rollouts = sample_rollouts(
        TransformersEngine(agent, slots, way == "continuous"), PROBLEMS, 3, SAMPLING, seed=1
    )
    pairs = [(agent.encode_prompt(rollout.problem), rollout.token_ids) for rollout in rollouts]
    with torch.no_grad():
        logprobs_BT, _ = response_logprobs(agent.model, pairs, SAMPLING, agent.device)
    for row, rollout in enumerate(rollouts):
        expected = torch.tensor(rollout.token_logprobs)
        torch.testing.assert_close(logprobs_BT[row, : len(expected)], expected, atol=1e-4, rtol=0)
    spread = torch.tensor([logprob for rollout in rollouts for logprob in rollout.token_logprobs]).std()
    assert spread > 0.1  # not uniform: an error would show


SLOTS = {  # options, whether they can be laid end to end, and whether a cache with slots is theirs
    "Mistral": ({"sliding_window": 9}, True, True),
    # every layer attends twice
    "DiffLlama": ({"num_attention_heads": 4, "num_key_value_heads": 2}, True, False),
    # keys are wider than values
    "DeepseekV2": (
        {
            "num_key_value_heads": 2,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 2,
        },
        True,
        False,
    ),
    # the mask alone knows of the window, and probes are shorter than it is
    "Doge": ({"sliding_window": 9}, False, False),
}


@pytest.mark.parametrize("name", SLOTS)
def test_which_models_support_slots(name: str) -> None:
    """What attention is told must be all there is to it, or responses would be drawn from another model."""
    options, ragged, slots = SLOTS[name]
    base = {key: value for key, value in GROUPED.items() if key != "head_dim" or name == "Mistral"}
    agent = agent_of(name, {**base, **options})
    assert (supports_packing(agent.model), supports_slots(agent.model)) == (ragged, slots)
