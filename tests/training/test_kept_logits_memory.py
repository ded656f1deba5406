"""When memory runs out beside logits kept for the backward pass, logits are recomputed from then on.

Micro-batches shrink only if that is not enough.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, LearningSettings, NaiveSettings
from hacrl.errors import TrainingError
from hacrl.models import lm_head as output_layer
from hacrl.models.agent import Agent
from hacrl.models.lm_head import LogitCache, separate_head
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample
from tests.models.linear_case import set_spare_memory
from tests.support.faults import gpu_is_full, no_collector, out_of_memory
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, sample, weights

GSPO = GspoSettings(clip_low=0.1, clip_high=0.2)
KL = NaiveSettings(clip_low=0.5, clip_high=0.5, kl_coefficient=0.1)
PLENTY = 10**9  # bytes
FEW = 32  # tokens: samples of 16 and 12, of 10, 7 and 5, and of 4


@pytest.fixture(autouse=True)
def _logits_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute logits as on a GPU, in pieces of two tokens; rows are padded."""
    monkeypatch.setattr(output_layer, "MANUAL_BACKWARD_DEVICES", ("cpu",))
    monkeypatch.setattr(output_layer, "MAX_LOGITS", 60)
    monkeypatch.setattr("hacrl.models.logprobs.MAX_PACKED_SHARE", 0.0)


def fresh() -> Agent:
    agent = sharpened(char_agent("ada"), 10.0)
    agent.model.to(torch.bfloat16)
    separate_head(agent.model)  # tried now, so that its passes are not counted below
    return agent


def learner(agent: Agent, tokens: int = FEW, method: GspoSettings | NaiveSettings = GSPO) -> Learner:
    settings = LearningSettings(lr=1e-2, micro_batch_tokens=tokens)
    return Learner(agent, make_method(method), settings, SAMPLING)


def six(agent: Agent) -> list[LearnerSample]:
    return [sample(agent, i, 0.95, advantage) for i, advantage in enumerate((1.0, -0.5, 2.0, -1.5, 0.5, 1.0))]


class OfferedLogits:
    """Counts the logits that are alive, of those that were offered to be kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._offered: list[weakref.ref[Tensor]] = []
        offer = LogitCache.add_if_it_fits

        def watched(kept: LogitCache, piece: int, logits: Tensor) -> None:
            self._offered.append(weakref.ref(logits))
            offer(kept, piece, logits)

        monkeypatch.setattr(LogitCache, "add_if_it_fits", watched)

    @property
    def alive(self) -> int:
        return sum(one() is not None for one in self._offered)


def fails_once(mine: Learner, where: str, watched: OfferedLogits) -> list[int]:
    """Let memory run out in the second micro-batch; return the logits alive then, and at each later pass."""
    counts: list[int] = []
    passes: list[int] = []

    def look(*_: object) -> None:
        passes.append(watched.alive)
        if len(passes) > 2:
            counts.append(watched.alive)
        if len(passes) == 2 and where == "forward":
            counts.append(watched.alive)
            gpu_is_full()

    loss = mine.method.loss

    def full_before_backward(batch):
        if len(passes) == 2 and where == "between":
            counts.append(watched.alive)
            gpu_is_full()
        return loss(batch)

    mine.agent.model.model.register_forward_pre_hook(look)
    mine.method = type("Method", (), {"loss": staticmethod(full_before_backward)})()
    return counts


@pytest.mark.parametrize("where", ["forward", "between"])
def test_the_next_attempt_keeps_no_logits_and_gives_the_same_weights(monkeypatch, where) -> None:
    asked = set_spare_memory(monkeypatch, PLENTY)
    undisturbed, agent = fresh(), fresh()
    samples = six(agent)
    expected = learner(undisturbed).learn(samples, 1, seed=0)
    assert len(asked) == 3  # once a micro-batch
    mine, watched = learner(agent), OfferedLogits(monkeypatch)
    counts = fails_once(mine, where, watched)
    with no_collector():
        found = mine.learn(samples, 1, seed=0)
    # also if the micro-batch that failed had kept none yet
    assert len(asked) == 3 + {"forward": 1, "between": 2}[where]
    assert (counts[0] > 1) == (where == "between")
    assert counts[1:] == [0, 0, 0]
    assert found.notes == [
        "agent 'ada': learning from 3 samples of up to 10 tokens at once did not fit into the memory of cpu "
        "beside logits kept for the backward pass; from now on the backward pass recomputes them. The update "
        "was repeated, nothing is lost"
    ]
    assert found.oom_retries == 1
    assert mine.state_dict()["micro_batch_tokens"] == FEW
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    assert all(torch.equal(value, weights(undisturbed)[name]) for name, value in weights(agent).items())
    before = len(asked)
    assert mine.learn(samples, 1, seed=1).oom_retries == 0
    assert len(asked) == before


def test_micro_batches_shrink_if_recomputing_logits_is_not_enough(monkeypatch) -> None:
    asked = set_spare_memory(monkeypatch, PLENTY)
    agent = fresh()
    mine = learner(agent, tokens=128)
    with out_of_memory(agent.model.model, lambda ids: ids.numel() > FEW, "backward") as failed:
        stats = mine.learn(six(agent), 1, seed=0)
    assert failed == [(6, 16), (6, 16), (4, 16)]
    assert ["beside logits" in note for note in stats.notes] == [True, False, False]
    assert stats.oom_retries == 3
    assert mine.state_dict()["micro_batch_tokens"] == FEW
    assert len(asked) == 1


@pytest.mark.parametrize("room", [0, PLENTY])
def test_a_single_sample_is_retried_only_if_logits_were_kept(monkeypatch, room) -> None:
    set_spare_memory(monkeypatch, room)
    agent = fresh()
    mine = learner(agent, tokens=1)
    with (
        out_of_memory(agent.model.model, lambda ids: ids.numel() > 15, "backward") as failed,
        pytest.raises(TrainingError, match="a single sample of 16 tokens"),
    ):
        mine.learn(six(agent), 1, seed=0)
    assert len(failed) == (2 if room else 1)


def test_micro_batches_shrink_at_once_if_no_logits_were_kept(monkeypatch) -> None:
    """If memory was full or no pass had gradients, no logits were kept and recomputing saves nothing."""
    asked = set_spare_memory(monkeypatch, 0)
    agent = fresh()
    mine = learner(agent, tokens=64)
    with out_of_memory(agent.model.model, lambda ids: ids.numel() > FEW, "backward"):
        stats = mine.learn(six(agent), 1, seed=0)
    assert [note.count("learning.micro_batch_tokens counts as 32") for note in stats.notes] == [1]
    assert len(asked) > 2  # room may come


def test_the_reference_pass_may_run_out_of_memory_beside_kept_logits(monkeypatch) -> None:
    set_spare_memory(monkeypatch, PLENTY)
    watched = OfferedLogits(monkeypatch)
    agent = fresh()
    mine = learner(agent, method=KL)
    seen: list[int] = []

    def full_beside_others(*_: object) -> None:
        if not torch.is_grad_enabled():
            seen.append(watched.alive)
            if watched.alive:
                gpu_is_full()

    separate_head(mine._reference._model)
    mine._reference._model.model.register_forward_pre_hook(full_beside_others)
    stats = mine.learn(six(agent), 1, seed=0)
    assert seen[0] > 1
    assert seen[1:] == [0, 0, 0]
    assert (stats.updates, stats.oom_retries) == (1, 1)
    assert mine.state_dict()["micro_batch_tokens"] == FEW
