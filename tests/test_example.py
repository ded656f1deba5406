"""The single-file example is the same method as the library: advantages and loss agree on real responses."""

from __future__ import annotations

import random

import minimal_hacpo as example
import pytest
import torch

from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import HacpoSettings, LearningSettings
from hacrl.models.agent import Agent
from hacrl.models.model_sources import bundled_agents
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.learner import Learner
from hacrl.training.samples import SampleBuilder
from hacrl.types import Problem, Rollout, Sampling, Verdict, VerifiedRollout
from tests.support.texts import encode_response

NAMES = ("qwen-small-a", "llama-pairs")
SETTINGS = HacpoSettings(clip_low=0.05, clip_high=0.05, alpha=1.0, delta=0.2, delta_step=0.025)


@pytest.fixture(scope="module")
def asked():
    """Return two agents of the example and their judged responses to four problems."""
    torch.manual_seed(1)
    agents = [example.load_agent(bundled_agents()[name]) for name in NAMES]
    problems = [example.make_problem(random.Random(seed)) for seed in range(4)]
    answers = {agent.name: example.sample_responses(agent, problems) for agent in agents}
    for agent in agents:
        rewards = [response.reward for group in answers[agent.name] for response in group]
        agent.history.append(sum(rewards) / len(rewards))
    return agents, problems, answers


def as_rollout(response: example.Response, problem: Problem, agent: Agent) -> VerifiedRollout:
    """Return the example's response as a Rollout, its log-probability spread evenly over the tokens."""
    ids = encode_response(agent, response.text, ()) + (agent.stop_id,) * response.stopped
    assert len(ids) == response.length
    logprobs = (response.logprob / response.length,) * response.length
    finish, tokenizer = "stop" if response.stopped else "length", agent.tokenizer_fingerprint
    rollout = Rollout.single_turn(problem, agent.name, response.text, ids, logprobs, finish, 0, tokenizer)
    return VerifiedRollout(rollout, Verdict(response.reward, "correct" if response.reward else "wrong"))


def test_problems_are_the_librarys_arithmetic():
    rng = random.Random(0)
    for _ in range(200):
        prompt, answer = example.make_problem(rng)
        assert eval(prompt.removesuffix(":")) == answer
        assert 0 <= answer <= 119


@pytest.mark.parametrize("updates_done", [0, 3])
def test_the_example_and_the_library_compute_the_same_loss(asked, updates_done):
    agents, problems, answers = asked
    method = make_method(SETTINGS)
    library = {
        a.name: Agent(a.name, a.model, a.tokenizer) for a in agents
    }  # the same weights, the library's code
    tracker = CapabilityTracker(NAMES)
    tracker.record({name: [r.reward for group in answers[name] for r in group] for name in NAMES})
    groups = []
    for i, (prompt, answer) in enumerate(problems):
        problem = Problem(prompt, prompt, str(answer))
        responses = {
            name: tuple(as_rollout(r, problem, library[name]) for r in answers[name][i]) for name in NAMES
        }
        groups.append(PromptGroup(problem, responses))

    for learner in agents:
        pairs = [
            pair
            for i in range(len(problems))
            for pair in example.advantages(learner, {name: answers[name][i] for name in NAMES}, agents)
        ]
        expected = example.hacpo_loss(learner, pairs, updates_done)

        agent = library[learner.name]
        samples = SampleBuilder(agent, method).build(groups, tracker.ratio).samples
        assert sorted(s.advantage for s in samples) == pytest.approx(sorted(a for _, a in pairs), abs=1e-5)
        teacher = Learner(agent, method, LearningSettings(), Sampling(max_new_tokens=32))
        loss = method.loss(teacher.loss_batch(samples, updates_done)).loss_B.mean()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
        assert abs(float(expected.detach())) > 1e-3  # not equal by both being nothing


def test_the_example_runs(capsys):
    folders = [str(bundled_agents()[name]) for name in NAMES]
    agents = example.main(folders, steps=1)
    printed = capsys.readouterr().out
    for agent in agents:
        assert f"{agent.name} {agent.history[0]:.3f}" in printed
