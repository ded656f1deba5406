"""On a CPU, too, samples with the same prompt are learnt from together, and it is computed once for them."""

from __future__ import annotations

import pytest

from hacrl.algorithms.methods import make_method
from hacrl.algorithms.settings import GspoSettings
from hacrl.learning.learner import Learner
from hacrl.learning.settings import LearningSettings
from hacrl.types import LearnerSample
from tests.learning.handmade import SAMPLING, largest_difference, weights
from tests.support.tiny import char_agent, sharpened

PROMPTS = [tuple(range(3, 15)), tuple(range(4, 16)), tuple(range(5, 17))]  # of 12 tokens


def learnt(budget: int) -> tuple[list[int], dict]:
    """Tokens of every forward pass of a second update, and weights, from 4 responses of 3 to each prompt."""
    agent = sharpened(char_agent(), 10.0)
    settings = LearningSettings(lr=1e-2, micro_batch_tokens=budget)
    learner = Learner(agent, make_method(GspoSettings(clip_low=0.9, clip_high=9.0)), settings, SAMPLING)
    samples = [
        LearnerSample(
            prompt_ids=prompt,
            response_ids=(4 + number, 7, 9),
            behaviour_logprobs=(-1.0, -1.5, -2.0),
            behaviour_logprob=-4.5,
            source_length=3,
            source=agent.name,
            is_own=True,
            advantage=1.0 - number,
        )
        for prompt in PROMPTS
        for number in (0, 2, 3, 4)
    ]
    learner.learn(samples, updates=1, seed=4)  # in which what the model can do is tried, too
    computed: list[int] = []
    hook = agent.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, given: computed.append(given[0].numel())
    )
    assert learner.learn(samples, updates=1, seed=5).notes == []
    hook.remove()
    return computed, weights(agent)


@pytest.mark.parametrize(
    ("budget", "passes"),
    [
        (24, [24, 24, 24]),  # 12 and 4 times 3: a prompt at a time, however samples were shuffled
        (48, [42, 42]),  # two about equal ones, with one of the prompts in both
        (4096, [72]),
    ],
)
def test_a_prompt_is_computed_once(budget: int, passes: list[int]) -> None:
    computed, found = learnt(budget)
    assert computed == passes  # rows of their own would be 12 times 15 tokens
    _, alone = learnt(1)
    assert largest_difference(found, alone) < 1e-4
