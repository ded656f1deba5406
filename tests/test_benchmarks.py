"""The comparison with TRL: equal work on both sides, and correctly counted FLOPs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.engines import sample_rollouts
from tests.support.families import family

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, no package

import episode_round_trips
from comparison_tables import step_table
from hacrl_side import measure, measure_updates
from shapes import SHAPES, make_agent
from training_work import Measured, Work, learning_flops, make_agents, matrix_parameters

from hacrl.config.schema import AgentSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.types import Problem, Sampling

WORK = Work(
    shapes=("qwen3-0.85m", "qwen3-0.85m"),
    device="cpu",
    prompts=2,
    samples=4,
    prompt_letters=5,
    new_tokens=6,
    updates=1,
    micro_batch=8,
    steps=1,
    warmup=1,
    checkpointing=False,
)


@pytest.mark.parametrize("shape", ["qwen3-0.85m", "qwen3-tiny", "llama-tiny"])
def test_counted_parameters_are_those_of_the_layers_matrices(shape: str, tmp_path: Path) -> None:
    """Against the real model: all weights of linear layers but the output layer."""
    make_agent(shape, tmp_path, torch.float32, "cpu")
    model = Agent.load(AgentSettings(name="a", model=str(tmp_path)), "cpu").model
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert matrix_parameters(shape) == sum(module.weight.numel() for module in linear)


def test_the_smallest_shape_has_the_size_in_its_name(tmp_path: Path) -> None:
    """4 layers x (4 x 128^2 + 3 x 128 x 384) = 851,968 in matrices, 30 x 128 in embeddings, and norms."""
    make_agent("qwen3-0.85m", tmp_path, torch.float32, "cpu")
    model = Agent.load(AgentSettings(name="a", model=str(tmp_path)), "cpu").model
    assert matrix_parameters("qwen3-0.85m") == 851_968
    norms = 4 * (2 * 128 + 2 * 32) + 128
    assert model.num_parameters() == 851_968 + 30 * 128 + norms


def test_flops_of_one_sequence_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 layer, 2 heads of 3, 1 of keys, hidden 5, inner 7, 11 tokens; a prompt of 2 and a response of 4.

    Matrices: 5 x 6 (q) + 2 x 5 x 3 (k, v) + 6 x 5 (o) + 3 x 5 x 7 = 195, 6 x 195 x 6 = 7,020. Attention:
    6 x 1 x 2 x 3 x 6^2 = 1,296. Output layer: 6 x 5 x 11 x 4 = 1,320.
    """
    shape = {
        "vocab_size": 11,
        "hidden_size": 5,
        "intermediate_size": 7,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 3,
    }
    monkeypatch.setitem(SHAPES, "by-hand", shape)
    assert learning_flops("by-hand", [(2, 4)]) == 7020 + 1296 + 1320
    assert learning_flops("by-hand", [(2, 4), (2, 4)]) == 2 * 9636


@pytest.mark.parametrize("shape", ["qwen3-0.85m", "llama-tiny"])
def test_agents_without_stop_tokens_never_stop(shape: str, tmp_path: Path) -> None:
    """With 30 tokens, one in 30 would stop by chance: 400 drawn ones would hardly do without."""
    make_agent(shape, tmp_path, torch.float32, "cpu", stops=False)
    agent = Agent.load(AgentSettings(name="a", model=str(tmp_path)), "cpu")
    rollouts = sample_rollouts(TransformersEngine(agent), [Problem("1", "abc", "")], 20, Sampling(20), seed=0)
    assert {len(rollout.token_ids) for rollout in rollouts} == {20}
    ids = torch.tensor([[5, 9, 13]])
    with torch.no_grad():
        probabilities = agent.model(input_ids=ids).logits.softmax(dim=-1)
    assert float(probabilities[..., sorted(agent.stop_ids)].max()) == 0.0


def test_hacpo_learns_from_both_agents_rollouts_and_gspo_from_its_own(tmp_path: Path) -> None:
    """Both agents read letters, so tokens are (5 + 6) x 8 own ones for each of 2, twice that when shared."""
    folders = make_agents(WORK, tmp_path)
    alone, shared = measure(WORK, folders, "gspo"), measure(WORK, folders, "hacpo")
    assert alone.generated_tokens == shared.generated_tokens == 2 * 8 * 6
    assert alone.learnt_tokens == 2 * 8 * 11
    assert shared.learnt_tokens == 2 * alone.learnt_tokens
    assert shared.learnt_flops == 2 * alone.learnt_flops == 4 * learning_flops("qwen3-0.85m", [(5, 6)] * 8)
    for found in (alone, shared):
        assert len(found.seconds) == 1  # the first one does not count
        phases = {phase: s for phase, s in found.seconds[0].items() if phase not in ("step", "cpu")}
        assert sum(phases.values()) == pytest.approx(found.seconds[0]["step"])


def test_a_learner_alone_is_trained_on_given_responses(tmp_path: Path) -> None:
    """8 prompts of 3 and responses of 6 tokens."""
    work = Work(**{**WORK.__dict__, "shapes": ("qwen3-0.85m",), "given_prompt_tokens": 3})
    found = measure_updates(work, make_agents(work, tmp_path)[0])
    assert found.learnt_tokens == 8 * 9
    assert len(found.seconds) == 1


def test_ratios_compare_medians_and_fastest_steps() -> None:
    """TRL's middle step takes 4 s, ours 2; fastest 3 and 1; all 12 and 12. A side that failed has none."""
    ours = Measured("hacrl GSPO", [{"step": s, "learn": s / 2} for s in (1.0, 2.0, 9.0)], 60, 80)
    trl = Measured("TRL GSPO", [{"step": s, "learn": s / 4} for s in (3.0, 4.0, 5.0)], 60, 80)
    table = step_table(WORK, [ours, trl, Measured("hacrl HACPO", failure="out of memory")], None)
    assert "TRL GSPO / hacrl GSPO: step 2.00, fastest step 3.00, all steps 1.00, learn 1.00" in table
    assert "hacrl HACPO  out of memory" in table
    assert "TRL GSPO / hacrl HACPO" not in table


def test_one_measured_agent_counts_for_all_agents() -> None:
    """Seconds, tokens and FLOPs double; memory is that of the one that was trained."""
    one = Measured("TRL GSPO", [{"step": 3.0, "learn": 2.0}, {"step": 5.0}], 60, 80, 7.0, {"held": 9.0})
    two = [{"step": 6.0, "learn": 4.0}, {"step": 10.0}]
    assert one.times(2) == Measured("TRL GSPO", two, 120, 160, 14.0, {"held": 9.0})
    assert one.times(2).total() == 16.0


def test_round_trips_of_episodes_count_what_comes_back() -> None:
    """Llama writes one call a turn; Qwen3 and Gemma write several."""
    found = episode_round_trips.measure([family(name) for name in ("qwen3", "llama3.2", "gemma3")], 2)
    several = {("qwen3", "llama3.2"): [2, 0], ("qwen3", "gemma3"): [2, 2], ("llama3.2", "qwen3"): [0, 0]}
    assert several.items() <= found["several calls a turn"].items()
    assert set(map(tuple, found["one call a turn"].values())) == {(2, 2)}
