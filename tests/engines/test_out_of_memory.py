"""Memory that runs out while generating: responses are as if fewer had been decoded side by side."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from hacrl.engines.hf import batch_decoding as decoding
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.types import Rollout, Sampling
from tests.support.engines import sample_rollouts
from tests.support.faults import (
    Raise,
    cpu_is_full,
    cublas_is_full,
    gpu_is_full,
    in_reference_cycle,
    no_collector,
    out_of_memory,
)
from tests.support.forward import plain_logprobs
from tests.support.sevens import problem
from tests.support.tiny import char_agent, sharpened, with_logit_bias


@pytest.fixture(autouse=True)
def padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model is given shows how many responses there are. Grouped ones: test_shared_prompts.py."""
    monkeypatch.setattr(decoding, "can_share_prompts", lambda model: False)


PROBLEMS = [problem(prompt) for prompt in ("1:", "(23+14)*2:", "7-4:", "2+3+4+5+6+77:", "0:")]
SAMPLING = Sampling(10)


def fresh() -> Agent:
    """Its responses end at different places."""
    agent = with_logit_bias(sharpened(char_agent("ada")), {"<eos>": 2.0})
    assert decoding.decodes_in_step(
        agent.model
    )  # a trial, so that forward passes are generation's from now on
    return agent


def undisturbed(max_batch: int, group: int = 3, sampling: Sampling = SAMPLING) -> list[Rollout]:
    return sample_rollouts(TransformersEngine(fresh(), max_batch), PROBLEMS, group, sampling, seed=2)


def more_rows_than(rows: int):
    return lambda ids: ids.shape[0] > rows


@pytest.mark.parametrize("fail", [gpu_is_full, cpu_is_full, cublas_is_full])
def test_a_smaller_batch_samples_as_if_it_had_been_small_from_the_start(fail: Raise) -> None:
    engine = TransformersEngine(fresh(), 512)
    with out_of_memory(engine.policy.model, more_rows_than(7), fail=fail) as failed:
        rollouts = sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=2)
        again = sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=2)
    # 15 responses side by side; 256, 128, 64, 32, 16 would be as many, 8 are two groups of 3
    assert failed == [(15, 1)]
    assert engine.max_batch == 8
    assert rollouts == again == undisturbed(8)
    assert rollouts != undisturbed(512)  # the draws depend on who is drawn with whom
    assert engine.take_notes() == [
        "agent 'ada': 15 responses side by side did not fit into the memory of cpu; rollout.max_batch counts "
        "as 8 instead of 512 from now on. Nothing is lost"
    ]
    assert engine.take_notes() == []


@pytest.mark.parametrize("max_batch", [6, 7])
def test_the_prompts_alone_may_be_too_many(max_batch: int) -> None:
    engine = TransformersEngine(fresh(), max_batch)
    with out_of_memory(engine.policy.model, lambda ids: ids.shape == (2, 10)) as failed:
        rollouts = sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=2)
    assert failed == [(2, 10)]  # two prompts, the longer one of 10 tokens
    assert engine.max_batch == 3
    assert rollouts == undisturbed(3)


@pytest.mark.parametrize("tokens", [1, 4, 6])
def test_random_draws_of_the_failed_attempt_are_taken_back(tokens: int) -> None:
    """It fails after some tokens: the cache has grown too large."""
    engine = TransformersEngine(fresh(), 512)
    rows: list[int] = []

    def late(ids: Tensor) -> bool:
        rows.append(ids.shape[0])
        return len(rows) == tokens + 1

    with out_of_memory(engine.policy.model, late) as failed:
        rollouts = sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=2)
    assert failed == [(rows[tokens], 1)]
    assert engine.max_batch == 8  # of 15, though half may have ended by then
    assert rollouts == undisturbed(8)


def test_what_was_finished_before_is_kept() -> None:
    """The second of two chunks fails; its draws go on from where the first one's ended."""
    heard: list[int] = []
    engine = TransformersEngine(fresh(), 9)
    with out_of_memory(engine.policy.model, lambda ids: len(heard) == 9 and ids.shape[0] > 3) as failed:
        rollouts = sample_rollouts(
            engine, PROBLEMS, 3, SAMPLING, seed=2, on_finished=lambda place, _: heard.append(place)
        )
    assert failed == [(6, 1)]
    assert heard == list(range(15))  # each is told of once
    expected = TransformersEngine(fresh(), 9)

    def shrink(place: int, _: Rollout) -> None:
        if place == 8:
            expected.max_batch = 4

    assert engine.max_batch == 4
    assert rollouts == sample_rollouts(expected, PROBLEMS, 3, SAMPLING, seed=2, on_finished=shrink)
    assert rollouts[:9] == undisturbed(9)[:9]
    assert rollouts[9:] != undisturbed(9)[9:]


@pytest.mark.parametrize(("fits", "parts"), [(1, [1, 1, 1, 1]), (2, [2, 2]), (3, [2, 2]), (4, [4])])
def test_a_group_may_be_split_down_to_single_responses(fits: int, parts: list[int]) -> None:
    engine = TransformersEngine(fresh(), 64)
    prefilled: list[tuple[int, int]] = []
    with out_of_memory(engine.policy.model, more_rows_than(fits)):
        rollouts = sample_rollouts(engine, PROBLEMS[:1], 4, SAMPLING, seed=2)
    assert engine.max_batch == (parts[0] if fits < 4 else 64)
    smaller = TransformersEngine(fresh(), engine.max_batch)
    hook = smaller.policy.model.register_forward_pre_hook(
        lambda _, __, kwargs: prefilled.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    assert rollouts == sample_rollouts(smaller, PROBLEMS[:1], 4, SAMPLING, seed=2)
    hook.remove()
    assert prefilled.count((1, 2)) == len(parts)  # "1:" is read once for each part
    assert [r.problem.id for r in rollouts] == ["1:"] * 4


@pytest.mark.parametrize("max_batch", [1, 2, 5, 8])
def test_split_groups_are_in_order_and_have_the_models_logprobs(max_batch: int) -> None:
    """Seven responses to each, in parts, also if the last part is smaller."""
    agent = fresh()
    widths: list[int] = []
    with out_of_memory(agent.model, lambda ids: bool(widths.append(len(ids)))):
        rollouts = sample_rollouts(TransformersEngine(agent, max_batch), PROBLEMS, 7, SAMPLING, seed=4)
    assert max(widths) == min(max_batch, 7)
    assert [r.problem.id for r in rollouts] == [p.id for p in PROBLEMS for _ in range(7)]
    assert len({r.token_ids for r in rollouts}) > 20
    for rollout in rollouts:
        with torch.no_grad():
            prompt = agent.encode_prompt(rollout.problem)
            expected = plain_logprobs(agent.model, prompt, rollout.token_ids, SAMPLING)
        assert rollout.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_response_that_does_not_fit_alone_ends_the_run() -> None:
    engine = TransformersEngine(fresh(), 4)
    message = (
        r"agent 'ada': a single response of up to 20 tokens, prompt included, did not fit into the memory of "
        r"cpu .*\(agents.ada.device\), agents.ada.precision=bfloat16, or fewer rollout.max_new_tokens"
    )
    with (
        out_of_memory(engine.policy.model, lambda _: True) as failed,
        pytest.raises(TrainingError, match=message),
    ):
        sample_rollouts(engine, PROBLEMS[1:2], 4, SAMPLING, seed=0)
    assert failed == [(1, 10)] * 3  # the prompt, for 4, 2 and 1 responses


def test_other_errors_are_raised() -> None:
    engine = TransformersEngine(fresh(), 64)

    def fail() -> None:
        raise RuntimeError("shapes do not match")

    with (
        out_of_memory(engine.policy.model, more_rows_than(7), fail=fail),
        pytest.raises(RuntimeError, match="shapes do not match"),
    ):
        sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=0)
    assert (engine.max_batch, engine.notes) == (64, [])


def test_the_failed_attempt_is_freed_before_the_next() -> None:
    engine = TransformersEngine(fresh(), 64)
    caches: list[weakref.ref[Any]] = []
    held: list[int] = []

    def look(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs["past_key_values"]
        if not any(one() is cache for one in caches):
            held.append(sum(one() is not None for one in caches))
            caches.append(weakref.ref(cache))
            in_reference_cycle(cache)

    hook = engine.policy.model.register_forward_pre_hook(look, with_kwargs=True)
    with no_collector(), out_of_memory(engine.policy.model, more_rows_than(7)) as failed:
        sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=0)
    hook.remove()
    assert len(failed) == 1
    assert held[:2] == [0, 0]


def test_a_resumed_run_keeps_the_smaller_batch() -> None:
    engine, resumed = TransformersEngine(fresh(), 64), TransformersEngine(fresh(), 64)
    with out_of_memory(engine.policy.model, more_rows_than(7)):
        sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=0)
    resumed.load_state_dict(json.loads(json.dumps(engine.state_dict())))
    assert sample_rollouts(resumed, PROBLEMS, 3, SAMPLING, seed=1) == sample_rollouts(
        engine, PROBLEMS, 3, SAMPLING, seed=1
    )
    assert resumed.state_dict() == {"max_batch": 8}
