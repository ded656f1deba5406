"""hacrl on the work of ``against_trl.py``: a step of all agents together, or updates of one learner alone."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from shapes import prompts
from training_work import (
    Clock,
    Measured,
    UpdateMemory,
    Work,
    given_rollouts,
    learning_flops,
    meaningless,
    peak_memory,
)

from hacrl.algorithms.methods import make_method
from hacrl.config.load import build_config
from hacrl.config.schema import AgentSettings, GspoSettings, LearningSettings, OffloadLevel, RunConfig
from hacrl.memory.residency import Residency
from hacrl.models.agent import Agent
from hacrl.runs.run import LocalRun
from hacrl.tasks.rewards import RewardTask
from hacrl.training.learner import Learner
from hacrl.training.metrics import StepReport
from hacrl.training.observer import Observer, Phase
from hacrl.types import LearnerSample, Sampling, VerifiedRollout


class Watch(Observer):
    """Seconds of every step by phase, from the end of the one before, and what the last one held.

    Rollouts, weights brought to engines included, are over when the last agent has answered: some may do so
    side by side. Learning is the learners' alone: exchange, advantages and retokenising are among the rest.
    """

    def __init__(self) -> None:
        self.seconds: list[dict[str, float]] = []
        self.generated: dict[str, int] = {}  # agent -> tokens of the last step
        self.learnt: dict[str, list[tuple[int, int]]] = {}  # agent -> lengths of the last step
        self.begun = self.cpu = self.learning = 0.0
        self.asking = 0.0  # seconds until all agents had answered

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Count tokens."""
        self.generated[agent] = sum(one.rollout.num_tokens for one in rollouts)

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Long steps show how far they are."""
        seconds = time.perf_counter() - self.begun
        if phase == "verify":  # of the last agent: exchange is to come
            self.asking = seconds
        print(f"step {step} {phase} {agent} after {seconds:.1f} s", file=sys.stderr, flush=True)

    def on_note(self, step: int, note: str) -> None:
        """Whatever the user is told."""
        print(note, file=sys.stderr)

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """A step is over."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, cpu = time.perf_counter(), time.process_time()
        verdicts = [spent for key, spent in seconds.items() if key.startswith("verify/")]
        rollout = self.asking - sum(verdicts[:-1])  # the last came when all had answered
        step = {"rollout": rollout, "verify": sum(verdicts), "learn": self.learning}
        whole = now - self.begun
        step["rest"] = whole - sum(step.values())
        self.seconds.append({**step, "step": whole, "cpu": cpu - self.cpu})
        self.begun, self.cpu, self.learning = now, cpu, 0.0

    def count_lengths(self, run: LocalRun) -> None:
        """Note what every learner is given that it learns from."""
        for participant in run.trainer.executor.workers.values():
            participant.learner.learn = self._counting(participant.name, participant.learner.learn)  # type: ignore[method-assign]

    def _counting(self, name: str, learn: Any) -> Any:
        def counted(samples: Sequence[LearnerSample], *others: Any) -> Any:
            self.learnt[name] = [
                (len(sample.prompt_ids), len(sample.response_ids)) for sample in samples if sample.advantage
            ]
            begun = time.perf_counter()
            stats = learn(samples, *others)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.learning += time.perf_counter() - begun
            return stats

        return counted


def measure(work: Work, folders: list[Path], method: str) -> Measured:
    """Steps of one method, all agents in one run."""
    watch = Watch()
    rows = [
        {"prompt": text} for text in prompts(work.prompts * (work.warmup + work.steps), work.prompt_letters)
    ]
    with tempfile.TemporaryDirectory() as output:
        config = run_config(work, folders, method, Path(output) / "run")
        with LocalRun(config, [watch], task=RewardTask(functions=meaningless, train=rows)) as run:
            watch.count_lengths(run)
            Clock(work.on_gpu)  # from here on memory counts
            watch.begun, watch.cpu = time.perf_counter(), time.process_time()
            run.train()
    found = Measured(f"hacrl {method.upper()}", watch.seconds[work.warmup :])
    found.generated_tokens = sum(watch.generated.values())
    found.memory = peak_memory(work.on_gpu)
    for name, shape in zip(work.names(), work.shapes, strict=True):
        found.learnt_tokens += sum(prompt + response for prompt, response in watch.learnt[name])
        found.learnt_flops += learning_flops(shape, watch.learnt[name])
    return found


def run_config(work: Work, folders: list[Path], method: str, output: Path) -> RunConfig:
    """Like TRL's settings, in our words."""
    agents = [
        {"name": name, "model": str(folder)} for name, folder in zip(work.names(), folders, strict=True)
    ]
    return build_config(
        {
            "agents": agents,
            "agent_defaults": {
                "gradient_checkpointing": work.checkpointing,
                "engine": work.engine,
                "vllm": {
                    "memory": work.vllm_memory,
                    "sleep": work.vllm_sleep,
                    "max_sequences": work.responses,
                    **work.vllm,
                },
            },
            "output": str(output),
            "device": work.device,
            "steps": work.warmup + work.steps,
            **({"threads": work.threads} if work.threads else {}),
            "method": {"name": method},
            "rollout": {
                "prompts_per_step": work.prompts,
                "rollouts_per_prompt": work.samples,
                "max_new_tokens": work.new_tokens,
                "max_batch": work.side_by_side or work.responses,
            },
            "learning": {
                "lr": 1e-6,
                "updates_per_step": work.updates,
                "micro_batch_tokens": work.hacrl_tokens or _forward_tokens(work, folders),
                "offload": work.hacrl_offload,
            },
            "evaluation": {"problems": 0},
        }
    )


def _forward_tokens(work: Work, folders: list[Path]) -> int:
    """As many as TRL has in a forward pass: a micro-batch padded to its longest prompt."""
    from transformers import AutoTokenizer

    asked = prompts(work.prompts * (work.warmup + work.steps), work.prompt_letters)
    longest = max(
        len(ids) for folder in folders for ids in AutoTokenizer.from_pretrained(folder)(asked)["input_ids"]
    )
    return work.micro_batch * (longest + work.new_tokens)


def measure_updates(work: Work, folder: Path) -> Measured:
    """Updates from rollouts of random tokens that were handed in, all steps from the same ones."""
    if work.threads:
        torch.set_num_threads(work.threads)
    agent = Agent.load(
        AgentSettings(name="agent", model=str(folder), gradient_checkpointing=work.checkpointing), work.device
    )
    given = given_rollouts(work)
    longest = max(len(prompt) + len(response) for prompt, response in given)
    settings = LearningSettings(micro_batch_tokens=work.hacrl_tokens or work.micro_batch * longest)
    residency = Residency()
    level = cast(OffloadLevel, "never" if work.hacrl_offload == "auto" else work.hacrl_offload)
    learner = Learner(
        agent,
        make_method(GspoSettings()),
        settings,
        Sampling(work.new_tokens),
        exact_sampler=agent.model.dtype == torch.float32,
        offload_to=residency.transfers(agent, level),
    )
    residency.add(agent, learner, level)
    samples = [
        LearnerSample(
            prompt_ids=prompt,
            response_ids=response,
            behaviour_logprobs=tuple([-1.0] * len(response)),
            behaviour_logprob=-1.0 * len(response),
            source_length=len(response),
            source="agent",
            is_own=True,
            advantage=1.0 if number % 2 else -1.0,
        )
        for number, (prompt, response) in enumerate(given)
    ]
    memory = UpdateMemory(work.on_gpu)
    clock = Clock(work.on_gpu)
    for step in range(work.warmup + work.steps):
        residency.offload(agent.name)
        memory.begin()
        clock.enter("learn")
        residency.prepare_learning(agent.name)
        for note in learner.learn(samples, work.updates, seed=step).notes:
            print(note, file=sys.stderr)
        clock.end_step()
        memory.end()
    lengths = [(len(prompt), len(response)) for prompt, response in given]
    return Measured(
        "hacrl learner",
        clock.steps[work.warmup :],
        learnt_tokens=sum(map(sum, lengths)),
        learnt_flops=learning_flops(work.shapes[0], lengths),
        memory={**peak_memory(work.on_gpu), **memory.worst(work.warmup)},
    )
