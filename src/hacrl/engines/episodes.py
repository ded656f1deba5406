"""Play one agent's episodes: the engine samples a turn of all of them, then their environments answer.

Episodes advance in waves. A wave samples the next turn of every unfinished episode in one generation, each
with a seed of its own, keyed by problem, sample and turn. So an episode depends neither on the other episodes
nor on how fast environments are. An environment gets its action as soon as that is sampled, and works while
the other episodes of the wave are still sampled. The next wave begins when every environment has answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from hacrl.engines.answering import (
    Answerer,
    DecodedResponse,
    OnResponses,
    decode_responses,
    verify_rollouts,
)
from hacrl.engines.base import Engine, GenerationRequest, Sample
from hacrl.engines.episode_state import EpisodeState
from hacrl.environments.interface import Outcome
from hacrl.environments.pool import EnvironmentPool
from hacrl.models.agent import Agent
from hacrl.models.stop_strings import StopStrings
from hacrl.seeding import derive_seed
from hacrl.tasks.base import Task
from hacrl.tasks.episodes import EpisodeLimits, PlaysEpisodes
from hacrl.types import EpisodeEnd, Problem, Rollout, Sampling, Turn, VerifiedRollout


def make_answerer(
    agent: Agent,
    engine: Engine,
    task: Task,
    verify_lock: AbstractContextManager[object] | None = None,
) -> Answerer | EpisodeAnswerer:
    """Return what answers a task's problems: in one response each, or in episodes with an environment."""
    if isinstance(task, PlaysEpisodes):
        return EpisodeAnswerer(agent, engine, task, verify_lock)
    return Answerer(agent, engine, task, verify_lock)


class EpisodeAnswerer:
    """Plays and verifies one agent's episodes. It has the methods of :class:`Answerer`."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        task: Task,
        verify_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        assert isinstance(task, PlaysEpisodes), "the task has no environments"
        self.agent = agent
        self.engine = engine
        self._task = task
        self._limits: EpisodeLimits = task.episode_limits
        self._verify_lock = verify_lock or nullcontext()
        self._environments = task.open_environments()
        self._notes: list[str] = []

    def answer(
        self, problems: Sequence[Problem], samples: int, sampling: Sampling, seed: int
    ) -> list[VerifiedRollout]:
        """Return ``samples`` verified episodes of each problem, problem by problem."""
        try:
            return self.verify(self.generate(problems, samples, sampling, seed))
        finally:
            self.abandon()

    def generate(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: Sampling,
        seed: int,
        on_responses: OnResponses = lambda _: None,
        version: int | None = None,
    ) -> list[Rollout]:
        """Return ``samples`` episodes of each problem, not yet verified. May run in any thread.

        ``version``: the policy version of the engine's weights; None: the agent's own.
        """
        sampled_by = self.agent.policy_version if version is None else version
        play = _Play(
            self.agent,
            self.engine,
            self._environments,
            self._limits,
            sampling,
            seed,
            on_responses,
            sampled_by,
        )
        try:
            episodes = play.play(problems, samples)
        except BaseException:
            self._environments.close()  # also what other episodes were asked
            raise
        return [episode.rollout(self.agent, sampled_by) for episode in episodes]

    def verify(self, rollouts: Sequence[Rollout]) -> list[VerifiedRollout]:
        """Return the episodes with their verdicts."""
        with self._verify_lock:
            return verify_rollouts(self._task, rollouts)

    def abandon(self) -> None:
        """Do nothing: an interrupted generation has ended its environments itself."""

    def take_notes(self) -> list[str]:
        """Return what the user should know of the environments, each sentence once."""
        new = [note for note in self._environments.notes if note not in self._notes]
        self._notes += new
        return new

    def close(self) -> None:
        """End the environments' processes."""
        self._environments.close()


class _Play:
    """The episodes of one generation."""

    def __init__(
        self,
        agent: Agent,
        engine: Engine,
        environments: EnvironmentPool,
        limits: EpisodeLimits,
        sampling: Sampling,
        seed: int,
        on_responses: OnResponses,
        version: int,
    ) -> None:
        self._agent = agent
        self._engine = engine
        self._environments = environments
        self._limits = limits
        self._sampling = sampling
        self._seed = seed
        self._on_responses = on_responses
        self._version = version
        self._stop_strings = StopStrings(agent, sampling.stop) if sampling.stop else None
        self._episodes: list[EpisodeState] = []
        self._began = 0.0
        self._samples = 1  # episodes of each problem

    def play(self, problems: Sequence[Problem], samples: int) -> list[EpisodeState]:
        """Play ``samples`` episodes of each problem to their ends."""
        self._began, self._samples = time.monotonic(), samples
        self._episodes = [
            EpisodeState(number * samples + sample, problem, sample, self._sampling.max_new_tokens)
            for number, problem in enumerate(problems)
            for sample in range(samples)
        ]
        for episode in self._episodes:
            self._environments.start(episode.key, episode.problem)
        self._wait_until_none_waits_for("opening", "observation")
        while acting := [episode for episode in self._episodes if episode.waiting == "action"]:
            if self._is_out_of_time():
                for episode in acting:
                    self._finish(episode, "max_seconds")
            else:
                self._sample(acting)
            self._wait_until_none_waits_for("opening", "observation")
        self._wait_until_none_waits_for("reward")
        return self._episodes

    def _is_out_of_time(self) -> bool:
        limit = self._limits.max_seconds
        return limit is not None and time.monotonic() - self._began > limit

    def _sample(self, acting: Sequence[EpisodeState]) -> None:
        """Sample the next turn of the episodes, and give every action to its environment at once."""
        prompts = [episode.token_ids for episode in acting]
        group = shared_prompt_group(prompts, self._samples)
        request = GenerationRequest(
            prompts[::group],
            group,
            self._sampling,
            frozenset(self._agent.stop_ids),
            self._seed,
            self._stop_strings,
            response_seeds=tuple(
                derive_seed(self._seed, episode.problem.id, episode.sample, episode.turns)
                for episode in acting
            ),
            limits=tuple(self._turn_limit(episode) for episode in acting),
        )

        def on_finished(finished: Sequence[tuple[int, Sample]]) -> None:
            sampled = [(prompts[index], sample) for index, sample in finished]
            responses = decode_responses(self._agent, sampled, self._stop_strings)
            for (index, _), response in zip(finished, responses, strict=True):
                self._act(acting[index], response)
            self._take(self._environments.wait(0))

        self._engine.generate(request, on_finished)

    def _turn_limit(self, episode: EpisodeState) -> int:
        room = episode.room(self._agent.context_length)
        longest = self._limits.max_turn_tokens
        return room if longest is None else min(room, longest)

    def _act(self, episode: EpisodeState, response: DecodedResponse) -> None:
        """Take an action: ask the environment for its answer, or end the episode."""
        was_cut = response.finish_reason == "length"
        parsed = self._agent.dialect.parse(response.text + response.stop_text, episode.problem.tools)
        episode.add_action(response, parsed, self._version)
        if self._is_text(episode):  # which sees what verifiers see: what is before a stop string
            episode.waiting = "observation"
            self._environments.act(episode.key, Turn("assistant", response.text))
        elif was_cut:
            self._finish(episode, "max_tokens")
        elif parsed.turn.tool_calls:
            episode.waiting = "observation"
            self._environments.act(episode.key, parsed.turn)
        else:
            self._finish(episode, "answered")

    def _is_text(self, episode: EpisodeState) -> bool:
        return self._environments.is_text(episode.problem.environment)

    def _finish(self, episode: EpisodeState, end: EpisodeEnd) -> None:
        episode.waiting, episode.end = "reward", end
        self._environments.finish(episode.key)

    def _wait_until_none_waits_for(self, *kinds: str) -> None:
        while any(episode.waiting in kinds for episode in self._episodes):
            outcomes = self._environments.wait()
            assert outcomes, "the environments have no call under way"
            self._take(outcomes)

    def _take(self, outcomes: Iterable[tuple[int, Outcome]]) -> None:
        """Record what environments have answered."""
        for key, outcome in outcomes:
            episode = self._episodes[key]
            if outcome.failure:
                episode.fail(outcome)
                self._on_responses(1)
            elif outcome.call == "start":
                self._open(episode, outcome)
            elif outcome.call == "act":
                self._observe(episode, outcome)
            else:
                episode.close(outcome, self._is_text(episode))
                self._on_responses(1)

    def _open(self, episode: EpisodeState, outcome: Outcome) -> None:
        episode.opening = outcome.opening
        episode.prompt_ids = self._agent.encode_prompt(episode.problem, outcome.opening)
        # The opening counts as a response's tokens do: what fits is planned from the prompts without it.
        opening_tokens = len(episode.prompt_ids) - len(self._agent.encode_prompt(episode.problem))
        episode.most_tokens -= max(0, opening_tokens)
        if outcome.done:
            self._finish(episode, "done")
        elif episode.room(self._agent.context_length) < 1:
            self._finish(episode, "max_tokens")
        else:
            episode.waiting = "action"

    def _observe(self, episode: EpisodeState, outcome: Outcome) -> None:
        """Continue an episode with the environment's answer, or end it. The last answer is not kept."""
        episode.tool_errors += outcome.tool_errors
        if outcome.reward is not None:
            episode.turn_rewards.append(outcome.reward)
        if outcome.done:
            self._finish(episode, "done")
            return
        if episode.turns >= self._limits.max_turns:
            self._finish(episode, "max_turns")
            return
        last = episode.segments[-1].finish_reason
        assert last is not None, "the last segment is an action"
        written = self._agent.dialect.observation(outcome.turns, last)
        if len(written.ids) >= episode.room(self._agent.context_length):
            self._finish(episode, "max_tokens")
            return
        episode.add_observation(written.text, written.ids, outcome.turns)
        episode.waiting = "action"


def shared_prompt_group(prompts: Sequence[tuple[int, ...]], samples: int) -> int:
    """Return ``samples`` if the prompts come in groups of so many equal ones, else 1.

    That is so in the first turn: the engine then computes the keys and values of each prompt once.
    """
    is_grouped = len(prompts) % samples == 0 and all(
        prompt == prompts[index - index % samples] for index, prompt in enumerate(prompts)
    )
    return samples if is_grouped else 1
