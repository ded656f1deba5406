"""A real pretrained model and a random model with another tokenizer, trained together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hacrl.config.schema import (
    AgentSettings,
    EvaluationSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    RunConfig,
)
from hacrl.models.agent import Agent
from hacrl.runs.run import run_locally
from hacrl.types import Problem, Rollout, Verdict
from tests.support.smollm2 import needs_smollm2, unpacked_cache
from tests.support.tokenizer_kinds import agent_with, ascii_tokenizer

pytestmark = [pytest.mark.slow, needs_smollm2]

# strangers are far from each other: bounds so wide that others' rollouts do teach, and probabilities compared
# per token of each, since one's token is a character and the other's a word
WIDE = HacpoSettings(
    clip_low=0.2, clip_high=0.28, delta=0.9999, delta_step=0.0, cross_upper=10.0, ratio_length="own"
)
ENGLISH = (
    "here is something that one could say about a number: it is small, and it comes after another one. "
    "there are many ways to write it down, for example in words. "
)


class EvenTask:
    """Reward 1 for an even number of the letter e: every model succeeds half of the time."""

    def __init__(self) -> None:
        self.name = "even"
        self.max_reward = 1.0
        problems = [Problem(f"p{i}", f"Say something about {i}.", "") for i in range(4)]
        self.train: Sequence[Problem] = problems[:3]
        self.test: Sequence[Problem] = problems[3:]

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        even = [rollout.text.count("e") % 2 == 0 for rollout in rollouts]
        return [Verdict(1.0, "correct") if right else Verdict(0.0, "wrong") for right in even]

    def close(self) -> None:
        """Do nothing."""


def letter_counter() -> Agent:
    """A model of characters that knows how often each of them occurs in English, and nothing else.

    The first coordinate of every hidden state is sqrt(8) after normalisation: what the output layer has there
    is a bias.
    """
    stranger = agent_with(ascii_tokenizer(), "stranger")
    counts = torch.ones(len(stranger.tokenizer)) * 0.05
    for character in ENGLISH:
        counts[stranger.tokenizer.convert_tokens_to_ids(character)] += 1
    with torch.no_grad():
        stranger.model.get_input_embeddings().weight[:, 0] = 5.0
        stranger.model.lm_head.weight[:, 0] = (counts / counts.sum()).log() / math.sqrt(8)
    return stranger


def test_both_learn_from_each_other_across_tokenizers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HACRL_CACHE", str(unpacked_cache(tmp_path_factory)))
    letter_counter().save(tmp_path / "stranger")
    models = {"smol": "smollm2-135m", "stranger": str(tmp_path / "stranger")}
    config = RunConfig(
        agents=tuple(AgentSettings(name=name, model=model) for name, model in models.items()),
        output=str(tmp_path / "run"),
        steps=1,
        device="cpu",
        threads=1,
        method=WIDE,
        rollout=RolloutSettings(prompts_per_step=2, rollouts_per_prompt=2, max_new_tokens=12),
        learning=LearningSettings(lr=1e-4, updates_per_step=1),
        evaluation=EvaluationSettings(problems=0),
    )
    before = {name: Agent.load(settings, "cpu") for name, settings in zip(models, config.agents, strict=True)}
    result = run_locally(config, task=EvenTask())

    metrics = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[0])["agents"]
    for learner, source in (("smol", "stranger"), ("stranger", "smol")):
        learning = metrics[learner]["learning"]
        # 2 prompts x 2 responses, of which (almost) all can be encoded in the other's tokens
        retokenised = learning["retokenised"]
        assert set(retokenised) == {source}
        assert retokenised[source]["rollouts"] >= 3
        assert learning["sources"][source]["used"] >= 1
        assert learning["sources"][source]["clipped"] < 1.0  # some responses had a gradient
        assert learning["updates"] == 1
        assert learning["grad_norm"] > 0
    # a character is at most one token of SmolLM2, whose tokens have several characters
    assert metrics["smol"]["learning"]["retokenised"]["stranger"]["length_ratio"] <= 1
    assert metrics["stranger"]["learning"]["retokenised"]["smol"]["length_ratio"] > 2

    for name, agent in before.items():
        folder = result.folder / "agents" / name
        saved = load_file(folder / "model.safetensors")
        old = agent.model.state_dict()
        moved = [key for key, weights in saved.items() if not weights.equal(old[key])]
        assert len(moved) > len(saved) / 2
        again = Agent.load(AgentSettings(name=name, model=str(folder)), "cpu")
        assert all(again.model.state_dict()[key].equal(weights) for key, weights in saved.items())
        assert again.tokenizer_fingerprint == agent.tokenizer_fingerprint
        assert again.stop_id == agent.stop_id
