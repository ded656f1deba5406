"""Memory that runs out in learning costs an attempt: the update is as if micro-batches had always been small.

The samples have 16, 12, 10, 7, 5 and 4 tokens, so one batch of all is 96 tokens with padding.
"""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AgentSettings,
    AnyMethodSettings,
    GspoSettings,
    HacpoSettings,
    LearningSettings,
    LoraSettings,
    NaiveSettings,
)
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.training.batching import minibatches
from hacrl.training.learn_stats import LearnStats
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample
from tests.support.faults import (
    Raise,
    Where,
    cpu_is_full,
    cublas_is_full,
    gpu_is_full,
    in_reference_cycle,
    no_collector,
    out_of_memory,
)
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, largest_difference, sample, weights

GSPO = GspoSettings(clip_low=0.1, clip_high=0.2)
HACPO = HacpoSettings(delta=0.5, delta_step=0.02, cross_upper=10.0)
KL = NaiveSettings(clip_low=0.5, clip_high=0.5, kl_coefficient=0.1)
AMPLE, SMALL = 128, 32


@pytest.fixture(autouse=True)
def _rows_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable packing: these tests let memory run out by the size of padded rows."""
    monkeypatch.setattr("hacrl.models.logprobs.MAX_PACKED_SHARE", 0.0)


def fresh(dtype: torch.dtype = torch.float32) -> Agent:
    agent = sharpened(char_agent("ada"), 10.0)
    agent.model.to(dtype)
    return agent


def learner(
    agent: Agent, budget: int, method: AnyMethodSettings = GSPO, exact: bool = True, **settings
) -> Learner:
    learning = LearningSettings(**{"lr": 1e-2, "micro_batch_tokens": budget, **settings})
    return Learner(agent, make_method(method), learning, SAMPLING, exact_sampler=exact)


def six(agent: Agent, own: tuple[bool, ...] = (True,) * 6) -> list[LearnerSample]:
    advantages = (1.0, -0.5, 2.0, -1.5, 0.5, 1.0)
    return [sample(agent, i, 0.95, advantage, own=own[i]) for i, advantage in enumerate(advantages)]


@dataclass
class Outcome:
    """The statistics and the state after some steps of a learner."""

    stats: list[LearnStats]
    weights: dict[str, Tensor]
    tensors: dict[str, Tensor]
    versions: int

    def assert_equal(self, other: Outcome) -> None:
        """Compare to the bit, without the notes and counts of the fault."""
        assert self.versions == other.versions
        for one, two in zip(self.stats, other.stats, strict=True):
            assert replace(one, oom_retries=0, notes=[]) == replace(two, oom_retries=0, notes=[])
        for mine, theirs in ((self.weights, other.weights), (self.tensors, other.tensors)):
            assert mine.keys() == theirs.keys()
            assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def outcome(mine: Learner, samples: list[LearnerSample], updates: int = 2, steps: int = 2) -> Outcome:
    """Return the outcome of some steps."""
    stats = [mine.learn(samples, updates, seed) for seed in range(steps)]
    tensors = {name: value.clone() for name, value in mine.optimizer.tensors().items()}
    return Outcome(stats, weights(mine.agent), tensors, mine.agent.policy_version)


def more_than(tokens: int):
    return lambda ids: ids.numel() > tokens


@pytest.mark.parametrize("fail", [gpu_is_full, cpu_is_full, cublas_is_full])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_equal_those_of_small_micro_batches_from_the_start(
    dtype: torch.dtype, where: Where, fail: Raise
) -> None:
    small, large = fresh(dtype), fresh(dtype)
    samples = six(small, own=(True, False, True, True, False, True))
    before = weights(large)
    expected = outcome(learner(small, SMALL, HACPO, measure_alignment=False), samples)
    mine = learner(large, AMPLE, HACPO, measure_alignment=False)  # all samples in one micro-batch
    with out_of_memory(large.model, more_than(SMALL), where, fail) as failed:
        found = outcome(mine, samples)
    found.assert_equal(expected)
    assert largest_difference(found.weights, before) > 5e-3
    # the first mini-batch has three samples, of 16 tokens at most: 48 tokens, then two at once: 32
    assert failed == [(3, 16)]
    assert [stats.oom_retries for stats in found.stats] == [1, 0]
    assert found.stats[1].notes == []
    assert found.stats[0].notes == [
        "agent 'ada': learning from 3 samples of up to 16 tokens at once did not fit into the memory of cpu; "
        "learning.micro_batch_tokens counts as 32 instead of 128 from now on. The update was repeated, "
        "nothing is lost"
    ]
    assert mine.state_dict()["micro_batch_tokens"] == SMALL


def test_the_small_budget_rounds_differently() -> None:
    """Otherwise equality to the bit would prove nothing."""
    for dtype in (torch.float32, torch.bfloat16):
        large, small = fresh(dtype), fresh(dtype)
        samples = six(large)
        one = outcome(learner(large, AMPLE), samples)
        other = outcome(learner(small, SMALL), samples)
        assert any(not torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_micro_batches_that_did_fit_are_dropped(dtype: torch.dtype, where: Where) -> None:
    """Of 64 tokens the micro-batches have 4 and 2 samples: (16, 12, 10, 7) and (5, 4). The last one fails."""
    small, large = fresh(dtype), fresh(dtype)
    samples = six(small)
    expected = outcome(learner(small, 8), samples, updates=1)
    mine = learner(large, 64)
    with out_of_memory(large.model, lambda ids: tuple(ids.shape) == (2, 5), where) as failed:
        found = outcome(mine, samples, updates=1)
    found.assert_equal(expected)
    assert failed == [(2, 5)]
    # halved until two samples of 5 tokens do not go together: 32, 16, 8
    assert mine.state_dict()["micro_batch_tokens"] == 8
    assert found.stats[0].oom_retries == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_old_policy_is_recomputed_in_every_attempt(dtype: torch.dtype, where: Where) -> None:
    """pi_old comes from the successful attempt's micro-batches, also if only the backward pass failed."""
    small, large = fresh(dtype), fresh(dtype)
    samples = six(small)
    expected = outcome(learner(small, SMALL, exact=False), samples)
    with out_of_memory(large.model, more_than(SMALL), where) as failed:
        found = outcome(learner(large, AMPLE, exact=False), samples)
    assert failed == [(3, 16)]
    found.assert_equal(expected)
    assert found.stats[0].sources["ada"].ratios[:3] == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_passes_before_the_first_update_may_run_out_of_memory(dtype: torch.dtype) -> None:
    small, large = fresh(dtype), fresh(dtype)
    samples = six(small)
    seed = next(s for s in range(50) if longest_first_batch(samples, s) <= 10)
    expected = learner(small, SMALL, exact=False).learn(samples, 2, seed)
    mine = learner(large, AMPLE, exact=False)
    with out_of_memory(large.model, lambda ids: not torch.is_grad_enabled() and ids.numel() > 32) as failed:
        found = mine.learn(samples, 2, seed)
    assert failed == [(3, 16)]
    assert replace(found, oom_retries=0, notes=[]) == expected
    assert largest_difference(weights(large), weights(small)) == 0.0
    assert found.oom_retries == 1


def longest_first_batch(samples: list[LearnerSample], seed: int) -> int:
    first = minibatches(samples, 2, 1, "mixed", seed)[0]
    return max(len(one.prompt_ids) + len(one.response_ids) for one in first)


def test_a_later_update_is_repeated_alone() -> None:
    """The first update fits: it is made once, and the second starts from it."""
    small, large = fresh(), fresh()
    samples = six(small)
    seed = next(s for s in range(50) if longest_first_batch(samples, s) <= 10)  # 3 * 10 tokens
    expected = learner(small, SMALL).learn(samples, 2, seed)
    mine = learner(large, AMPLE)
    versions = []
    with out_of_memory(large.model, more_than(SMALL), "backward") as failed:
        hook = large.model.register_forward_pre_hook(lambda *_: versions.append(large.policy_version))
        found = mine.learn(samples, 2, seed)
        hook.remove()
    assert failed == [(3, 16)]
    assert versions == [0, 1, 1, 1]  # one pass; one that fails; two of two samples and of one
    assert replace(found, oom_retries=0, notes=[]) == expected
    assert largest_difference(weights(large), weights(small)) == 0.0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_sample_that_does_not_fit_alone_ends_the_run(where: Where) -> None:
    agent = fresh()
    before, samples = weights(agent), six(agent)
    mine = learner(agent, AMPLE)
    message = (
        r"agent 'ada': learning from a single sample of 16 tokens did not fit into the memory of cpu .*"
        r"learning.offload=all, agents.ada.gradient_checkpointing=true or agents.ada.lora.*"
        r"\(agents.ada.device\), lower rollout.max_new_tokens, or, .* set vllm.sleep=true"
    )
    with (
        out_of_memory(agent.model, more_than(15), where) as failed,
        pytest.raises(TrainingError, match=message),
    ):
        mine.learn(samples, 1, seed=0)
    assert [rows for rows, _ in failed] == [6, 4, 2, 1]
    assert largest_difference(weights(agent), before) == 0.0
    assert agent.policy_version == 0


def test_an_optimizer_that_does_not_fit_ends_the_run() -> None:
    """Smaller micro-batches would not help."""
    agent = fresh()
    mine = learner(agent, AMPLE)
    hook = mine.optimizer.blocks[0].adamw.register_step_pre_hook(lambda *_: gpu_is_full())
    with pytest.raises(TrainingError, match="weights, gradients and optimizer did not fit into the memory"):
        mine.learn(six(agent), 1, seed=0)
    hook.remove()
    assert mine.learn(six(agent), 1, seed=0).updates == 1
    assert mine.state_dict()["micro_batch_tokens"] == AMPLE


def test_other_errors_are_raised() -> None:
    agent = fresh()
    samples = six(agent)
    learns = learner(agent, AMPLE)

    def fail() -> None:
        raise RuntimeError("shapes do not match")

    with (
        out_of_memory(agent.model, more_than(1), fail=fail) as failed,
        pytest.raises(RuntimeError, match="shapes do not match"),
    ):
        learns.learn(samples, 1, seed=0)
    assert len(failed) == 1


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_attempts_tensors_are_freed(where: Where) -> None:
    agent = fresh()
    samples = six(agent)
    learns = learner(agent, AMPLE)  # its trial of the model is no attempt
    outputs: list[weakref.ref[Tensor]] = []
    held: list[int] = []  # of the layer's outputs so far, at the start of each pass

    def remember(_: object, __: object, output: Tensor) -> None:
        outputs.append(weakref.ref(output))
        in_reference_cycle(output)

    with no_collector(), out_of_memory(agent.model, more_than(SMALL), where) as failed:
        hooks = [
            agent.model.register_forward_pre_hook(
                lambda *_: held.append(sum(one() is not None for one in outputs))
            ),
            agent.model.model.layers[0].register_forward_hook(remember),
        ]
        learns.learn(samples, 1, seed=0)
    for hook in hooks:
        hook.remove()
    assert len(failed) == 2
    assert held[:3] == [0, 0, 0]


def loaded(folder: Path, **options) -> Agent:
    fresh().save(folder / "ada")
    return Agent.load(AgentSettings(name="ada", model=str(folder / "ada"), **options), "cpu", seed=3)


@pytest.mark.parametrize("lora", [LoraSettings(rank=2, alpha=8.0), None], ids=["lora", "full"])
def test_the_reference_pass_may_run_out_of_memory(tmp_path: Path, lora: LoraSettings | None) -> None:
    """With adapters, it fails while they are disabled."""
    small, large = (loaded(tmp_path, lora=lora) for _ in range(2))
    samples = six(small)
    expected = outcome(learner(small, SMALL, KL), samples)
    before = weights(large)
    with out_of_memory(large.model, lambda ids: not torch.is_grad_enabled() and ids.numel() > 32) as failed:
        found = outcome(learner(large, AMPLE, KL), samples)  # the copy of the full model fails alike
    assert failed == [(3, 16)]
    found.assert_equal(expected)
    assert largest_difference(found.weights, before) > 5e-3


def test_a_recomputation_may_run_out_of_memory(tmp_path: Path) -> None:
    """Gradient checkpointing changes layers' modes while they compute; all must be restored."""
    small, large = (loaded(tmp_path, gradient_checkpointing=True) for _ in range(2))
    samples = six(small)
    expected = outcome(learner(small, SMALL, KL), samples)
    failed = []

    def fail(_: object, args: tuple[Tensor, ...]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and args[0].shape[0] * args[0].shape[1] > SMALL:
            failed.append(tuple(args[0].shape[:2]))
            gpu_is_full()

    hook = large.model.model.layers[0].register_forward_pre_hook(fail)
    found = outcome(learner(large, AMPLE, KL), samples)
    hook.remove()
    assert failed == [(3, 16)]
    found.assert_equal(expected)
    assert not any(module.training for module in large.model.modules())
    assert not any(module._forward_pre_hooks for module in large.model.modules())


def test_a_resumed_run_keeps_the_smaller_budget() -> None:
    whole, first, second = fresh(), fresh(), fresh()
    samples = six(whole)
    with out_of_memory(whole.model, more_than(SMALL)):
        expected = outcome(learner(whole, AMPLE), samples, steps=2)
    begun = learner(first, AMPLE)
    with out_of_memory(first.model, more_than(SMALL)):
        begun.learn(samples, 2, seed=0)
    resumed = learner(second, AMPLE)
    second.policy_version = first.policy_version
    resumed.optimizer.load_tensors(begun.optimizer.tensors())
    state = json.loads(json.dumps(begun.state_dict()))
    assert state["micro_batch_tokens"] == 32
    resumed.load_state_dict(state)
    assert resumed.learn(samples, 2, seed=1) == expected.stats[1]
    assert largest_difference(weights(second), expected.weights) == 0.0
