"""A GPU that is really full: the process may take only a part of it. Skipped where there is none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, LearningSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.logprobs import response_logprobs
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Sampling
from tests.support.engines import sample_rollouts
from tests.support.sevens import problem
from tests.support.tiny import character_tokenizer, tiny_llama, with_logit_bias
from tests.training.handmade import largest_difference, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SAMPLING = Sampling(48)
SAMPLES, LENGTH = 512, 60
ALL = SAMPLES * LENGTH  # tokens of one forward pass over everything


def fresh() -> Agent:
    tokenizer = character_tokenizer()
    return Agent("ada", tiny_llama(tokenizer, width=256).to("cuda"), tokenizer)


def samples() -> list[LearnerSample]:
    """As many as they are long; what they say does not matter."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 22, (SAMPLES, LENGTH), generator=generator).tolist()
    return [
        LearnerSample(
            prompt_ids=tuple(row[:12]),
            response_ids=tuple(row[12:]),
            behaviour_logprobs=(-3.0,) * (LENGTH - 12),
            behaviour_logprob=-3.0 * (LENGTH - 12),
            source_length=LENGTH - 12,
            source="ada",
            is_own=True,
            advantage=1.0 if index % 2 else -0.5,
        )
        for index, row in enumerate(ids)
    ]


def learner(agent: Agent, budget: int) -> Learner:
    settings = LearningSettings(lr=1e-4, micro_batch_tokens=budget)
    return Learner(agent, make_method(GspoSettings(clip_low=0.5, clip_high=0.5)), settings, SAMPLING)


def peak(work: Callable[[], object]) -> int:
    """Most bytes that the work needs the GPU for, with all that is there already."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated()


@contextmanager
def only(limit: float) -> Iterator[None]:
    """This process may have so many bytes of the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_learning_goes_on_in_smaller_micro_batches() -> None:
    given = samples()
    small = peak(lambda: learner(fresh(), ALL // 16).learn(given, 1, seed=0))
    large = peak(lambda: learner(fresh(), ALL).learn(given, 1, seed=0))
    assert large > 4 * small
    agent = fresh()
    mine = learner(agent, ALL)
    with only(max(2 * small, large / 3)):
        stats = [mine.learn(given, 2, seed=seed) for seed in range(2)]
    assert stats[0].oom_retries >= 1
    assert stats[1].oom_retries == 0
    assert "did not fit into the memory of cuda" in stats[0].notes[0]
    assert agent.policy_version == 4
    budget = mine.state_dict()["micro_batch_tokens"]
    assert ALL // 16 <= budget <= ALL // 2
    expected = fresh()
    undisturbed = learner(expected, budget)
    for seed in range(2):  # a GPU may add up in any order
        losses = undisturbed.learn(given, 2, seed=seed).losses
        assert stats[seed].losses == pytest.approx(losses, rel=1e-3, abs=1e-5)
    assert largest_difference(weights(agent), weights(expected)) < 5e-5
    assert largest_difference(weights(agent), weights(fresh())) > 2e-4


def test_generating_goes_on_with_fewer_responses() -> None:
    problems = [problem(f"{i}+{i}:") for i in range(10, 42)]

    def engine(max_batch: int) -> TransformersEngine:
        agent = fresh()
        agent.model.to("cpu")
        with_logit_bias(agent, {"<eos>": -100.0}).model.to("cuda")
        return TransformersEngine(agent, max_batch)

    group = 128  # 4,096 responses in all
    small = peak(lambda: sample_rollouts(engine(256), problems, group, SAMPLING, seed=0))
    large = peak(lambda: sample_rollouts(engine(8192), problems, group, SAMPLING, seed=0))
    assert large > 4 * small
    crowded = engine(8192)
    with only(max(2 * small, large / 3)):
        rollouts = sample_rollouts(crowded, problems, group, SAMPLING, seed=0)
    assert len(crowded.take_notes()) >= 1
    assert 256 <= crowded.max_batch < 4096
    assert [r.problem.id for r in rollouts] == [p.id for p in problems for _ in range(group)]
    assert {r.num_tokens for r in rollouts} == {48}
    pairs = [(crowded.policy.encode_prompt(r.problem), r.token_ids) for r in rollouts[::8]]
    with torch.no_grad():
        truth, _ = response_logprobs(crowded.policy.model, pairs, SAMPLING, torch.device("cuda"))
    found = torch.tensor([r.token_logprobs for r in rollouts[::8]])  # across the place where they broke off
    torch.testing.assert_close(found, truth.cpu(), atol=1e-3, rtol=0)
    assert len({r.token_ids for r in rollouts}) == len(rollouts)  # nobody says what another said


def fill() -> list[torch.Tensor]:
    """Take all that is left, in pieces smaller than any activation."""
    taken: list[torch.Tensor] = []
    while True:
        try:
            taken.append(torch.empty(1 << 12, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            return taken


def test_what_never_fits_is_an_error_that_says_what_to_do() -> None:
    agent = fresh()
    mine = learner(agent, ALL)
    mine.learn(samples()[:2], 1, seed=0)  # weights, gradients and moments are there
    gc.collect()
    torch.cuda.empty_cache()
    with only(torch.cuda.memory_reserved()):
        filling = fill()
        with pytest.raises(TrainingError, match=r"single sample of 60 tokens .*agents\.ada\.device"):
            mine.learn(samples(), 1, seed=0)
        del filling
    assert mine.learn(samples(), 1, seed=0).updates == 1  # nothing is lost for a process that makes room
