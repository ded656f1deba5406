"""Responses that share one copy of their prompt: logits of plain forward passes, for less work."""

from __future__ import annotations

import weakref
from itertools import groupby

import pytest
import torch

from hacrl.engines.hf import batch_decoding as decoding
from hacrl.engines.hf.batch_decoding import SharedPromptRows, can_share_prompts
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.types import Sampling
from tests.support.engines import sample_rollouts
from tests.support.faults import in_reference_cycle, no_collector, out_of_memory
from tests.support.sevens import problem
from tests.support.tiny import char_agent, sharpened, with_logit_bias

PROMPTS = {
    "of different lengths": [(4, 21), (16, 5, 6, 13, 4, 7, 17, 15, 5, 21), (10, 14, 7, 21)],
    "of one length": [(4, 21, 7), (16, 5, 6), (10, 14, 7)],
    "of one token": [(4,), (9, 9)],
}
PROBLEMS = [problem(prompt) for prompt in ("1:", "(23+14)*2:", "7-4:", "2+3+4+5+6+77:", "0:")]
SAMPLING = Sampling(10)


def fresh() -> Agent:
    """An agent whose responses have different lengths."""
    return with_logit_bias(sharpened(char_agent("ada")), {"<eos>": 3.0})


def plain(model, sequences) -> torch.Tensor:
    """Logits of the next token, one sequence at a time."""
    return torch.cat([model(input_ids=torch.tensor([ids])).logits[:, -1] for ids in sequences])


@torch.no_grad()
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS.keys())
def test_logits_are_those_of_plain_forward_passes(prompts) -> None:
    """Before and after rows are dropped, also twice, also before the first token."""
    model = sharpened(char_agent()).model
    draw = torch.Generator().manual_seed(0)
    rows = SharedPromptRows(model, prompts, 3)
    said = [tuple(prompt) for prompt in prompts for _ in range(3)]
    compared = 0
    for keep in ([5, 0, 1, 3, 4], None, None, [4, 0, 1], None, [1], None):
        torch.testing.assert_close(rows.logits, plain(model, said), atol=1e-5, rtol=0)
        if keep is not None:
            rows.keep(torch.tensor(keep))
            said = [said[row] for row in keep]
        token_ids = torch.randint(3, 20, (len(said),), generator=draw)
        rows.forward(token_ids)
        said = [(*one, token) for one, token in zip(said, token_ids.tolist(), strict=True)]
        compared += len(said)
    torch.testing.assert_close(rows.logits, plain(model, said), atol=1e-5, rtol=0)
    assert compared == 3 * 5 + 2 * 3 + 2 * 1


def test_prompts_are_computed_and_kept_once() -> None:
    """Of 2, 10 and 4 tokens, for 4 responses each; then one token for each of 12 rows."""
    model = sharpened(char_agent()).model
    can_share_prompts(model)  # the trial forward pass must not be counted
    computed: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, given: computed.append(given[0].numel())
    )
    with torch.no_grad():
        rows = SharedPromptRows(model, PROMPTS["of different lengths"], 4)
        rows.forward(torch.full((12,), 7))
    hook.remove()
    assert computed == [16, 12]
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    assert [states.numel() for states in rows._prompts] == [2 * 3 * heads * 10 * width] * len(rows._own)


def test_shared_and_padded_rows_sample_the_same_tokens(monkeypatch) -> None:
    """The same draws, hence the same tokens, whose log-probabilities differ by rounding."""
    grouped = sample_rollouts(TransformersEngine(fresh()), PROBLEMS, 4, SAMPLING, seed=3)
    monkeypatch.setattr(decoding, "can_share_prompts", lambda model: False)
    padded = sample_rollouts(TransformersEngine(fresh()), PROBLEMS, 4, SAMPLING, seed=3)
    assert sum(len(rollout.token_ids) < 4 for rollout in grouped) > 10  # more than half have left
    assert [one.token_ids for one in grouped] == [one.token_ids for one in padded]
    for one, other in zip(grouped, padded, strict=True):
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-5)


@pytest.mark.parametrize("too_many", [31, 15, 7])
def test_running_out_of_memory_halves_the_batch(too_many: int) -> None:
    """With all prompts, with all 15 rows, and when 7 of them are left: as if 8 had been asked for."""
    engine = TransformersEngine(fresh())
    sizes: list[int] = []

    def is_too_much(ids: torch.Tensor) -> bool:
        sizes.append(ids.shape[1])
        return sizes[-1] == too_many and sizes.count(too_many) == 1

    can_share_prompts(engine.policy.model)  # the trial forward pass must not be counted
    with out_of_memory(engine.policy.model, is_too_much) as failed:
        rollouts = sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=3)
    assert failed == [(1, too_many)]
    assert [size for size, _ in groupby(sizes[: sizes.index(too_many) + 1])] in ([31], [31, 15], [31, 15, 7])
    assert engine.max_batch == 8
    assert rollouts == sample_rollouts(TransformersEngine(fresh(), 8), PROBLEMS, 3, SAMPLING, seed=3)


def test_a_failed_attempt_is_freed_before_the_next(monkeypatch) -> None:
    made: list[weakref.ref[SharedPromptRows]] = []
    held: list[int] = []

    class Watched(SharedPromptRows):
        def __init__(self, *given) -> None:
            held.append(sum(one() is not None for one in made))
            made.append(weakref.ref(self))
            in_reference_cycle(self)
            super().__init__(*given)

    monkeypatch.setattr(decoding, "SharedPromptRows", Watched)
    engine = TransformersEngine(fresh(), 64)
    with no_collector(), out_of_memory(engine.policy.model, lambda ids: ids.shape[1] == 15) as failed:
        sample_rollouts(engine, PROBLEMS, 3, SAMPLING, seed=0)
    assert len(failed) == 1
    assert held[:2] == [0, 0]
