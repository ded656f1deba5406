"""Gradient checkpointing saves memory and nothing else: the same loss, the same gradients, dropout off."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM, OPTConfig, OPTForCausalLM

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, LearningSettings, LoraSettings, NaiveSettings
from hacrl.engines.hf.batch_decoding import can_share_prompts, decodes_in_step
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import ModelError
from hacrl.models.agent import Agent
from hacrl.training.gradient_checkpointing import checkpointed_layers
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Sampling
from tests.support.engines import sample_rollouts
from tests.support.sevens import problem
from tests.support.tiny import absolute_agent, char_agent, character_tokenizer, pair_agent, sharpened
from tests.training.handmade import PROMPTS, RESPONSES, SAMPLING, sample

LAYERS = 2  # of every tiny agent
TOKENS = {"vocab_size": 22, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}


def opt_agent() -> Agent:
    """OPT calls dropout as a function inside its layers, which reads the layer's own mode."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": LAYERS}
    config = OPTConfig(num_attention_heads=2, max_position_embeddings=64, **sizes, **TOKENS)
    return Agent("opt", OPTForCausalLM(config).eval(), character_tokenizer())


def falcon_agent() -> Agent:
    """Falcon calls dropout like OPT does."""
    torch.manual_seed(0)
    config = FalconConfig(hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=2, **TOKENS)
    return Agent("falcon", FalconForCausalLM(config).eval(), character_tokenizer())


MAKERS: dict[str, Callable[[], Agent]] = {
    "Qwen3": char_agent,
    "Llama": pair_agent,
    "GPT-2": absolute_agent,
    "OPT": opt_agent,
    "Falcon": falcon_agent,
}
DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "dropout", "hidden_dropout")
FULL: dict[str, Any] = {}
LORA: dict[str, Any] = {"lora": LoraSettings(rank=2, alpha=8.0)}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a saved agent whose config sets dropout everywhere."""
    agent = sharpened(MAKERS[request.param](), 5.0)
    named = [key for key in DROPOUTS if hasattr(agent.model.config, key)]
    assert named
    for key in named:
        setattr(agent.model.config, key, 0.5)
    agent.save(tmp_path / "model")
    return tmp_path / "model"


def loaded(folder: Path, checkpointing: bool, **options: Any) -> Agent:
    settings = AgentSettings(name="ada", model=str(folder), gradient_checkpointing=checkpointing, **options)
    agent = Agent.load(settings, "cpu", seed=3)
    with torch.no_grad():  # fresh adapters have no effect: give them one
        for name, parameter in agent.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    return agent


def samples(agent: Agent) -> list[LearnerSample]:
    return [
        sample(agent, 0, ratio=1.0, advantage=1.0),
        sample(agent, 1, ratio=0.9, advantage=2.0, own=False),
        sample(agent, 3, ratio=1.1, advantage=-1.5, own=False, retokenised=True),
    ]


def update(agent: Agent, **settings: float) -> tuple[float, list[Tensor]]:
    """Return the loss of one update with a KL term, and its gradients."""
    method = make_method(NaiveSettings(clip_low=0.5, clip_high=0.5, kl_coefficient=0.1))
    learner = Learner(agent, method, LearningSettings(max_grad_norm=1e9, **settings), SAMPLING)
    with torch.no_grad():  # away from the reference, or the KL term has no gradient
        for parameter in agent.model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    stats = learner.learn(samples(agent), updates=1, seed=0)
    trained = [p for p in agent.model.parameters() if p.requires_grad]
    return stats.losses[0], [p.grad.clone() for p in trained if p.grad is not None]


def layers(agent: Agent) -> list[torch.nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in agent.model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def counted(agent: Agent) -> Iterator[Counter[int]]:
    """Count how often each layer runs."""
    calls: Counter[int] = Counter()
    handles = [
        layer.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
        for index, layer in enumerate(layers(agent))
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("options", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("folder", MAKERS, indirect=True)
def test_loss_and_gradients_equal_those_without_checkpointing(folder: Path, options: dict[str, Any]) -> None:
    loss, gradients = update(loaded(folder, False, **options))
    same_loss, same_gradients = update(loaded(folder, True, **options))
    assert same_loss == pytest.approx(loss, rel=1e-6)
    assert len(gradients) == len(same_gradients) > 0
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3
    for one, other in zip(gradients, same_gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("folder", MAKERS, indirect=True)
def test_layers_are_recomputed_in_the_backward_pass(folder: Path, options: dict[str, Any]) -> None:
    method = make_method(NaiveSettings())
    for checkpointing, runs in ((False, 1), (True, 2)):
        agent = loaded(folder, checkpointing, **options)
        learner = Learner(agent, method, LearningSettings(), SAMPLING)
        one = [sample(agent, 0, ratio=1.0, advantage=1.0)]
        with counted(agent) as calls:
            learner.learn(one, updates=1, seed=0)
        assert dict(calls) == dict.fromkeys(range(LAYERS), runs)


@pytest.mark.parametrize("folder", ["Qwen3", "OPT"], indirect=True)
def test_a_layer_used_twice_is_recomputed_twice(folder: Path) -> None:
    agent = loaded(folder, True)
    ids = torch.tensor([[*PROMPTS[0], *RESPONSES[0]]])
    with counted(agent) as calls, checkpointed_layers(agent.model):
        sum(agent.model(ids, use_cache=False).logits.sum() for _ in range(2)).backward()
    assert dict(calls) == dict.fromkeys(range(LAYERS), 4)


@pytest.mark.parametrize("options", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("folder", MAKERS, indirect=True)
def test_generation_between_updates_uses_the_cache(
    folder: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """6 tokens for each of 2 prompts x 2: one pass over the prompts, then 5 of one token. No dropout.

    Prompts are padded, or laid end to end, as the 4 tokens are then.
    """
    agent = loaded(folder, True, **options)
    learner = Learner(agent, make_method(NaiveSettings()), LearningSettings(lr=1e-3), SAMPLING)
    agent.stop_ids = frozenset()  # every response has all its tokens
    assert decodes_in_step(agent.model)  # a trial, so that forward passes are generation's from now on
    engine, sampling = TransformersEngine(agent), Sampling(6)
    asked = [problem("11:"), problem("1+1:")]
    prompts = [len(agent.encode_prompt(one)) for one in asked]
    expected = [sum(prompts), *[4] * 5] if can_share_prompts(agent.model) else [max(prompts), *[1] * 5]
    lengths: list[int] = []

    def seen(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        lengths.append(hidden.shape[1])

    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.WARNING, logger="transformers"):
        for seed in range(2):
            lengths.clear()
            handle = layers(agent)[0].register_forward_pre_hook(seen, with_kwargs=True)
            rollouts = sample_rollouts(engine, asked, 2, sampling, seed)
            handle.remove()
            assert lengths == expected
            own = [
                LearnerSample(
                    prompt_ids=agent.encode_prompt(rollout.problem),
                    response_ids=rollout.token_ids,
                    behaviour_logprobs=rollout.token_logprobs,
                    behaviour_logprob=rollout.logprob,
                    source_length=6,
                    source="ada",
                    is_own=True,
                    advantage=(-1.0) ** row,
                )
                for row, rollout in enumerate(rollouts)
            ]
            stats = learner.learn(own, updates=1, seed=seed)
            assert len(stats.sampler_gaps) == 24
            assert max(stats.sampler_gaps) < 2e-5  # with dropout of 0.5 it is above 0.1
    logging.getLogger("transformers").propagate = False
    assert caplog.records == []


def interrupt(agent: Agent) -> None:
    assert any(module.training for module in agent.model.modules())
    raise RuntimeError("interrupted")


@pytest.mark.parametrize("folder", ["Qwen3", "OPT"], indirect=True)
def test_a_failed_update_leaves_no_layer_in_training_mode(folder: Path) -> None:
    agent = loaded(folder, True)
    with pytest.raises(RuntimeError, match="interrupted"), checkpointed_layers(agent.model):
        interrupt(agent)
    assert not any(module.training for module in agent.model.modules())
    assert [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers(agent)] == [0, 0]


@pytest.mark.parametrize("folder", ["Qwen3"], indirect=True)
def test_without_the_setting_no_layer_changes_its_mode(folder: Path) -> None:
    agent = loaded(folder, False)
    with checkpointed_layers(agent.model):
        assert not any(module.training for module in agent.model.modules())


@pytest.mark.parametrize("folder", ["Qwen3"], indirect=True)
def test_a_model_without_checkpointing_support_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match=r"agents\.ada\.gradient_checkpointing: Qwen3ForCausalLM does not"):
        loaded(folder, True)
