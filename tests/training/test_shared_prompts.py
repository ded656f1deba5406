"""Samples with the same prompt share one computation of it in learning, on a CPU too."""

from __future__ import annotations

import pytest

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, LearningSettings
from hacrl.training.batching import micro_batches
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample
from tests.support.faults import out_of_memory
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, largest_difference, weights

PROMPTS = [tuple(range(3, 15)), tuple(range(4, 16)), tuple(range(5, 17))]  # of 12 tokens


def learnt(budget: int) -> tuple[list[int], dict]:
    """Return the tokens of each forward pass of a second update, and the weights; 4 responses per prompt."""
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


def fresh_samples(shapes: list[tuple[int, int, int]]) -> list[LearnerSample]:
    """Return samples; each shape is (prompt tokens, number of responses, tokens per response)."""
    return [
        LearnerSample(
            prompt_ids=(3 + number, *range(4, 3 + prompt)),
            response_ids=(4 + which % 9, *[7] * (tokens - 1)),
            behaviour_logprobs=(-1.0,) * tokens,
            behaviour_logprob=-float(tokens),
            source_length=tokens,
            source="ada",
            is_own=True,
            advantage=1.0 - which % 3,
        )
        for number, (prompt, responses, tokens) in enumerate(shapes)
        for which in range(responses)
    ]


def test_the_budget_shrinks_if_a_padded_micro_batch_was_counted_as_packed() -> None:
    """Two samples of 24 and 16 tokens are 40 laid end to end and 48 in rows, which saves too little.

    So they are computed in rows, though all samples together were cut as packed ones.
    """
    agent = sharpened(char_agent("ada"))
    settings = LearningSettings(lr=1e-2, micro_batch_tokens=40)
    learner = Learner(agent, make_method(GspoSettings()), settings, SAMPLING)
    samples = fresh_samples([(14, 1, 10), (10, 1, 6), (10, 15, 2)])
    with out_of_memory(agent.model, lambda ids: ids.numel() == 48) as failed:
        stats = learner.learn(samples, updates=1, seed=0)
    assert failed == [(2, 24)]
    assert learner.state_dict()["micro_batch_tokens"] == 20
    assert len(stats.notes) == 1
    assert "counts as 20 instead of 40" in stats.notes[0]


def test_unshared_tokens_are_bounded() -> None:
    """16 responses of 2 tokens to a prompt of 10 are 42 tokens if packed, 192 unshared; 8 are 96 unshared."""
    samples = fresh_samples([(10, 16, 2)])
    assert [len(one) for one in micro_batches(samples, 42, packed=True)] == [16]
    assert [len(one) for one in micro_batches(samples, 42, packed=True, max_unshared_tokens=168)] == [8, 8]


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
