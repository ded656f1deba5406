"""An engine proves with its first responses that it is at the agent's policy, beside what it is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, LearningSettings, VllmSettings
from hacrl.engines import sync_check as agreement
from hacrl.engines.base import Sample
from hacrl.engines.sync_check import NUM_PROBES, PROBE_TOKENS, EngineError
from hacrl.engines.vllm import engine as engine_module
from hacrl.engines.vllm.backend import EngineLostError, IndexedSamples, Request
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.logprobs import response_logprobs
from hacrl.models.own_policy import rollout_limit
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.learner import Learner
from hacrl.training.samples import SampleBuilder
from hacrl.types import Rollout, Sampling
from tests.support.engines import logprob_gap, sample_rollouts
from tests.support.rollouts import judged
from tests.support.sevens import problem
from tests.support.tiny import char_agent

PROBES = [problem(f"{number}+1:") for number in range(6)]


def probes_of(agent):
    return [agent.encode_prompt(probe) for probe in PROBES]


PROBLEMS = [problem("3*3:"), problem("8-2:")]
SAMPLING = Sampling(5)


class Sayer:
    """Says the same digits to everybody, with the probabilities that its own copy of an agent gives them."""

    name, can_sleep = "engine of char", False

    def __init__(self, agent: Agent) -> None:
        self.agent = agent  # whose weights it has
        self.asked: list[list[Request]] = []
        self.sent = 0
        self.dies_after: list[int] = []  # answers, in each of the next calls

    def start(self) -> None:
        """Nothing is needed."""

    def generate(self, asks: Sequence[Request]) -> Iterator[IndexedSamples]:
        """Those that ask for most tokens end last."""
        self.asked.append(list(asks))
        order = sorted(range(len(asks)), key=lambda at: asks[at].sampling.max_new_tokens)
        left = self.dies_after.pop(0) if self.dies_after else len(asks)
        for at in order[:left]:
            yield [(at, self.said(asks[at]))]
        if left < len(asks):
            raise EngineLostError("engine of char died.")

    def said(self, ask: Request) -> Sample:
        ids = (5, 6, 7, 8) * 4
        ids = ids[: ask.sampling.max_new_tokens]
        with torch.no_grad():
            logprobs, _ = response_logprobs(
                self.agent.model, [(ask.prompt_ids, ids)], ask.sampling, self.agent.device
            )
        return Sample(ids, tuple(logprobs[0].tolist()))


class Sent:
    """Weights arrive, or what looks like it."""

    name = "none"

    def send(self, weights: object, backend: Sayer) -> None:
        backend.sent += 1

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, Sayer, VllmEngine]:
    agent = char_agent()
    backend = Sayer(agent)
    monkeypatch.setattr(engine_module, "make_transport", lambda *told: Sent())
    monkeypatch.setattr(VllmEngine, "describe", lambda self: [{"max_length": 99, "model": {}}])
    monkeypatch.setattr(Sayer, "reset_prefix_cache", lambda self: None, raising=False)
    return agent, backend, VllmEngine(agent, backend, VllmSettings(), probes_of(agent))


def lengths(asks: Sequence[Request]) -> list[int]:
    return [ask.sampling.max_new_tokens for ask in asks]


def test_the_proof_goes_with_what_is_asked_for_and_is_nobodys_response(made) -> None:
    agent, backend, engine = made
    assert engine.sync(proven=False) is None
    assert (backend.sent, backend.asked) == (1, [])
    heard: dict[int, Rollout] = {}
    rollouts = sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0, heard.__setitem__)
    (asks,) = backend.asked
    assert lengths(asks) == [PROBE_TOKENS] * NUM_PROBES + [5] * 4
    assert [ask.prompt_ids for ask in asks[:4]] == [agent.encode_prompt(one) for one in PROBES[:4]]
    assert heard == dict(enumerate(rollouts))
    assert [one.problem for one in rollouts] == [PROBLEMS[0], PROBLEMS[0], PROBLEMS[1], PROBLEMS[1]]
    report = engine.sync()
    assert report is not None
    assert (report.policy_version, report.weight_sync) == (0, "none")
    assert report.logprob_gap < 1e-6
    # proven is proven, until the policy changes
    sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0)
    assert lengths(backend.asked[1]) == [5] * 4
    agent.policy_version = 1
    sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0)
    assert lengths(backend.asked[2]) == [PROBE_TOKENS] * NUM_PROBES + [5] * 4
    assert backend.sent == 2


def test_the_proof_fits_into_a_short_context(made, monkeypatch) -> None:
    """A vLLM server refuses a request whose prompt and new tokens are longer than its context."""
    _, backend, engine = made
    monkeypatch.setattr(VllmEngine, "describe", lambda self: [{"max_length": 9, "model": {}}])
    sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0)
    (asks,) = backend.asked
    assert lengths(asks) == [5] * NUM_PROBES + [5] * 4  # the prompts of probes have 4 tokens
    assert engine.sync().logprob_gap < 1e-6


def test_wrong_weights_are_noticed_whatever_was_said_meanwhile(made) -> None:
    _, backend, engine = made
    backend.agent = char_agent(seed=1)
    heard: dict[int, Rollout] = {}
    with pytest.raises(EngineError, match=r"engine of char is not at the agent's policy .* differ by"):
        sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0, heard.__setitem__)
    assert heard == {}  # they were shorter, and are nobody's
    assert backend.sent == 2  # weights were brought once more
    with pytest.raises(EngineError, match="not at the agent's policy"):
        engine.sync()
    assert backend.sent == 4


def test_weights_that_arrive_the_second_time(made, monkeypatch) -> None:
    agent, _, engine = made
    wrong = char_agent(seed=1)

    def send(self: Sent, weights: object, there: Sayer) -> None:
        there.sent += 1
        there.agent = agent if there.sent == 2 else wrong

    monkeypatch.setattr(Sent, "send", send)
    heard: dict[int, Rollout] = {}
    rollouts = sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0, heard.__setitem__)
    assert heard == dict(enumerate(rollouts))
    assert logprob_gap(agent, rollouts, SAMPLING) < 1e-6
    (note,) = engine.take_notes()
    assert "is not at the agent's policy after a weight update (policy version 0)" in note
    assert note.endswith("The weights were sent once more; none of its samples was used")
    assert engine.restarts == 0


def test_who_fails_the_proof_is_left_before_weights_come_again(made, monkeypatch) -> None:
    """Or it would be told to leave off in the middle of what it is asked for next."""
    _, backend, engine = made
    backend.agent = char_agent(seed=1)
    happened: list[str] = []
    plainly, send = backend.generate, Sent.send

    def generate(asks: Sequence[Request]) -> Iterator[IndexedSamples]:
        try:
            yield from plainly(asks)
            happened.append("ended")
        finally:
            happened.append("left")

    def sent(self: Sent, weights: object, there: Sayer) -> None:
        happened.append("weights")
        send(self, weights, there)

    backend.generate = generate
    monkeypatch.setattr(Sent, "send", sent)
    with pytest.raises(EngineError, match="not at the agent's policy"):
        sample_rollouts(engine, PROBLEMS, 2, Sampling(20), 0)
    assert happened == ["weights", "left", "weights", "left"]


def test_how_far_first_tokens_differ_is_said(made) -> None:
    """By itself: they come from the prompt, all others from what was computed for the tokens before them."""
    agent, backend, engine = made
    own = backend.said

    def later_ones_differ(ask: Request) -> Sample:
        said = own(ask)
        return Sample(said.token_ids, (said.logprobs[0] - 0.25, *(one - 2.0 for one in said.logprobs[1:])))

    backend.said = later_ones_differ
    with pytest.raises(EngineError) as caught:
        engine.sync()
    mean = (4 * 0.25 + 60 * 2.0) / 64
    expected = (
        f"{mean:.3g} nats per token on average (at most 2, over 64 tokens; first tokens of responses by 0.25)"
    )
    assert expected in str(caught.value)
    # that is what tells tokens of something else from numbers that belong to other tokens
    ids = (5, 6, 7, 8) * 4
    pairs = [(agent.encode_prompt(one), ids) for one in PROBES[:NUM_PROBES]]
    with torch.no_grad():
        ours = float(response_logprobs(agent.model, pairs, Sampling(16), agent.device)[0].mean())
    assert f"The engine's are {ours - mean:.3g} on average, the agent's {ours:.3g};" in str(caught.value)
    assert f"with plain attention, the agent's differ by {mean:.3g}." in str(caught.value)


def test_kernels_of_ours_that_are_wrong_are_found_out(made, monkeypatch) -> None:
    _, _, engine = made
    right = agreement.response_logprobs

    def wrong(*told) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, mask = right(*told)
        return logprobs - 1.5, mask

    monkeypatch.setattr(agreement, "response_logprobs", wrong)
    with pytest.raises(EngineError) as caught:
        engine.sync()
    assert "differ by 1.5 nats per token" in str(caught.value)
    (found,) = re.findall(r"plain attention, the agent's differ by (\S+)\. ", str(caught.value))
    assert float(found) < 1e-5


def test_who_goes_wrong_beside_its_proof_is_refused_by_the_learner(made) -> None:
    """Kernels depend on how many are answered at a time: those of the proof may not be those of the rest."""
    agent, backend, engine = made
    own = backend.said

    def wrong_in_responses(ask: Request) -> Sample:
        said = own(ask)
        off = 0.0 if ask.sampling.max_new_tokens == PROBE_TOKENS else 6.0
        return Sample(said.token_ids, (said.logprobs[0], *(one - off for one in said.logprobs[1:])))

    backend.said = wrong_in_responses
    sampling, method = Sampling(12), make_method(GspoSettings())
    rollouts = sample_rollouts(engine, PROBLEMS, 8, sampling, 0)  # it passes its proof
    groups = [
        PromptGroup(one, {agent.name: tuple(judged(r, i % 2) for i, r in enumerate(part))})
        for one, part in zip(PROBLEMS, (rollouts[:8], rollouts[8:]), strict=True)
    ]
    builder = SampleBuilder(agent, method)
    samples = builder.build(groups, lambda *_: 1.0).samples
    limit = rollout_limit(None)
    learner = Learner(agent, method, LearningSettings(), sampling, exact_sampler=False, max_policy_gap=limit)
    # 11 of 12 tokens are off by 6
    with pytest.raises(TrainingError, match=r"by 5.5 nats per token on average \(at most 6, over 192 tokens"):
        learner.learn(samples, updates=1, seed=0)


def test_asked_for_by_itself(made) -> None:
    _, backend, engine = made
    report = engine.sync()
    assert report is not None
    assert report.logprob_gap < 1e-6
    assert [lengths(asks) for asks in backend.asked] == [[PROBE_TOKENS] * NUM_PROBES]


def test_seeded_responses_are_generated_by_themselves(made) -> None:
    agent, backend, _ = made
    engine = VllmEngine(agent, backend, VllmSettings(seeded=True), probes_of(agent))
    sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0)
    assert [lengths(asks) for asks in backend.asked] == [[PROBE_TOKENS] * NUM_PROBES, [5] * 4]


def test_nothing_is_taken_of_who_died_before_it_had_proven_anything(made, monkeypatch) -> None:
    agent, backend, engine = made
    right, backend.agent = backend.agent, char_agent(seed=1)
    backend.dies_after = [6, 7]  # four responses and two of four proofs; three of four
    monkeypatch.setattr(backend, "start", lambda: setattr(backend, "agent", right) if backend.asked else None)
    heard: dict[int, Rollout] = {}
    rollouts = sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0, heard.__setitem__)
    assert list(heard) == [0, 1, 2, 3]
    assert [one.problem for one in rollouts] == [PROBLEMS[0], PROBLEMS[0], PROBLEMS[1], PROBLEMS[1]]
    assert logprob_gap(agent, rollouts, SAMPLING) < 1e-6
    everything = [*[PROBE_TOKENS] * NUM_PROBES, *[5] * 4]
    assert [lengths(asks) for asks in backend.asked] == [everything] * 3
    report = engine.sync()
    assert report is not None
    assert report.restarts == engine.restarts == 2


def test_who_has_proven_it_keeps_what_it_said_when_it_dies(made) -> None:
    agent, backend, engine = made
    engine.sync()
    backend.dies_after = [3]
    agent.policy_version = 1  # it gets weights again, and must prove them
    engine.sync()
    rollouts = sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0)
    proof = [PROBE_TOKENS] * NUM_PROBES
    assert [lengths(asks) for asks in backend.asked] == [proof, proof, proof, [5] * 4]
    assert {one.policy_version for one in rollouts} == {1}
    backend.dies_after = [3]
    assert len(sample_rollouts(engine, PROBLEMS, 2, SAMPLING, 0)) == 4
    assert [lengths(asks) for asks in backend.asked[4:]] == [[5] * 4, [*proof, 5]]
