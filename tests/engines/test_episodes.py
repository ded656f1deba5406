"""Episodes with real engines and real environment processes, against a plain implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hacrl.engines.base import GenerationRequest, OnFinished, Sample
from hacrl.engines.episodes import EpisodeAnswerer, make_answerer
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import ModelError
from hacrl.models.agent import Agent
from hacrl.models.keyed_noise import token_keys
from hacrl.models.sampling import draw
from hacrl.seeding import derive_seed
from hacrl.tasks.environment import EnvironmentTask
from hacrl.types import Problem, Rollout, Sampling, VerifiedRollout
from tests.support.engines import engine_agent
from tests.support.episode_agents import parts_agent, whole_agent
from tests.support.episode_environments import GuessInText, reference
from tests.support.forward import plain_logprobs

ROWS = [{"prompt": f"{'1' * (1 + hidden % 3)}+{hidden}", "hidden": hidden} for hidden in range(6)]
SAMPLING = Sampling(30, temperature=0.9)
SEED = 7


@pytest.fixture(scope="module")
def agent() -> Agent:
    """Reads characters, and ends about every fourth token."""
    return engine_agent(leaning={"<eos>": 2.0})


def task_of(
    name: str = "GuessInText", rows: Sequence[dict[str, Any]] = ROWS, **options: Any
) -> EnvironmentTask:
    return EnvironmentTask(environment=reference(name), train=list(rows), **options)


@contextmanager
def answerer_of(agent: Agent, task: EnvironmentTask, engine: Any = None) -> Iterator[EpisodeAnswerer]:
    with closing(make_answerer(agent, engine or TransformersEngine(agent), task)) as made:
        assert isinstance(made, EpisodeAnswerer)
        yield made


def play(
    agent: Agent,
    task: EnvironmentTask,
    problems: Sequence[Problem] | None = None,
    samples: int = 3,
    sampling: Sampling = SAMPLING,
) -> list[VerifiedRollout]:
    with answerer_of(agent, task) as answerer:
        return answerer.answer(task.train if problems is None else problems, samples, sampling, SEED)


@torch.no_grad()
def sampled_plainly(
    agent: Agent, ids: Sequence[int], limit: int, sampling: Sampling, seed: int
) -> list[tuple[int, float]]:
    """One turn: a whole forward pass for every token; stop at <eos>."""
    found: list[tuple[int, float]] = []
    while len(found) < limit and (not found or found[-1][0] != agent.tokenizer.eos_token_id):
        sequence = [*ids, *(token for token, _ in found)]
        logits = agent.model(input_ids=torch.tensor([sequence])).logits[0, -1:]
        keys = token_keys(torch.tensor([seed]), len(found))
        token, logprob = draw(logits, sampling, torch.Generator(), keys)
        found.append((int(token), float(logprob)))
    return found


def played_plainly(
    agent: Agent, problem: Problem, sample: int, sampling: Sampling, max_turns: int
) -> tuple[list[tuple[str, list[tuple[int, float]]]], list[float]]:
    """The episode as one loop: its parts (kind, tokens with log-probabilities), and the turns' rewards."""
    environment = GuessInText()
    environment.reset(**problem.fields)

    def encoded(text: str) -> list[tuple[int, float]]:
        return [(token, 0.0) for token in agent.tokenizer(text).input_ids]

    prompt = encoded(problem.prompt + environment.observe())
    opening = len(encoded(environment.observe()))
    parts: list[tuple[str, list[tuple[int, float]]]] = []
    rewards: list[float] = []
    for turn in range(max_turns):
        so_far = [token for _, part in [("", prompt), *parts] for token, _ in part]
        left = sampling.max_new_tokens - opening - (len(so_far) - len(prompt))
        seed = derive_seed(SEED, problem.id, sample, turn)
        action = sampled_plainly(agent, so_far, left, sampling, seed)
        parts.append(("action", action))
        spoken = [token for token, _ in action if token != agent.tokenizer.eos_token_id]
        observation, reward, done = environment.step(agent.tokenizer.decode(spoken))
        rewards.append(reward)
        answer = encoded(observation)
        if done or turn + 1 == max_turns or len(answer) >= left - len(action):
            break
        parts.append(("observation", answer))
    return parts, rewards


def test_episodes_are_those_of_a_plain_loop(agent: Agent) -> None:
    task = task_of(max_turns=4)
    found = play(agent, task)
    assert len(found) == 18
    turns = set()
    for index, verified in enumerate(found):
        rollout = verified.rollout
        parts, rewards = played_plainly(agent, task.train[index // 3], index % 3, SAMPLING, 4)
        assert [segment.kind for segment in rollout.segments] == [kind for kind, _ in parts]
        for segment, (_, part) in zip(rollout.segments, parts, strict=True):
            assert segment.token_ids == tuple(token for token, _ in part)
            if segment.kind == "action":
                assert segment.token_logprobs == pytest.approx([value for _, value in part], abs=1e-5)
        assert rollout.episode is not None
        assert rollout.episode.turn_rewards == tuple(rewards)
        assert verified.reward == pytest.approx(sum(rewards))
        turns.add(len(rewards))
    assert {1, 2, 4} <= turns  # of several lengths


@pytest.mark.parametrize("make", [whole_agent, parts_agent])
def test_tool_episodes_have_the_logprobs_of_one_forward_pass(make: Any) -> None:
    """Nothing is retokenised: the conversation is the concatenation of its segments."""
    agent = make()
    found = [verified.rollout for verified in play(agent, task_of("GuessByTool"), sampling=Sampling(300))]
    assert max(len(rollout.segments) for rollout in found) >= 7
    for rollout in found:
        with torch.no_grad():
            recomputed = plain_logprobs(agent.model, rollout.prompt_ids, rollout.token_ids, Sampling(300))
        expected = [float(v) for v, kept in zip(recomputed, rollout.loss_mask, strict=True) if kept]
        assert rollout.token_logprobs == pytest.approx(expected, abs=1e-5)
        for segment in rollout.segments[1::2]:
            assert segment.kind == "observation"
            results = [turn.content for turn in segment.turns]
            written = "".join(f"<tool_response>\n{text}\n</tool_response>" for text in results)
            assert "".join(segment.text.split()) == "".join(written.split())
            assert agent.tokenizer.decode(segment.token_ids) == segment.text
        for action in rollout.segments[::2]:
            assert (action.token_ids[-1] in agent.stop_ids) == (action.finish_reason == "stop")
            spoken = action.token_ids[: -1 if action.finish_reason == "stop" else None]
            assert agent.tokenizer.decode(spoken) == action.text
    calls = [call for rollout in found for s in rollout.segments for t in s.turns for call in t.tool_calls]
    assert len(calls) > 20
    assert {call.name for call in calls} == {"guess"}
    assert {rollout.episode.end for rollout in found if rollout.episode} >= {"answered", "done"}
    assert any(rollout.episode.tool_errors for rollout in found if rollout.episode)  # nine is not allowed


def test_an_episode_does_not_depend_on_the_others(agent: Agent) -> None:
    task = task_of(max_turns=4)
    whole = play(agent, task)
    part = play(agent, task, problems=task.train[2:4])
    assert [same_tokens(one.rollout) for one in part] == [same_tokens(one.rollout) for one in whole[6:12]]


def same_tokens(rollout: Rollout) -> list[tuple[int, ...]]:
    return [segment.token_ids for segment in rollout.segments]


def ends_of(found: Sequence[VerifiedRollout]) -> set[str]:
    return {verified.rollout.episode.end for verified in found if verified.rollout.episode is not None}


def test_max_turns(agent: Agent) -> None:
    found = play(agent, task_of("NeverDone", max_turns=3, max_turn_tokens=50), sampling=Sampling(200))
    assert ends_of(found) == {"max_turns"}
    for verified in found:
        assert [segment.kind for segment in verified.rollout.segments] == [
            "action",
            "observation",
            "action",
            "observation",
            "action",
        ]
        assert verified.reward == 3.0  # 1 a turn


def test_max_new_tokens_counts_observations(agent: Agent) -> None:
    """Every turn gets what the opening, of 2 tokens, and the turns and observations before have left."""
    found = play(agent, task_of("NeverDone", max_turns=100), sampling=Sampling(20))
    assert ends_of(found) == {"max_tokens"}
    assert {len(verified.rollout.token_ids) for verified in found} <= {16, 17, 18}
    cut = [one.rollout for one in found if one.rollout.finish_reason == "length"]
    assert cut
    assert {len(rollout.token_ids) for rollout in cut} == {18}  # all of them are used
    assert len(cut) < len(found)  # the others had no room for an observation of 2 tokens and an action


def test_max_turn_tokens(agent: Agent) -> None:
    """An action that is cut goes on as a turn of the text form; a tool's agent has not answered."""
    found = play(agent, task_of("NeverDone", max_turns=4, max_turn_tokens=2), sampling=Sampling(200))
    lengths = {len(s.token_ids) for one in found for s in one.rollout.segments[::2]}
    assert lengths == {1, 2}
    assert ends_of(found) == {"max_turns"}
    assert {s.finish_reason for one in found for s in one.rollout.segments[::2]} == {"stop", "length"}
    by_tool = play(parts_agent(), task_of("GuessByTool", max_turn_tokens=2), sampling=Sampling(200))
    ended = [one.rollout.episode for one in by_tool if one.rollout.finish_reason == "length"]
    assert {episode.end for episode in ended if episode is not None} == {"max_tokens"}


def test_the_context_ends_an_episode(agent: Agent) -> None:
    before = agent.context_length
    try:
        agent.context_length = 24
        found = play(agent, task_of("NeverDone", max_turns=100), sampling=Sampling(100))
    finally:
        agent.context_length = before
    assert ends_of(found) == {"max_tokens"}
    for verified in found:
        rollout = verified.rollout
        assert 24 - 2 <= len(rollout.prompt_ids) + len(rollout.token_ids) <= 24


def test_a_prompt_without_room_for_an_action(agent: Agent) -> None:
    before = agent.context_length
    try:
        agent.context_length = 6
        found = play(agent, task_of("NeverDone", rows=ROWS[:3:2]), sampling=Sampling(100), samples=1)
    finally:
        agent.context_length = before
    assert sorted(len(one.rollout.segments) for one in found) == [0, 1]  # prompts of 7 and 5 tokens
    assert ends_of(found) == {"max_tokens"}


def test_max_seconds_ends_episodes_between_turns(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock says 0 at the beginning, then 1 more before every turn: 1, 2, 3."""
    clock = SimpleNamespace(monotonic=count().__next__)
    monkeypatch.setattr("hacrl.engines.episodes.time", clock)
    task = task_of("NeverDone", max_turns=100, max_seconds=2.5, max_turn_tokens=5)
    found = play(agent, task, sampling=Sampling(200), samples=1)
    assert ends_of(found) == {"max_seconds"}
    for verified in found:  # the observation after the second turn has no answer
        assert [segment.kind for segment in verified.rollout.segments] == ["action", "observation", "action"]
        assert verified.reward == 2.0


def test_stop_strings_end_turns(agent: Agent) -> None:
    """The environment sees what is before the string; the tokens keep it."""
    sampling = Sampling(40, stop=("1",))
    found = play(agent, task_of(max_turns=5), sampling=sampling, samples=6)
    actions = [s for one in found for s in one.rollout.segments if s.kind == "action"]
    stopped = [action for action in actions if action.finish_reason == "stop_string"]
    assert len(stopped) > 5
    assert {action.stop_text for action in stopped} == {"1"}
    for action in stopped:
        assert agent.tokenizer.decode(action.token_ids) == action.text + "1"
    for verified in found:
        episode = verified.rollout.episode
        assert episode is not None
        texts = [s.text for s in verified.rollout.segments[::2]]
        hidden = verified.rollout.problem.fields["hidden"]
        assert episode.turn_rewards == tuple(expected_reward(text, hidden) for text in texts)


def expected_reward(text: str, hidden: int) -> float:
    environment = GuessInText()
    environment.reset(hidden)
    return environment.step(text)[1]


FAULTS = ("", "reset", "step", "die", "hang")


def test_a_failing_environment_costs_its_episode(agent: Agent) -> None:
    rows = [{**ROWS[0], "prompt": f"{number}", "fault": fault} for number, fault in enumerate(FAULTS)]
    task = task_of("Fragile", rows=rows, limits={"call_seconds": 1.0})
    reported: list[int] = []
    with answerer_of(agent, task) as answerer:
        rollouts = answerer.generate(task.train, 2, SAMPLING, SEED, reported.append)
        found = answerer.verify(rollouts)
        again = answerer.verify(answerer.generate(task.train[:1], 1, SAMPLING, SEED))
    assert sum(reported) == len(found) == 10
    assert len(again) == 1
    by_fault: dict[str, list[VerifiedRollout]] = {}
    for verified in found:
        by_fault.setdefault(verified.rollout.problem.fields["fault"], []).append(verified)
    labels = {fault: {one.verdict.label for one in ones} for fault, ones in by_fault.items()}
    assert labels == {
        "": {"scored"},
        "reset": {"crash"},
        "step": {"crash"},
        "die": {"crash"},
        "hang": {"timeout"},
    }
    for fault, ones in by_fault.items():
        for one in ones:
            episode = one.rollout.episode
            assert episode is not None
            assert one.rollout.has_failed == (fault != "")
            assert len(one.rollout.segments) == (0 if fault == "reset" else 1) or not fault
            if fault:
                assert (one.reward, episode.reward) == (0.0, None)
    (first, _) = by_fault["reset"]
    assert first.rollout.episode is not None
    assert "RuntimeError: there is no such level" in first.rollout.episode.failure


class Broken(TransformersEngine):
    """Fails in its second generation."""

    count = 0

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        self.count += 1
        if self.count == 2:
            raise ModelError("out of ideas")
        return super().generate(request, on_finished)


def test_an_engine_that_fails_ends_the_environments(agent: Agent) -> None:
    task = task_of("NeverDone", max_turns=4, max_turn_tokens=20)
    with answerer_of(agent, task, Broken(agent)) as answerer:
        with pytest.raises(ModelError, match="out of ideas"):
            answerer.generate(task.train, 2, SAMPLING, SEED)
        assert answerer._environments.pending == 0
        found = answerer.answer(task.train, 1, Sampling(200), SEED)  # keys are free again
        assert ends_of(found) == {"max_turns"}


def test_the_first_turn_computes_each_prompt_once(agent: Agent) -> None:
    """Later turns have prompts of their own."""
    asked: list[tuple[int, int]] = []

    class Recording(TransformersEngine):
        def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
            asked.append((len(request.prompts), request.samples_per_prompt))
            return super().generate(request, on_finished)

    task = task_of(max_turns=2)
    with answerer_of(agent, task, Recording(agent)) as answerer:
        rollouts = answerer.answer(task.train[:2], 3, SAMPLING, SEED)
    second = sum(len(one.rollout.segments) > 1 for one in rollouts)
    assert second > 0
    assert asked == [(2, 3), (second, 1)]
