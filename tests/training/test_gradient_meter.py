"""Gradient alignment in the learner: measured like plain torch measures it, and without a trace of probes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from hacrl.algorithms.alignment import TrustTracker
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AlignedSettings, GspoSettings, LearningSettings
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.training.learner import Learner
from hacrl.training.metrics import learn_report
from hacrl.training.samples import LearnerSamples
from hacrl.types import LearnerSample
from tests.support.forward import plain_logprobs
from tests.support.late_transfers import LateTransfers
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, gspo_mean_loss, largest_difference, sample, weights
from tests.training.runs import Runs, assert_same_weights

ALIGNED = AlignedSettings(clip_low=0.2, clip_high=0.28)
GSPO = GspoSettings(clip_low=0.2, clip_high=0.28)
LOW, HIGH = 0.8, 1.28


def fresh() -> Agent:
    return sharpened(char_agent(), 10.0)


def learner(agent: Agent, method=ALIGNED, **settings) -> Learner:
    learning = LearningSettings(**{"lr": 1e-2, "micro_batch_tokens": 40, **settings})
    return Learner(agent, make_method(method), learning, SAMPLING)


def own_samples(agent: Agent) -> list[LearnerSample]:
    return [sample(agent, 0, 1.0, 1.0), sample(agent, 1, 1.1, -1.0), sample(agent, 2, 0.9, 2.0)]


def of(
    source: str, agent: Agent, *given: tuple[int, float, float], probe: bool = False
) -> list[LearnerSample]:
    """Responses (which, ratio, advantage) of another agent."""
    return [replace(sample(agent, *one, own=False), source=source, is_probe=probe) for one in given]


def flat(agent: Agent, loss: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(loss, list(agent.model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None]).double()


def cross_gradient(agent: Agent, samples: list[LearnerSample]) -> torch.Tensor:
    """The rule's gradient, written another way: each response's score times min(s, 1.28) A / |y|."""
    total = torch.zeros(())
    for one in samples:
        logprob = plain_logprobs(agent.model, one.prompt_ids, one.response_ids, SAMPLING).sum()
        s = float(torch.exp((logprob.detach() - one.behaviour_logprob) / one.source_length))
        weight = 0.0 if one.advantage < 0 and s < LOW else min(s, HIGH)
        total = total - weight * one.advantage * logprob / one.source_length
    return flat(agent, total)


def test_alignments_are_those_of_plain_torch() -> None:
    agent, plain = fresh(), fresh()
    own = own_samples(agent)
    ada = of("ada", agent, (3, 0.5, 1.0), (4, 0.9, -1.0), (5, 1.5, 1.0))
    bob = of("bob", agent, (0, 1.0, -1.0), (4, 0.7, -2.0), probe=True)
    stats = learner(agent).learn([*bob, *own, *ada], updates=1, seed=0)

    own_gradient = flat(plain, gspo_mean_loss(plain.model, own, 1 - LOW, HIGH - 1)) * 3  # a sum, not a mean
    assert list(stats.alignments) == ["ada", "bob"]
    for source, given in (("ada", ada), ("bob", bob)):
        cross = cross_gradient(plain, given)
        expected = float(torch.nn.functional.cosine_similarity(own_gradient, cross, dim=0))
        assert stats.alignments[source].cosine == pytest.approx(expected, abs=1e-4)
        ratio = stats.alignments[source].source_norm / stats.alignments[source].own_norm
        assert ratio == pytest.approx(float(cross.norm() / own_gradient.norm()), rel=1e-4)
    assert abs(stats.alignments["ada"].cosine - stats.alignments["bob"].cosine) > 0.05  # the test can tell


def test_probes_leave_no_trace() -> None:
    agent, other = fresh(), fresh()
    own = own_samples(agent)
    probes = of("bob", agent, (3, 0.9, 2.0), (4, 1.0, -1.0), probe=True)
    before = weights(agent)
    with_probes = learner(agent).learn([*own, *probes], updates=2, seed=0)
    without = learner(other).learn(own, updates=2, seed=0)
    assert largest_difference(weights(agent), before) > 5e-3
    assert largest_difference(weights(agent), weights(other)) == 0.0
    assert (with_probes.losses, with_probes.grad_norms) == (without.losses, without.grad_norms)
    assert list(with_probes.sources) == [agent.name]
    assert list(with_probes.alignments) == ["bob"]
    report = learn_report(agent.name, with_probes, LearnerSamples(samples=[*own, *probes]))
    assert [learnt.fate for learnt in report.learnt if learnt.agent == "bob"] == ["not_shared"] * 2
    assert (report.trusted, report.probe_tokens) == ({"bob": 0}, 8 + 2)  # tokens of responses 3 and 4


def test_own_responses_alone_make_gspos_updates() -> None:
    agent, other = fresh(), fresh()
    own = own_samples(agent)
    learner(agent).learn(own, updates=2, seed=0)
    learner(other, GSPO).learn(own, updates=2, seed=0)
    assert largest_difference(weights(agent), weights(other)) == 0.0


def test_offloaded_gradient_sums_are_refused() -> None:
    agent = fresh()
    mine = learner(agent)
    mine.optimizer.stream(LateTransfers("cpu"), offload_gradients=True)
    with pytest.raises(TrainingError, match=r"set learning\.offload to weights, stream or less"):
        mine.learn(own_samples(agent), updates=1, seed=0)


# -- whole runs: "twin" has other weights than "char", and another tokenizer than "pair"


def trust(run, agent: str, source: str) -> list[bool]:
    return [step["learning"]["trusted"][source] for step in run.of(agent)]


def test_nobody_is_trusted_before_two_measurements_and_until_then_runs_are_gspos(runs: Runs) -> None:
    aligned = runs("char", "pair", method=ALIGNED, steps=2)
    gspo = runs("char", "pair", method=GSPO, steps=2)
    for agent, partner in (("char", "pair"), ("pair", "char")):
        assert trust(aligned, agent, partner) == [False, False]
        assert_same_weights(aligned.weights(agent), gspo.weights(agent))
        assert [step["learning"]["updates"] for step in aligned.of(agent)] == [2, 2]
        assert all(step["learning"]["alignment"][partner] != 0.0 for step in aligned.of(agent))


def test_a_copy_of_oneself_is_trusted_and_its_responses_are_learnt_from(runs: Runs) -> None:
    copy = replace(runs.agent("char"), name="copy")
    run = runs("char", copy, method=ALIGNED, steps=5, rollout={"rollouts_per_prompt": 16})
    steps = run.of("char")
    assert trust(run, "char", "copy")[:2] == [False, False]
    assert any(trust(run, "char", "copy"))
    for step, trusted in zip(steps, trust(run, "char", "copy"), strict=True):
        assert step["learning"]["updates"] == (4 if trusted else 2)
        assert list(step["learning"]["sources"]) == (["char", "copy"] if trusted else ["char"])


def test_trust_decides_as_the_log_of_cosines_says(runs: Runs) -> None:
    run = runs("char", "twin", method=AlignedSettings(clip_low=0.2, clip_high=0.28, trust_window=2), steps=6)
    for agent, partner in (("char", "twin"), ("twin", "char")):
        tracker = TrustTracker(window=2)
        for step, trusted in zip(run.of(agent), trust(run, agent, partner), strict=True):
            assert tracker.trusts(partner) == trusted
            cosine = step["learning"]["alignment"][partner]
            if cosine != 0.0:
                state = tracker.state_dict().get(partner, [])
                tracker.load_state_dict({partner: json.loads(json.dumps([*state, cosine]))})
