"""A task of your own: problems, a judge, and nothing else.

    python examples/custom_task.py           # the folder runs/custom_task

A task is any object with these attributes (``hacrl.tasks.base.Task``). Where a reward function sees rows of a
data set, a task also decides which problems are held out, and gives every verdict a label that is counted.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from hacrl import HACRLConfig, HACRLTrainer, Problem, Rollout, Verdict


class CloseCounts:
    """Sums of two steps; a result that is off by one still earns something."""

    name = "close-counts"
    max_reward = 1.0  # HACPO never expects more than this

    def __init__(self, held_out: int = 40) -> None:
        sums = [(a, b, c) for a in range(10, 40) for b in range(2, 20) for c in range(2, 20)]
        random.Random(0).shuffle(sums)
        problems = [Problem(f"({a}+{b})-{c}", f"({a}+{b})-{c}:", str(a + b - c)) for a, b, c in sums]
        self.test: Sequence[Problem] = problems[:held_out]
        self.train: Sequence[Problem] = problems[held_out:]

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per response. Must not raise, whatever the text is."""
        return [self._judge(rollout.text, int(rollout.problem.answer)) for rollout in rollouts]

    def _judge(self, text: str, gold: int) -> Verdict:
        result = text.rpartition("#")[2]
        if "#" not in text or not result.isascii() or not result.isdecimal():
            return Verdict(0.0, "unparsable")
        distance = abs(int(result[:9]) - gold)
        return Verdict({0: 1.0, 1: 0.25}.get(distance, 0.0), "correct" if distance == 0 else "wrong")

    def close(self) -> None:
        """Do nothing: there are no worker processes to end."""


trainer = HACRLTrainer(
    agents={"ada": "bundled:qwen-small-a", "bob": "bundled:llama-pairs"},  # names of your choice
    task=CloseCounts(),
    args=HACRLConfig(
        output="runs/custom_task",
        overwrite=True,
        steps=int(sys.argv[1]) if len(sys.argv) > 1 else 8,
        threads=1,
        method={"name": "hacpo", "clip_low": 0.05, "clip_high": 0.05},
        rollout={"prompts_per_step": 8, "max_new_tokens": 32},
        learning={"lr": 2e-4, "betas": [0.9, 0.95]},
    ),
)
result = trainer.train()
last = max(result.accuracies)
for name in trainer.agents:
    print(f"{name}: {result.accuracies[0][name].mean:.3f} -> {result.accuracies[last][name].mean:.3f}")
