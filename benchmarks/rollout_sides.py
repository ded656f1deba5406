"""The ways to generate that ``rollout_engines.py`` compares."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rollout_work import AnsweringTask, Work

from hacrl.config.schema import VllmSettings
from hacrl.engines.answering import Answerer
from hacrl.engines.base import Engine
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.vllm.launch import (
    engine_arguments,
    engine_environment,
    make_vllm_engine,
    runs_on_cpu,
    sleeps,
)
from hacrl.models.agent import Agent
from hacrl.types import Problem, Sampling

GENERATE = ("generate", "static")
SIDES = ("raw-vllm", "vllm", *GENERATE, "transformers")


@dataclass(frozen=True)
class Setup:
    """What all sides share."""

    agent: Agent
    model: Path  # the agent's folder
    folder: Path  # for what engines write
    vllm: VllmSettings
    longest: int  # tokens of a prompt and its response
    symbolic: float  # share of answers that need a verification worker
    probes: Sequence[Problem]


@dataclass(frozen=True)
class Made:
    """One round."""

    tokens: int
    after_last_s: float = 0.0  # judging that was left when the last response had come


class Side(Protocol):
    """One way to generate."""

    def start(self) -> None:
        """Be ready for the first round."""
        ...

    def generate(self, problems: Sequence[Problem], work: Work, seed: int) -> Made:
        """One round, to its very end."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class RawVllm:
    """``vllm.LLM.generate`` as vLLM's documentation has it, with the arguments hacrl gives its engine."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._llm: Any = None

    def start(self) -> None:
        """Load the agent's own weights from its folder."""
        setup, device = self._setup, self._setup.agent.device
        os.environ.update(engine_environment(device, setup.vllm))
        from vllm import LLM

        arguments = engine_arguments(
            str(setup.model),
            str(setup.agent.model.dtype).removeprefix("torch."),
            setup.vllm,
            setup.longest,
            runs_on_cpu(device, setup.vllm),
            sleeps(device, setup.vllm),
        )
        self._llm = LLM(**arguments, skip_tokenizer_init=True, disable_log_stats=True)

    def generate(self, problems: Sequence[Problem], work: Work, seed: int) -> Made:
        """See :class:`Side`."""
        from vllm import SamplingParams

        params = SamplingParams(
            n=work.samples,
            temperature=1.0,
            max_tokens=work.new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        prompts = [
            {"prompt_token_ids": list(self._setup.agent.encode_prompt(problem))} for problem in problems
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return Made(sum(len(one.token_ids) for output in outputs for one in output.outputs))

    def close(self) -> None:
        """End its process."""
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None


class Judged:
    """One of hacrl's engines as the trainer uses it: responses are judged while others are generated."""

    def __init__(self, agent: Agent, engine: Engine, task: AnsweringTask) -> None:
        self.engine = engine
        self._task = task
        self._answerer = Answerer(agent, engine, task)

    def start(self) -> None:
        """Bring the engine to the agent's policy."""
        self.engine.sync()

    def generate(self, problems: Sequence[Problem], work: Work, seed: int) -> Made:
        """See :class:`Side`."""
        rollouts = self._answerer.generate(problems, work.samples, Sampling(work.new_tokens), seed)
        last = time.perf_counter()
        verified = self._answerer.verify(rollouts)
        after = time.perf_counter() - last
        unreadable = sum(one.verdict.label not in ("correct", "wrong") for one in verified)
        if unreadable:
            raise RuntimeError(f"{unreadable} of {len(verified)} answers were not judged")
        return Made(sum(one.rollout.num_tokens for one in verified), after)

    def close(self) -> None:
        """End the engine and the verification workers."""
        self.engine.close()
        self._task.close()


class Generate:
    """transformers' ``generate``: all responses in one batch, prompts repeated for every response."""

    def __init__(self, setup: Setup, cache: str | None) -> None:
        self._setup = setup
        self._cache = {} if cache is None else {"cache_implementation": cache}

    def start(self) -> None:
        """Always ready."""

    @torch.inference_mode()
    def generate(self, problems: Sequence[Problem], work: Work, seed: int) -> Made:
        """See :class:`Side`."""
        agent = self._setup.agent
        torch.manual_seed(seed)
        prompts = [agent.encode_prompt(problem) for problem in problems for _ in range(work.samples)]
        ids = torch.tensor(prompts, device=agent.device)
        made = agent.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=work.new_tokens,
            min_new_tokens=work.new_tokens,
            eos_token_id=None,
            pad_token_id=agent.tokenizer.pad_token_id,
            **self._cache,
        )
        return Made(made[:, ids.shape[1] :].cpu().numel())

    def close(self) -> None:
        """Drop a static cache."""
        if hasattr(self._setup.agent.model, "_cache"):
            del self._setup.agent.model._cache
        torch._dynamo.reset()


def make_side(name: str, setup: Setup, most_responses: int) -> Side:
    """By its name on the command line."""
    if name == "raw-vllm":
        return RawVllm(setup)
    if name in GENERATE:
        return Generate(setup, "static" if name == "static" else None)
    engine: Engine
    if name == "vllm":
        engine = make_vllm_engine(
            setup.agent,
            setup.vllm,
            [setup.agent.encode_prompt(problem) for problem in setup.probes],
            setup.longest,
            setup.folder / "engine",
        )
    else:
        engine = TransformersEngine(setup.agent, max_batch=most_responses)
    return Judged(setup.agent, engine, AnsweringTask(setup.probes, setup.symbolic))


def let_go() -> None:
    """Nothing of a side that is closed may count for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
