"""An agent that is not on the first GPU. Skipped without a second one."""

from __future__ import annotations

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, LearningSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.training.learner import Learner
from hacrl.types import Sampling
from tests.gpu.test_fast_paths import PROBLEMS, agent_of, sample
from tests.support.engines import sample_rollouts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def said_and_learnt(device: str) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    agent = agent_of(torch.bfloat16)
    agent.model.to(device)
    rollouts = sample_rollouts(TransformersEngine(agent), PROBLEMS, 4, Sampling(24), seed=3)
    learner = Learner(agent, make_method(GspoSettings()), LearningSettings(lr=1e-3), Sampling(64))
    learner.learn([sample(i, length) for i, length in enumerate((40, 3, 17, 29))], 2, 0)
    weights = torch.cat([parameter.detach().cpu().flatten() for parameter in agent.model.parameters()])
    return [rollout.token_ids for rollout in rollouts], weights


def test_the_second_gpu_does_what_the_first_one_does() -> None:
    first, second = said_and_learnt("cuda:0"), said_and_learnt("cuda:1")
    assert torch.cuda.current_device() == 0
    assert second[0] == first[0]
    torch.testing.assert_close(second[1], first[1], rtol=0.02, atol=1e-3)
