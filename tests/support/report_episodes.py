"""A made-up run whose rollouts are episodes with a calculator, in the bundled models' own tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hacrl.types import Episode, Problem, Rollout, Segment, Tool, ToolCall, Turn, Verdict, VerifiedRollout
from tests.support.report_runs import MadeUpRun

CALCULATOR = Tool("calculate", "Return the value of an expression.", '{"type": "object"}')


@dataclass
class MadeUpEpisodes(MadeUpRun):
    """Two turns each: the agent calls the calculator, and answers with its result. One in five fails."""

    agents: tuple[str, ...] = ("ada", "bob")
    models: tuple[str, ...] = ("bundled:qwen-small-a", "bundled:llama-pairs")

    def _problem(self, step: int, prompt: int) -> Problem:
        return Problem(f"p{step}-{prompt}", f"{step}+{prompt}", str(step + prompt), tools=(CALCULATOR,))

    def _rollout(self, problem: Problem, agent: str, right: bool, rng: random.Random) -> VerifiedRollout:
        call = ToolCall("calculate", f'{{"expression": "{problem.prompt}"}}')
        ask = self._action(agent, f"{problem.prompt}=", (call,), rng)
        shown = problem.answer
        observation = Segment(
            "observation", shown, self._ids(agent, shown, rng), turns=(Turn("tool", shown, tool="calculate"),)
        )
        answer = self._action(agent, f"#{problem.answer if right else 0}", (), rng)
        fails = rng.random() < 0.2
        episode = Episode(
            "failed" if fails else "answered",
            dialect="made up",
            opening="The calculator is ready.",
            turn_rewards=() if fails else (0.0, float(right)),
            failure="calculate did not answer within 5 s" if fails else "",
        )
        segments = (ask,) if fails else (ask, observation, answer)
        rollout = Rollout(problem, agent, segments, "stop", 4, "made up", episode=episode)
        if fails:
            return VerifiedRollout(rollout, Verdict(0.0, "timeout"))
        return VerifiedRollout(rollout, Verdict(float(right), "correct" if right else "wrong"))

    def _action(self, agent: str, text: str, calls: tuple[ToolCall, ...], rng: random.Random) -> Segment:
        ids = (*self._ids(agent, text, rng), 1)
        logprobs = tuple(-rng.expovariate(2.0) for _ in ids)
        turns = (Turn("assistant", "" if calls else text, calls),)
        return Segment("action", text, ids, logprobs, turns=turns, finish_reason="stop")
