"""The events of a run of two steps, written by hand, and the numbers that trackers must receive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hacrl.config.load import build_config
from hacrl.config.schema import RunConfig
from hacrl.training.metrics import (
    Accuracy,
    AgentReport,
    LearnReport,
    RetokeniseReport,
    RewardReport,
    RolloutReport,
    SourceReport,
    StepReport,
)
from hacrl.training.observer import Observer
from hacrl.types import Problem, Rollout, Turn, Verdict, VerifiedRollout

AGENTS = ("qwen", "llama")
# Text that Markdown or HTML changes: a heading, a tag, emphasis, a fence, a table, an entity, a blank line.
NASTY = "<think>#42 *a* _b_</think>\n\n```py\nx\n```\n# head\n|a|b|\n|-|-|\n&lt; $x^2$ </pre> \\(y\\) ~~~"
NOTES = {1: f"agent qwen learns nothing from 90% of {NASTY}", 2: "the policy of llama moves"}
SECONDS = {"rollout/qwen": 0.5, "learn/llama": 0.25, "whole": 0.75}


def config(tmp_path: Path, *trackers: str, **changes: Any) -> RunConfig:
    data = {
        "agents": [{"name": name, "model": "bundled:qwen-large"} for name in AGENTS],
        "output": str(tmp_path / "pair"),
        "trackers": list(trackers),
        "learning": {"lr": 0.125},
        "logged_rollouts": 2,
        **changes,
    }
    return build_config(data)


def rollouts(agent: str) -> list[VerifiedRollout]:
    """Three problems, two responses each; responses say which they are."""
    problems = [
        Problem("p0", "ask 0", "7", context=(Turn("system", "Be brief."),)),
        Problem("p1", "ask 1", "8"),
        Problem("p2", "ask 2", "9"),
    ]
    return [
        VerifiedRollout(
            Rollout.single_turn(
                problem, agent, f"{NASTY} {problem.id}/{i}", (5, 6, 1), (-0.5,) * 3, "stop", 0, ""
            ),
            Verdict(float(i == 0), "correct" if i == 0 else "timeout"),
        )
        for problem in problems
        for i in range(2)
    ]


def report(step: int) -> StepReport:
    """Numbers that tell agent, source and step apart, all exact in float32."""
    agents = {}
    for index, name in enumerate(AGENTS):
        base = 16.0 * step + 4.0 * index
        sources = {
            source: SourceReport(
                used=step,
                ratio_mean=base + j + 0.5,
                ratio_min=0.25,
                ratio_max=4.0,
                ratio_by_source_length=1.0,
                ratio_by_own_length=1.5,
                clipped=0.125,
                clipped_below=0.0625,
                clipped_above=0.0625,
                gradient=0.5,
            )
            for j, source in enumerate(AGENTS)
        }
        other = AGENTS[1 - index]
        agents[name] = AgentReport(
            capability=base + 0.25,
            capability_ratios={other: 0.5 + index},
            policy_version=4 * step,
            rollout=RolloutReport(
                base + 0.75,
                {"correct": 5, "timeout": step},
                12.5,
                0.5,
                8,
                rewards={"brief": RewardReport(base + 0.125, 0.25, 7)},
                logged={"words": 10.0 * step},
                tokens=100,
                entropy=base + 0.375,
                all_right=0.25,
                all_wrong=0.5,
            ),
            learning=LearnReport(
                updates=4,
                tokens=400,
                policy_kl=0.03125,
                reference_kl=0.125,
                own_clipped_later=0.25,
                baseline=0.75,
                without_signal=0.375,
                loss=-base,
                grad_norm=2.0,
                skipped=3,
                dropped={other: {"not_representable": 2}},
                sampler_gap=None if index else 0.0625,
                sampler_gap_max=None if index else 0.25,
                sampler_kl=None if index else 0.03125,
                sampler_weight=None if index else 0.875,
                sampler_capped=None if index else 0.5,
                sources=sources,
                retokenised={other: RetokeniseReport(6, 0.75, 1.25)},
                left_out={other: 9 + index},
            ),
        )
    return StepReport(step, agents)


def accuracies(step: int) -> dict[str, Accuracy]:
    return {name: Accuracy(0.25 * (i + 1) + 0.125 * step, 0.0625, 10, 4) for i, name in enumerate(AGENTS)}


def play(observer: Observer, saved: bool = True) -> None:
    """The events of the run, in the trainer's order."""
    for agent in AGENTS:
        observer.on_phase(0, "evaluate", agent)
    observer.on_evaluation(0, accuracies(0))
    for step in (1, 2):
        for agent in AGENTS:
            observer.on_phase(step, "rollout", agent)
            observer.on_rollouts(step, agent, rollouts(agent))
        observer.on_step(report(step), SECONDS)
        observer.on_note(step, NOTES[step])
    observer.on_evaluation(2, accuracies(2))
    for agent in AGENTS if saved else ():
        observer.on_phase(2, "save", agent)
    observer.on_end()


# name -> {step: value}, worked out from the functions above. qwen: base 16, 32; llama: base 20, 36.
EXPECTED = {
    "qwen/reward": {1: 16.75, 2: 32.75},
    "llama/reward": {1: 20.75, 2: 36.75},
    "qwen/capability": {1: 16.25, 2: 32.25},
    "qwen/entropy": {1: 16.375, 2: 32.375},
    "qwen/from/llama/capability_ratio": {1: 0.5, 2: 0.5},
    "llama/from/qwen/capability_ratio": {1: 1.5, 2: 1.5},
    "llama/learning/policy_kl": {1: 0.03125, 2: 0.03125},
    "qwen/policy_version": {1: 4.0, 2: 8.0},
    "qwen/stopped": {1: 0.5, 2: 0.5},
    "qwen/verdicts/correct": {1: 5.0, 2: 5.0},
    "llama/verdicts/timeout": {1: 1.0, 2: 2.0},
    "llama/verdicts/crash": {1: 0.0, 2: 0.0},  # did not occur: zero, not missing
    "qwen/rewards/brief/mean": {1: 16.125, 2: 32.125},
    "llama/rewards/brief/std": {1: 0.25, 2: 0.25},
    "llama/rewards/brief/rollouts": {1: 7.0, 2: 7.0},
    "qwen/logged/words": {1: 10.0, 2: 20.0},
    "llama/learning/loss": {1: -20.0, 2: -36.0},
    "qwen/learning/sampler_gap": {1: 0.0625, 2: 0.0625},
    "qwen/learning/sampler_gap_max": {1: 0.25, 2: 0.25},
    "qwen/learning/sampler_kl": {1: 0.03125, 2: 0.03125},
    "qwen/learning/sampler_weight": {1: 0.875, 2: 0.875},
    "qwen/learning/sampler_capped": {1: 0.5, 2: 0.5},
    "qwen/from/qwen/ratio_mean": {1: 16.5, 2: 32.5},
    "qwen/from/llama/ratio_mean": {1: 17.5, 2: 33.5},
    "llama/from/qwen/ratio_mean": {1: 20.5, 2: 36.5},
    "qwen/from/llama/clipped": {1: 0.125, 2: 0.125},
    "qwen/from/llama/retokenised/length_ratio": {1: 1.25, 2: 1.25},
    "llama/from/qwen/left_out": {1: 10.0, 2: 10.0},
    "qwen/from/llama/dropped/not_representable": {1: 2.0, 2: 2.0},
    "seconds/rollout/qwen": {1: 0.5, 2: 0.5},
    "seconds/learn/llama": {1: 0.25, 2: 0.25},
    "qwen/accuracy": {0: 0.25, 2: 0.5},
    "llama/accuracy": {0: 0.5, 2: 0.75},
    "llama/accuracy_stderr": {0: 0.0625, 2: 0.0625},
}
# The first response to each of the first two problems, of each agent.
SHOWN = [(agent, f"{NASTY} {problem}/0") for agent in AGENTS for problem in ("p0", "p1")]
