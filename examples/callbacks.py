"""Callbacks: watch a run, and end it early once every agent is good enough.

python examples/callbacks.py             # the folder runs/callbacks
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hacrl import Callback, HACRLConfig, HACRLTrainer
from hacrl.training.metrics import Accuracy, StepReport


class StopAt(Callback):
    """Ends training when the weakest agent's held-out accuracy reaches a target."""

    def __init__(self, target: float) -> None:
        self.target = target

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Called before training, every ``evaluation.every`` steps, and at the end."""
        weakest = min(accuracies, key=lambda name: accuracies[name].mean)
        print(f"after {step} steps the weakest is {weakest}: {accuracies[weakest].mean:.3f}")
        if step > 0 and accuracies[weakest].mean >= self.target:
            self.trainer.stop()  # after this step; agents are saved as usual


class Teachers(Callback):
    """Says how much each agent learns from the others."""

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Every number of a step is in the report."""
        for learner, agent in report.agents.items():
            for source, used in agent.learning.sources.items():
                if source != learner:
                    print(f"step {report.step}: {learner} from {source}: clipped {used.clipped:.2f}")


target = float(sys.argv[1]) if len(sys.argv) > 1 else 0.55
trainer = HACRLTrainer(
    agents=["bundled:qwen-small-a", "bundled:llama-pairs"],
    task="arithmetic",
    callbacks=[StopAt(target), Teachers()],
    args=HACRLConfig(
        output="runs/callbacks",
        overwrite=True,
        steps=40,
        threads=1,
        method={"name": "hacpo", "clip_low": 0.05, "clip_high": 0.05},
        rollout={"prompts_per_step": 8, "max_new_tokens": 32},
        learning={"lr": 2e-4, "betas": [0.9, 0.95]},
        evaluation={"problems": 50, "samples_per_problem": 2, "every": 2},
        progress=False,
    ),
)
result = trainer.train()
print(f"stopped after {max(result.accuracies)} of {trainer.config.steps} steps")
