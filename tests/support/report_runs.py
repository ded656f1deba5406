"""Run folders of any size with made-up numbers, in the files and fields that hacrl writes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from hacrl.models.model_sources import bundled_agents
from hacrl.rollouts.log import RolloutLog
from hacrl.types import LearntRollout, Problem, Rollout, Verdict, VerifiedRollout

# What a model may write: markup, a script, terminal codes, text that runs backwards, half a character.
HOSTILE = (
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "</script><script>window.hacked = 1</script><!-- <style>* { display: none }</style>",
    "\x1b[2J\x1b]0;title\x07 bell",
    "abc\u202egnp.exe\u202c \u2066isolate\u2069",
    "zero\u200bwidth \ufeff and a tag \U000e0041",
    "half of a pair \ud83d and \u2028 lines",
    "javascript:alert(1) ${alert(1)} {{constructor.constructor('alert(1)')()}} =HYPERLINK(1)",
)


@dataclass
class MadeUpRun:
    """A run that was never trained."""

    agents: Sequence[str] = ("ada", "bob", "carl", "dora")
    steps: int = 4
    prompts: int = 4
    samples: int = 2  # per prompt and agent
    tokens: int = 12  # per response
    method: str = "hacpo"
    seed: int = 0
    every: int = 2  # steps between evaluations
    texts: Sequence[str] = ()  # of responses, in turn; default: made of words
    gain: float = 0.3
    noise: float = 0.0  # standard deviation of what seed and agent add to accuracies after training
    options: Mapping[str, object] = field(default_factory=dict)  # of the method, besides its clip ranges
    clip: float = 0.05  # of own ratios, which are as narrow
    models: Sequence[str] = ()  # bundled ones; then responses are arithmetic in the models' own tokens

    def write(self, folder: Path, until: int | None = None) -> Path:
        """Write the folder as it is after ``until`` steps; default: all."""
        done = self.steps if until is None else until
        folder.mkdir(parents=True, exist_ok=True)
        self._write_config(folder)
        rows = [self._metrics(step) for step in range(1, done + 1)]
        _write_lines(folder / "metrics.jsonl", rows)
        _write_lines(folder / "timings.jsonl", [self._seconds(step) for step in range(1, done + 1)])
        evaluated = [step for step in range(done + 1) if step % self.every == 0 or step == self.steps]
        _write_lines(folder / "evaluations.jsonl", [self._evaluation(step) for step in evaluated])
        state = "finished" if done == self.steps else "running"
        status = {"schema": 1, "state": state, "steps_done": done, "message": ""}
        (folder / "status.json").write_text(json.dumps(status))
        (folder / "notes.txt").write_text("step 1: a note with <b>markup</b>\n")
        for step in range(1, done + 1):
            self.write_rollouts(folder, step)
        return folder

    def write_rollouts(self, folder: Path, step: int) -> None:
        """Write one step's rollouts, and what each learner made of them."""
        log = RolloutLog(folder / "rollouts")
        rng = random.Random(f"{self.seed} {step}")
        learnt: dict[str, list[LearntRollout]] = {name: [] for name in self.agents}
        for number, agent in enumerate(self.agents):
            rollouts = []
            for prompt in range(self.prompts):
                problem = self._problem(step, prompt)
                for sample in range(self.samples):
                    right = rng.random() < 0.3 + 0.5 * step / self.steps + 0.03 * number
                    rollout = self._rollout(problem, agent, right, rng)
                    rollouts.append(rollout)
                    for learner, records in learnt.items():
                        records.append(self._learnt(learner, rollout.rollout, sample, rng))
            log.append(step, agent, rollouts)
        for learner, records in learnt.items():
            log.append_learnt(step, learner, records)

    def _problem(self, step: int, prompt: int) -> Problem:
        return Problem(f"p{step}-{prompt}", f"What is {step} + {prompt}?", str(step + prompt))

    def _rollout(self, problem: Problem, agent: str, right: bool, rng: random.Random) -> VerifiedRollout:
        text = rng.choice(self.texts) if self.texts else " ".join(rng.choices(WORDS, k=self.tokens))
        if self.models:
            text = f"{rng.randrange(99)}+{rng.randrange(99)}={rng.randrange(198)}"
        ids = self._ids(agent, text, rng)
        rollout = Rollout.single_turn(
            problem,
            agent,
            text,
            ids,
            tuple(-rng.expovariate(2.0) for _ in ids),
            "stop" if rng.random() < 0.9 else "length",
            policy_version=4,
            tokenizer="made up",
        )
        return VerifiedRollout(rollout, Verdict(float(right), "correct" if right else "wrong"))

    def _learnt(self, learner: str, rollout: Rollout, sample: int, rng: random.Random) -> LearntRollout:
        agent, problem = rollout.agent, rollout.problem.id
        ids = rollout.token_ids if learner == agent else self._ids(learner, rollout.text, rng)
        advantage = rng.gauss(0, 1)
        own = learner == agent
        if not own and rng.random() < 0.05:
            return LearntRollout(learner, agent, problem, sample, "not_representable", advantage)
        ratio = math.exp(rng.gauss(0.0 if own else -0.1, 0.4 * self.clip if own else 0.1))
        low, high = (1 - self.clip, 1 + self.clip) if own else (0.8, 1.0)
        is_clipped = not low <= ratio <= high
        fate = "used" if not is_clipped else "clipped_below" if ratio < low else "clipped_above"
        return LearntRollout(
            learner,
            agent,
            problem,
            sample,
            fate,  # type: ignore[arg-type]
            advantage,
            ratio=ratio,
            clipped=float(is_clipped),
            weight=0.0 if is_clipped else abs(advantage) * ratio / 64,
            token_ids=None if own else ids,
            token_logprobs=tuple(round(-rng.expovariate(2.0), 4) for _ in ids),
        )

    def _ids(self, agent: str, text: str, rng: random.Random) -> tuple[int, ...]:
        if not self.models:
            return tuple(rng.randrange(50_000) for _ in range(self.tokens))
        tokenizer = _tokenizer(self._model(agent).removeprefix("bundled:"))
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    def _model(self, agent: str) -> str:
        number = list(self.agents).index(agent)
        return self.models[number % len(self.models)] if self.models else f"example/{agent}"

    def _write_config(self, folder: Path) -> None:
        lines = ["agents:"]
        lines += [f"- {{name: {name}, model: '{self._model(name)}'}}" for name in self.agents]
        lines += [
            f"output: {folder}",
            f"steps: {self.steps}",
            f"seed: {self.seed}",
            "task: {name: arithmetic, options: {}}",
            f"method: {json.dumps(self._method())}",
        ]
        (folder / "config.yaml").write_text("\n".join(lines) + "\n")

    def _method(self) -> dict[str, object]:
        clips = {"clip_low": self.clip, "clip_high": self.clip, "delta": 0.2, "cross_upper": 1.0}
        return {"name": self.method, **clips, **self.options}

    def accuracy(self, agent: str, step: int) -> float:
        """Return what the agent's evaluation after a step finds."""
        start = 0.2 + 0.1 * list(self.agents).index(agent)
        noise = random.Random(f"{self.seed} {agent} {self.gain}").gauss(0, self.noise) if step else 0.0
        return start + self.gain * step / self.steps + 0.01 * (self.seed % 3) * (step > 0) + noise

    def _evaluation(self, step: int) -> dict[str, object]:
        agents = {
            name: {"mean": self.accuracy(name, step), "stderr": 0.02, "problems": 100, "samples": 4}
            for name in self.agents
        }
        return {"step": step, "agents": agents}

    def _metrics(self, step: int) -> dict[str, object]:
        rng = random.Random(f"metrics {self.seed} {step}")
        rollouts = self.prompts * self.samples
        agents = {}
        for number, name in enumerate(self.agents):
            shares = [rng.uniform(0.5, 1.5) + 2.0 * (i == number) for i in range(len(self.agents))]
            sources = {
                source: {
                    "used": rollouts,
                    "ratio_mean": 0.95,
                    "ratio_min": 0.5,
                    "ratio_max": 1.5,
                    "ratio_by_source_length": 0.95,
                    "ratio_by_own_length": 0.95,
                    "clipped": 0.5 if source != name else 0.125,
                    "clipped_above": 0.25 if source != name else 0.0,
                    "gradient": share / sum(shares),
                }
                for source, share in zip(self.agents, shares, strict=True)
            }
            reward = 0.3 + 0.5 * step / self.steps + rng.gauss(0, 0.03)
            agents[name] = {
                "capability": reward,
                "policy_version": 4 * step,
                "rollout": {
                    "reward": reward,
                    "verdicts": {"correct": 1, "wrong": rollouts - 1},
                    "response_tokens": float(self.tokens),
                    "stopped": 0.9,
                    "rollouts": rollouts,
                },
                "learning": {
                    "updates": 4,
                    "loss": rng.gauss(0, 0.1),
                    "gradient_alignment": rng.uniform(0.2, 0.7) if len(self.agents) > 1 else None,
                    "grad_norm": rng.uniform(0.1, 1.0),
                    "skipped": 2,
                    "dropped": {other: {"too_long": 1} for other in self.agents if other != name},
                    "sampler_gap": 0.01,
                    "sampler_gap_max": 0.2,
                    "sampler_kl": None,
                    "sources": sources,
                    "left_out": {},
                },
                "engine": None,
            }
        return {"step": step, "agents": agents}

    def _seconds(self, step: int) -> dict[str, float]:
        seconds = {"step": step, "whole": 4.0 * len(self.agents)}
        for name in self.agents:
            seconds |= {f"rollout/{name}": 1.0, f"learn/{name}": 3.0}
        return seconds


WORDS = (
    "so",
    "we",
    "add",
    "the",
    "tens",
    "first",
    "and",
    "then",
    "ones",
    "12",
    "34",
    "7",
    "which",
    "is",
    "right",
)


@cache
def _tokenizer(bundled: str) -> Tokenizer:
    return Tokenizer.from_file(str(bundled_agents()[bundled] / "tokenizer.json"))


# variant -> method and its options, as in hacrl.studies.variants
OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    "hacpo_no_baseline": ("hacpo", {"capability_baseline": False}),
    "hacpo_no_discrepancy": ("hacpo", {"discrepancy": False}),
    "hacpo_no_clip": ("hacpo", {"cross_clip": False}),
    "hacpo_alpha_0": ("hacpo", {"alpha": 0.0}),
    "hacpo_alpha_2": ("hacpo", {"alpha": 2.0}),
    "hacpo_alpha_3": ("hacpo", {"alpha": 3.0}),
}
HACPO = {"alpha": 1.0, "capability_baseline": True, "discrepancy": True, "cross_clip": True}


def write_study(folder: Path, variants: Sequence[str], seeds: int, **settings: object) -> Path:
    """Write the runs of a study; later variants gain more."""
    for number, variant in enumerate(variants):
        method, options = OPTIONS.get(variant, (variant, {}))
        options = {**(HACPO if method == "hacpo" else {}), **options}
        for seed in range(seeds):
            run = MadeUpRun(
                method=method,
                seed=seed,
                gain=0.3 + 0.02 * number,
                options=options,
                **settings,  # type: ignore[arg-type]
            )
            run.write(folder / variant / f"seed-{seed}")
    return folder


def write_evaluation(folder: Path, scores: Sequence[tuple[str | None, int | None, str, str, float]]) -> None:
    """Write results of ``hacrl eval``: variant, seed (both None: before training), agent, benchmark, mean."""
    results = [
        {
            "agent": agent,
            "stage": "before" if seed is None else "after",
            "variant": variant,
            "run_seed": seed,
            "benchmark": benchmark,
            "average": {"mean": mean, "low": mean - 0.02, "high": mean + 0.02, "stderr": 0.01},
        }
        for variant, seed, agent, benchmark, mean in scores
    ]
    path = folder / "evaluations" / "math500+gsm8k"
    path.mkdir(parents=True, exist_ok=True)
    (path / "results.json").write_text(json.dumps({"format": 1, "results": results}))


def _write_lines(path: Path, rows: Sequence[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
