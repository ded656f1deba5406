"""TRL's GRPOTrainer, set up as GSPO, on the work of ``against_trl.py``: one trainer per agent, in turn."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from shapes import prompts
from training_work import Clock, Measured, UpdateMemory, Work, learning_flops, meaningless, peak_memory
from training_work import given_rollouts as random_rollouts
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepEnds(TrainerCallback):
    """Tells the clock; a step is a generation and all updates made from it."""

    def __init__(self, clock: Clock, updates: int, memory: UpdateMemory) -> None:
        self._clock = clock
        self._updates = updates
        self._memory = memory

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """An update was made."""
        self._clock.enter("rest")
        if state.global_step % self._updates == 0:
            self._clock.end_step()
            self._memory.end()


def measure(work: Work, folders: list[Path]) -> Measured:
    """The agents' steps side by side, as if they were one step."""
    if work.trl_once:
        first = replace(work, shapes=work.shapes[:1], trl_once=False)
        return measure(first, folders[:1]).times(len(work.shapes))
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # about rollouts that are handed in
    if work.threads:
        torch.set_num_threads(work.threads)
    found = Measured("TRL GSPO")
    agents = []
    for folder, shape in zip(folders, work.shapes, strict=True):
        agents.append(_train(work, folder, shape, found))
        gc.collect()
        if work.on_gpu:
            torch.cuda.empty_cache()
    for steps in zip(*agents, strict=True):
        phases = {phase for step in steps for phase in step}
        found.seconds.append({phase: sum(step.get(phase, 0.0) for step in steps) for phase in phases})
    return found


def _train(work: Work, folder: Path, shape: str, found: Measured) -> list[dict[str, float]]:
    """One agent alone. Adds to what was found and returns the seconds of the steps that count."""
    memory = UpdateMemory(work.on_gpu)
    pairs: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as output:
        trainer = _trainer(work, folder, Path(output))
        clock = Clock(work.on_gpu)
        trainer.add_callback(StepEnds(clock, work.updates, memory))
        watch(trainer, clock, pairs, memory)
        trainer.train()
    lengths = pairs[-work.responses :]
    found.generated_tokens += sum(response for _, response in lengths)
    found.learnt_tokens += sum(prompt + response for prompt, response in lengths)
    found.learnt_flops += learning_flops(shape, lengths)
    for what, amount in {**peak_memory(work.on_gpu), **memory.worst(work.warmup)}.items():
        found.memory[what] = max(found.memory.get(what, 0.0), amount)
    return clock.steps[work.warmup :]


def _trainer(work: Work, folder: Path, output: Path) -> GRPOTrainer:
    rows = prompts(work.prompts * (work.warmup + work.steps), work.prompt_letters)
    accumulated = work.responses // (work.micro_batch * work.updates)
    if accumulated * work.micro_batch * work.updates != work.responses:
        raise SystemExit(
            f"{work.responses} responses cannot be cut into {work.updates} updates of micro-batches of "
            f"{work.micro_batch}: choose another --micro-batch"
        )
    arguments = GRPOConfig(
        output_dir=str(output),
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
        max_steps=(work.warmup + work.steps) * work.updates,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=work.checkpointing,
        bf16=work.on_gpu,
        use_cpu=not work.on_gpu,
        model_init_kwargs={"dtype": work.trl_dtype if work.on_gpu else "float32"},
        generation_kwargs=work.trl_generation or None,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **(_vllm(work) if work.engine == "vllm" else {}),
    )
    return GRPOTrainer(
        model=str(folder),
        reward_funcs=meaningless,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": text} for text in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        rollout_func=_given(work) if work.given_prompt_tokens else None,
    )


def _vllm(work: Work) -> dict[str, Any]:
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": work.vllm_memory,
        "vllm_enable_sleep_mode": work.vllm_sleep,
        "vllm_max_model_length": work.prompt_letters + work.new_tokens,  # a token has a letter at least
    }


def _given(work: Work) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Instead of generation: the random tokens that the other side learns from, too."""
    given = random_rollouts(work)

    def rollouts(prompts: list[Any], _: Any) -> dict[str, Any]:
        chosen = given[: len(prompts)]
        return {
            "prompt_ids": [list(prompt) for prompt, _ in chosen],
            "completion_ids": [list(response) for _, response in chosen],
            "logprobs": None,
        }

    return rollouts


def watch(trainer: Any, clock: Clock, pairs: list[tuple[int, int]], memory: UpdateMemory) -> None:
    """Generation, rewards and training steps tell the clock when they begin; lengths are kept."""
    generate, rewards, learn = trainer._generate, trainer._calculate_rewards, trainer.training_step

    def watched_generate(*arguments: Any, **named: Any) -> Any:
        memory.begin()
        clock.enter("rollout")
        found = generate(*arguments, **named)
        clock.enter("learn")
        pairs.extend((len(prompt), len(response)) for prompt, response in zip(*found[:2], strict=True))
        return found

    def watched_rewards(*arguments: Any, **named: Any) -> Any:
        clock.enter("verify")
        found = rewards(*arguments, **named)
        clock.enter("learn")
        return found

    def watched_learn(*arguments: Any, **named: Any) -> Any:
        clock.enter("learn")
        return learn(*arguments, **named)

    trainer._generate, trainer._calculate_rewards = watched_generate, watched_rewards
    trainer.training_step = watched_learn
