"""Episodes in flight against sampling as many tokens in one turn each, in one run on a CPU.

    python benchmarks/episodes.py [--episodes 256] [--turns 4] [--turn-tokens 16] [--step-seconds 0]

Both sides sample the same number of tokens, response by response: no stop token ends a turn, and an episode's
actions have as many tokens as its counterpart's single response. So the ratio is what turns cost: the prompts
that grow by observations are computed anew every turn, environments start, act and end, and every wave waits
for the last of them. The environments' part is measured apart, by the same calls without a model.
``--step-seconds`` makes the environment sleep in every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import timed

from hacrl.config.schema import AgentSettings
from hacrl.engines.base import GenerationRequest
from hacrl.engines.episodes import EpisodeAnswerer
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.environments.pool import EnvironmentPool
from hacrl.models.agent import Agent
from hacrl.tasks.environment import EnvironmentTask
from hacrl.types import Rollout, Sampling, Turn

ENVIRONMENT = """
import time

class Game:
    def reset(self, seconds, **row):
        self.seconds = seconds

    def observe(self):
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self.seconds)
        return "=1;", 0.0, False
"""


OBSERVATION_TOKENS = 3


@dataclass(frozen=True)
class Seconds:
    """What one repeat took."""

    episodes: float
    one_turn: float
    environments: float  # the same calls of the environments without a model


class Endless(Agent):
    """An agent whose turns no token ends, so that both sides sample equally many tokens."""

    stop_ids = frozenset()


def play_alone(task: EnvironmentTask, turns: int) -> None:
    """Start, act and finish the episodes of all problems, with a fixed text as the agent."""
    with task.open_environments() as pool:
        keys = range(len(task.train))
        for key, problem in enumerate(task.train):
            pool.start(key, problem)
        wait_for(pool, len(keys))
        for _ in range(turns):
            for key in keys:
                pool.act(key, Turn("assistant", "1"))
            wait_for(pool, len(keys))
        for key in keys:
            pool.finish(key)
        wait_for(pool, len(keys))


def wait_for(pool: EnvironmentPool, count: int) -> None:
    """Wait for so many outcomes."""
    while count > 0:
        count -= len(pool.wait())


def main() -> None:
    """Print one line of JSON: the medians of both sides and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=16)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="bundled:qwen-small-a")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "game.py"
        file.write_text(ENVIRONMENT)
        prompts = [f"{10 + number}+{number}*2:" for number in range(given.episodes)]
        task = EnvironmentTask(
            environment=f"{file}:Game",
            train=[{"prompt": prompt, "seconds": given.step_seconds} for prompt in prompts],
            max_turns=given.turns,
            max_turn_tokens=given.turn_tokens,
        )
        loaded = Agent.load(AgentSettings(name="agent", model=given.model), "cpu")
        agent = Endless("agent", loaded.model, loaded.tokenizer)
        measured = [measure(agent, task, given, seed) for seed in range(given.repeats + 1)]
    print(json.dumps(summary(measured[1:], given)))  # the first warms everything up


def measure(agent: Agent, task: EnvironmentTask, given: argparse.Namespace, seed: int) -> Seconds:
    """Return the seconds of each side, one after the other."""
    engine = TransformersEngine(agent, max_batch=given.episodes)
    sampling = Sampling(given.turns * given.turn_tokens + OBSERVATION_TOKENS * (given.turns - 1))
    found: list[Rollout] = []
    with closing(EpisodeAnswerer(agent, engine, task)) as answerer:
        answerer.generate(task.train[:1], 1, sampling, seed)  # the environments' own process starts
        episodes = timed(lambda: found.extend(answerer.generate(task.train, 1, sampling, seed)))
    assert {rollout.num_tokens for rollout in found} == {given.turns * given.turn_tokens}
    request = GenerationRequest(
        [agent.encode_prompt(problem) for problem in task.train],
        1,
        sampling,
        frozenset(),
        seed,
        response_seeds=tuple(range(len(found))),
        limits=tuple(rollout.num_tokens for rollout in found),
    )
    one_turn = timed(lambda: engine.generate(request))
    return Seconds(episodes, one_turn, timed(lambda: play_alone(task, given.turns)))


def summary(measured: Sequence[Seconds], given: argparse.Namespace) -> dict[str, object]:
    """Return medians over the repeats."""
    ratios = [one.one_turn / one.episodes for one in measured]
    return {
        "tokens": given.episodes * given.turns * given.turn_tokens,
        "one_turn_seconds": round(statistics.median(one.one_turn for one in measured), 2),
        "episodes_seconds": round(statistics.median(one.episodes for one in measured), 2),
        "environments_alone_seconds": round(statistics.median(one.environments for one in measured), 2),
        "throughput_of_one_turn": round(statistics.median(ratios), 3),
        "lowest_and_highest": [round(min(ratios), 3), round(max(ratios), 3)],
    }


if __name__ == "__main__":
    main()
