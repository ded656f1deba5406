"""The transformers engine ends responses at stop strings, in all three of its ways to decode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hacrl.engines.answering import Answerer
from hacrl.engines.base import GenerationRequest, Sample
from hacrl.engines.hf import engine as hf_engine
from hacrl.engines.hf.continuous_batching import STEPS_BETWEEN_CHECKS
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.models.stop_strings import StopStrings
from hacrl.types import Rollout, Sampling
from tests.support.engines import PROBLEMS, engine_agent, sample_rollouts
from tests.support.sevens import SevensTask

SAMPLING = Sampling(48, stop=("57", "="))
LEANING = {"5": 1.5, "7": 1.5, "<eos>": -100.0}  # responses never end by themselves
PATHS = ("continuous", "in step", "generate")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "generate":
        monkeypatch.setattr(hf_engine, "decodes_in_step", lambda model: False)
    return str(request.param)


def engine(agent: Agent, path: str, max_batch: int = 512) -> TransformersEngine:
    return TransformersEngine(agent, max_batch, continuous=path == "continuous")


def samples_of(agent: Agent, path: str, sampling: Sampling) -> list[Sample]:
    """As the engine returns them, before they are cut."""
    prompts = [agent.encode_prompt(problem) for problem in PROBLEMS]
    request = GenerationRequest(
        prompts, 4, sampling, frozenset(agent.stop_ids), 3, StopStrings(agent, sampling.stop)
    )
    return engine(agent, path).generate(request)


def test_no_response_goes_on_long_after_a_stop_string(path: str) -> None:
    agent = engine_agent(leaning=LEANING)
    samples = samples_of(agent, path, SAMPLING)
    beyond = STEPS_BETWEEN_CHECKS - 1 if path == "continuous" else 0
    ended = 0
    for sample in samples:
        text = agent.tokenizer.decode(sample.token_ids)
        ends = [place + len(string) for string in SAMPLING.stop if (place := text.find(string)) >= 0]
        if ends:
            ended += 1
            assert len(sample.token_ids) <= min(ends) + beyond
        else:
            assert len(sample.token_ids) == 48
    assert ended > 10


def test_greedy_responses_are_the_same_whatever_generates() -> None:
    agent = engine_agent(leaning={"5": 1.0, "7": 1.0, "<eos>": -100.0})
    sampling = replace(SAMPLING, temperature=0.0, stop=("5", "("))
    found: dict[str, list[Rollout]] = {}
    for path in PATHS:
        with pytest.MonkeyPatch.context() as patch:
            if path == "generate":
                patch.setattr(hf_engine, "decodes_in_step", lambda model: False)
            found[path] = sample_rollouts(engine(agent, path), PROBLEMS, 1, sampling, seed=0)
    assert found["continuous"] == found["in step"] == found["generate"]
    assert "stop_string" in {rollout.finish_reason for rollout in found["in step"]}


def test_a_stop_string_is_found_after_rows_were_dropped(path: str) -> None:
    """Short responses leave the batch first; the others' tokens must not be mixed up by that."""
    agent = engine_agent(leaning={"=": 1.0, "5": 1.0, "7": 1.0, "<eos>": -100.0})
    rollouts = sample_rollouts(engine(agent, path), PROBLEMS, 16, SAMPLING, seed=1)
    lengths = sorted(r.num_tokens for r in rollouts if r.finish_reason == "stop_string")
    assert lengths[0] < 4 < 16 < lengths[-1]  # from the first tokens to long after half of all rows ended
    for rollout in rollouts:
        assert not any(string in rollout.text for string in SAMPLING.stop)


def test_a_stop_token_before_a_stop_string_ends_the_response(path: str) -> None:
    agent = engine_agent(leaning={"<eos>": 2.0, "5": 1.0, "7": 1.0})
    rollouts = sample_rollouts(engine(agent, path), PROBLEMS, 8, SAMPLING, seed=1)
    assert {rollout.finish_reason for rollout in rollouts} >= {"stop", "stop_string"}
    for rollout in rollouts:
        assert (rollout.finish_reason == "stop") == (rollout.token_ids[-1] == 1)
        if rollout.finish_reason == "stop":
            assert rollout.segments[0].stop_text == ""


def test_the_verifier_sees_what_is_before_the_stop_string() -> None:
    agent = engine_agent(leaning=LEANING)
    seen: list[str] = []

    class Recording(SevensTask):
        def verify(self, rollouts):
            seen.extend(rollout.text for rollout in rollouts)
            return super().verify(rollouts)

    answerer = Answerer(agent, engine(agent, "in step"), Recording())
    verified = answerer.answer(PROBLEMS, 4, SAMPLING, seed=0)
    assert sorted(seen) == sorted(answer.rollout.text for answer in verified)
    assert not any(string in text for text in seen for string in SAMPLING.stop)
    assert any(answer.rollout.segments[0].stop_text for answer in verified)
