"""Theorem 4.3 on real agents: do others' responses push a learner the same way as its own?

For every learner of a recipe, the gradient of J_homo (own responses) and of J_hete (others' responses) at the
start of a step, and the cosine of the angle between the two. The theorem says it is positive.

    python scripts/gradient_alignment.py [RECIPE] [--batches N] [--prompts P]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from hacrl.config.load import load_config
from hacrl.config.schema import RunConfig
from hacrl.engines.answering import Answerer
from hacrl.rollouts.groups import group_by_prompt
from hacrl.runs.run import build_trainer
from hacrl.seeding import derive_seed
from hacrl.tasks.registry import make_task
from hacrl.tasks.stream import ProblemStream
from hacrl.training.trainer import Trainer
from hacrl.training.worker import AgentWorker
from hacrl.types import LearnerSample


def gradient(worker: AgentWorker, samples: Sequence[LearnerSample]) -> torch.Tensor:
    """Gradient of the mean loss over the samples, as one vector; nothing is updated."""
    worker.agent.model.zero_grad()
    signal = [sample for sample in samples if sample.advantage != 0]
    batch = worker.learner.loss_batch(signal, updates_done=0)
    worker.learner.method.loss(batch).loss_B.mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in worker.agent.model.parameters()])


def cosines(trainer: Trainer, config: RunConfig, batch: int) -> dict[str, float]:
    """Learner -> cosine between its two gradients, on one batch of prompts."""
    task = make_task(config.task)
    problems = ProblemStream(task.train, config.rollout.prompts_per_step, config.seed).batch(batch)
    answers = {}
    for worker in trainer.executor.workers.values():
        seed = derive_seed(config.seed, "alignment", worker.name, batch)
        answerer = Answerer(worker.agent, worker.engine, task)
        samples = worker.settings.rollouts_per_prompt
        answers[worker.name] = answerer.answer(problems, samples, config.rollout.sampling, seed)
    groups = group_by_prompt(answers)
    trainer.capabilities.record(
        {
            p.name: [r for group in groups for r in group.rewards[p.name]]
            for p in trainer.executor.workers.values()
        }
    )
    found = {}
    for worker in trainer.executor.workers.values():
        samples = worker.builder.build(groups, trainer.capabilities.ratio).samples
        own = gradient(worker, [sample for sample in samples if sample.is_own])
        cross = gradient(worker, [sample for sample in samples if not sample.is_own])
        found[worker.name] = float(torch.nn.functional.cosine_similarity(own, cross, dim=0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Cosine between own and cross gradients (theorem 4.3).")
    parser.add_argument("recipe", nargs="?", type=Path, default=Path("demo"))
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=16)
    arguments = parser.parse_args()
    config = load_config(arguments.recipe, [f"rollout.prompts_per_step={arguments.prompts}", "threads=1"])
    trainer = build_trainer(config)
    rows = [cosines(trainer, config, batch) for batch in range(arguments.batches)]
    print("| learner | mean cosine | smallest | largest | batches above 0 |\n|---|---|---|---|---|")
    for name in rows[0]:
        values = [row[name] for row in rows]
        positive = sum(value > 0 for value in values)
        print(
            f"| {name} | {statistics.fmean(values):.3f} | {min(values):.3f} | {max(values):.3f} "
            f"| {positive}/{len(values)} |"
        )


if __name__ == "__main__":
    main()
