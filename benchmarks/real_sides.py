"""hacrl and TRL's GRPOTrainer on real models and problems: steps, and accuracy by seconds of training.

Both sides train with the same verifier, lengths, numbers of responses and updates. Both are evaluated by
the run's engine (TRL: by hacrl's transformers engine), on the same held-out problems. Evaluations do not
count as time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hacrl_side import Watch
from training_work import Clock, UpdateMemory, peak_memory

from hacrl.config.load import build_config
from hacrl.config.schema import VerifierSettings
from hacrl.engines.answering import Answerer
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.runs.run import LocalRun
from hacrl.tasks.boxed import BoxedTask
from hacrl.tasks.math.pool import MathVerifier
from hacrl.training.metrics import Accuracy
from hacrl.types import Problem, Sampling


@dataclass(frozen=True, kw_only=True)
class RealWork:
    """Steps of RL on real models and problems."""

    models: tuple[str, ...]  # folders
    train: str  # JSON lines with problem and answer
    test: str
    device: str
    prompts: int
    samples: int  # responses to a prompt
    new_tokens: int
    updates: int  # on each agent's responses, a step
    steps: int
    every: int  # steps between evaluations
    evaluated: int  # held-out problems
    lr: float
    engine: str
    vllm_memory: float  # share of the GPU that one vLLM engine may take
    micro_batch: int  # TRL's responses in one forward pass
    hacrl_tokens: int | None  # learning.micro_batch_tokens; None: hacrl chooses
    checkpointing: bool
    trl_dtype: str
    threads: int | None

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU to wait for before looking at a clock."""
        return self.device != "cpu"

    @property
    def names(self) -> list[str]:
        """Names of the agents."""
        return [f"agent{number}" for number in range(len(self.models))]


@dataclass
class Found:
    """What one side did."""

    side: str
    seconds: list[dict[str, float]] = field(default_factory=list)  # of every step, by phase
    # agent -> (steps made, seconds of training until then, accuracy, its standard error)
    accuracies: dict[str, list[tuple[int, float, float, float]]] = field(default_factory=dict)
    lengths: list[float] = field(default_factory=list)  # mean tokens of the responses of every step
    memory: dict[str, float] = field(default_factory=dict)  # GiB
    first_step: float = 0.0  # seconds from the start of loading to the end of the first step
    failure: str = ""

    def note_accuracy(self, agent: str, step: int, accuracy: Accuracy) -> None:
        """Keep an evaluation after so many steps."""
        spent = sum(one["step"] for one in self.seconds)
        self.accuracies.setdefault(agent, []).append((step, spent, accuracy.mean, accuracy.stderr))

    def seconds_to(self, agent: str, accuracy: float) -> float | None:
        """Return the seconds of training after which an evaluation first found this accuracy."""
        return next((spent for _, spent, mean, _ in self.accuracies[agent] if mean >= accuracy), None)


def make_task(work: RealWork) -> BoxedTask:
    """Return the task of both sides."""
    return BoxedTask(train=work.train, test=work.test, columns={"problem": "problem", "answer": "answer"})


class RealWatch(Watch):
    """Also keeps accuracies and lengths, and leaves evaluations out of the steps' seconds."""

    def __init__(self, found: Found, started: float) -> None:
        super().__init__()
        self._found = found
        self._started = started

    def on_step(self, report: Any, seconds: Mapping[str, float]) -> None:
        """Keep the step's seconds and the mean length of its responses."""
        super().on_step(report, seconds)
        self._found.seconds.append(self.seconds[-1])
        self._found.first_step = self._found.first_step or time.perf_counter() - self._started
        tokens = sum(agent.rollout.tokens for agent in report.agents.values())
        self._found.lengths.append(tokens / sum(agent.rollout.rollouts for agent in report.agents.values()))

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Keep the accuracies; the next step begins now."""
        for agent, accuracy in accuracies.items():
            self._found.note_accuracy(agent, step, accuracy)
        self.begun, self.cpu = time.perf_counter(), time.process_time()


def measure_hacrl(work: RealWork, method: str) -> Found:
    """Train all agents in one run."""
    started = time.perf_counter()
    found = Found(f"hacrl {method}")
    watch = RealWatch(found, started)
    with tempfile.TemporaryDirectory() as output:
        agents = [{"name": name, "model": model} for name, model in zip(work.names, work.models, strict=True)]
        vllm = {"memory": work.vllm_memory, "max_sequences": work.prompts * work.samples}
        config = build_config(
            {
                "agents": agents,
                "agent_defaults": {
                    "gradient_checkpointing": work.checkpointing,
                    "engine": work.engine,
                    "vllm": vllm,
                },
                "output": str(Path(output) / "run"),
                "device": work.device,
                "steps": work.steps,
                **({"threads": work.threads} if work.threads else {}),
                "method": {"name": method},
                "rollout": {
                    "prompts_per_step": work.prompts,
                    "rollouts_per_prompt": work.samples,
                    "max_new_tokens": work.new_tokens,
                },
                "learning": {
                    "lr": work.lr,
                    "updates_per_source": work.updates,
                    "micro_batch_tokens": work.hacrl_tokens,
                },
                "evaluation": {
                    "problems": work.evaluated,
                    "samples_per_problem": 1,
                    "every": work.every,
                    "temperature": 0.0,
                },
            }
        )
        with LocalRun(config, [watch], task=make_task(work)) as run:
            watch.count_lengths(run)
            Clock(work.on_gpu)  # from here on memory counts
            watch.begun, watch.cpu = time.perf_counter(), time.process_time()
            run.train()
    found.memory = peak_memory(work.on_gpu)
    return found


def measure_trl(work: RealWork) -> Found:
    """Train the agents one after the other; a step's seconds are those of all agents."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    if work.threads:
        torch.set_num_threads(work.threads)
    whole = Found("TRL gspo")
    for name, model in zip(work.names, work.models, strict=True):
        alone = _train_with_trl(work, name, model)
        whole.first_step = whole.first_step or alone.first_step
        whole.accuracies |= alone.accuracies
        whole.memory = {what: max(size, whole.memory.get(what, 0.0)) for what, size in alone.memory.items()}
        if not whole.seconds:
            whole.seconds, whole.lengths = alone.seconds, alone.lengths
            continue
        whole.seconds = [
            {phase: one.get(phase, 0.0) + other.get(phase, 0.0) for phase in {*one, *other}}
            for one, other in zip(whole.seconds, alone.seconds, strict=True)
        ]
        whole.lengths = [(a + b) / 2 for a, b in zip(whole.lengths, alone.lengths, strict=True)]
    return whole


def _train_with_trl(work: RealWork, name: str, model: str) -> Found:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl_side import watch

    started = time.perf_counter()
    found, task, memory = Found("TRL gspo"), make_task(work), UpdateMemory(work.on_gpu)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    responses = work.prompts * work.samples
    accumulated = max(1, responses // (work.micro_batch * work.updates))
    if accumulated * work.micro_batch * work.updates != responses:
        raise SystemExit(f"--micro-batch {work.micro_batch} must divide {responses} // {work.updates}")
    needed = work.steps * work.prompts
    problems = (list(task.train) * (needed // len(task.train) + 1))[:needed]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=accumulated,
        steps_per_generation=accumulated * work.updates,
        max_steps=work.steps * work.updates,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        gradient_checkpointing=work.checkpointing,
        bf16=work.on_gpu,
        use_cpu=not work.on_gpu,
        model_init_kwargs={"dtype": work.trl_dtype if work.on_gpu else "float32"},
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **(_vllm(work, tokenizer, problems) if work.engine == "vllm" else {}),
    )
    verifier = MathVerifier(VerifierSettings())

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        return [verdict.reward for verdict in verifier.verify([*zip(answer, texts, strict=True)])]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"prompt": _prompt(problem, tokenizer), "answer": problem.answer} for problem in problems]
        ),
        processing_class=tokenizer,
    )
    agent = Agent(name, trainer.model, tokenizer)
    clock, pairs = Clock(work.on_gpu), list[tuple[int, int]]()

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Ends a step after its updates, and evaluates between steps."""

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            clock.enter("rest")
            if state.global_step % work.updates:
                return
            clock.end_step()
            memory.end()
            found.seconds.append(clock.steps[-1])
            found.first_step = found.first_step or time.perf_counter() - started
            found.lengths.append(sum(length for _, length in pairs) / len(pairs))
            pairs.clear()
            step = len(found.seconds)
            if step == work.steps or (work.every and step % work.every == 0):
                found.note_accuracy(name, step, evaluate(work, agent, task))
            clock.restart()

    trainer.add_callback(Steps())
    watch(trainer, clock, pairs, memory)
    found.note_accuracy(name, 0, evaluate(work, agent, task))
    clock.restart()
    trainer.train()
    verifier.close()
    task.close()
    found.memory = {**peak_memory(work.on_gpu), **memory.worst(0)}
    return found


def _prompt(problem: Problem, tokenizer: Any) -> Any:
    turn = {"role": "user", "content": problem.prompt}
    return [turn] if tokenizer.chat_template else problem.prompt


def _vllm(work: RealWork, tokenizer: Any, problems: list[Problem]) -> dict[str, Any]:
    longest = max(map(len, tokenizer([problem.prompt for problem in problems]).input_ids))
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": work.vllm_memory,
        "vllm_enable_sleep_mode": True,
        "vllm_max_model_length": longest + 256 + work.new_tokens,  # room for a chat template
    }


def evaluate(work: RealWork, agent: Agent, task: BoxedTask) -> Accuracy:
    """Return a model's greedy accuracy on the held-out problems, answered by hacrl's engine."""
    from hacrl.training.metrics import accuracy_by_problem

    model = agent.model
    was_training, checkpoints = model.training, bool(model.is_gradient_checkpointing)
    model.eval()
    if checkpoints:
        model.gradient_checkpointing_disable()
    answerer = Answerer(agent, TransformersEngine(agent, work.prompts * work.samples), task)
    rollouts = answerer.generate(
        list(task.test)[: work.evaluated], 1, Sampling(work.new_tokens, temperature=0.0), 0
    )
    accuracy = accuracy_by_problem(answerer.verify(rollouts), 1)
    if checkpoints:
        model.gradient_checkpointing_enable()
    model.train(was_training)
    return accuracy
