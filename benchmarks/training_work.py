"""The work that two trainers are compared on, what is measured of each, and how much arithmetic it holds.

Model FLOPs of learning from one prompt + response, forward and backward, nothing counted twice that gradient
checkpointing computes twice: ``6 N S + 6 L H D S^2 + 6 d V T`` for S tokens of which T are the response's.
N are the parameters of the layers' matrices (6 = 2 forward + 4 backward, per token); L layers of H heads of
size D attend to half of S^2 places on average (12 L H D S^2 / 2); the output layer (d x V) is needed for the
response alone.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, make_agent
from timing import best_of

GIB = 2**30
_DRAW = random.Random(0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Steps of RL: every agent answers the same prompts, then makes its updates."""

    shapes: tuple[str, ...]
    device: str
    prompts: int
    samples: int  # responses to a prompt
    prompt_letters: int
    new_tokens: int
    updates: int  # of every agent, a step
    micro_batch: int  # own responses in one forward pass
    steps: int  # that are counted ...
    warmup: int  # ... after these
    checkpointing: bool
    engine: str = "transformers"
    vllm_memory: float = 0.3  # share of the GPU that one vLLM engine may take
    vllm_sleep: bool = True  # engines give their memory back while agents learn
    vllm: dict[str, Any] = field(default_factory=dict)  # further settings of hacrl's engines
    side_by_side: int | None = None  # most responses that hacrl decodes at a time; None: all
    hacrl_tokens: int | None = None  # learning.micro_batch_tokens; None: as many as TRL has in a forward pass
    hacrl_offload: str = "auto"  # learning.offload; of a learner alone, "auto" is never
    trl_dtype: str = "bfloat16"  # of TRL's weights on a GPU
    trl_generation: dict[str, Any] = field(default_factory=dict)  # further generation options of TRL
    trl_once: bool = False  # TRL trains the first agent alone, and that counts for all of them
    threads: int | None = None
    one_tokenizer: bool = False
    given_prompt_tokens: int = 0  # if any, rollouts are random tokens that are handed in: learning alone

    @property
    def responses(self) -> int:
        """Of one agent in a step."""
        return self.prompts * self.samples

    @property
    def on_gpu(self) -> bool:
        """Whether there is anything to wait for before looking at a clock."""
        return self.device != "cpu"

    def names(self) -> list[str]:
        """Of the agents, whose shapes may be equal."""
        return [f"agent{number}" for number in range(len(self.shapes))]


@dataclass
class Measured:
    """One side's counted steps, each of them all agents' together."""

    side: str
    seconds: list[dict[str, float]] = field(
        default_factory=list
    )  # by phase; "step" is the whole, "cpu" its processor time
    generated_tokens: int = 0  # a step
    learnt_tokens: int = 0  # a step, prompts included
    learnt_flops: float = 0.0  # a step
    memory: dict[str, float] = field(default_factory=dict)  # GiB
    failure: str = ""

    def median(self, phase: str = "step") -> float:
        """Seconds of the middle step."""
        return statistics.median(step.get(phase, 0.0) for step in self.seconds)

    def total(self) -> float:
        """Seconds of all counted steps."""
        return sum(step["step"] for step in self.seconds)

    def times(self, agents: int) -> Measured:
        """The same for so many agents that are trained in turn, each as the one that was."""
        return replace(
            self,
            seconds=[{phase: agents * spent for phase, spent in step.items()} for step in self.seconds],
            generated_tokens=agents * self.generated_tokens,
            learnt_tokens=agents * self.learnt_tokens,
            learnt_flops=agents * self.learnt_flops,
        )

    def spread(self) -> tuple[float, float]:
        """Fastest and slowest whole step."""
        steps = [step["step"] for step in self.seconds]
        return min(steps), max(steps)


def dump(path: Path, record: Any) -> None:
    """A record as JSON."""
    path.write_text(json.dumps(asdict(record)) + "\n")


def load_work(path: Path) -> Work:
    """What :func:`dump` wrote."""
    fields = json.loads(path.read_text())
    return Work(**{**fields, "shapes": tuple(fields["shapes"])})


def load_measured(path: Path) -> Measured:
    """What :func:`dump` wrote."""
    return Measured(**json.loads(path.read_text()))


def make_agents(work: Work, folder: Path) -> list[Path]:
    """Model folders that both sides load."""
    dtype = torch.bfloat16 if work.on_gpu else torch.float32
    return [
        make_agent(
            shape, folder / name, dtype, work.device, seed=0 if work.one_tokenizer else number, stops=False
        )
        for number, (name, shape) in enumerate(zip(work.names(), work.shapes, strict=True))
    ]


def meaningless(completions: list[str], **_: Any) -> list[float]:
    """A random number each, or responses of equal text would have no advantage and cost hacrl nothing."""
    return [_DRAW.random() for _ in completions]


class Clock:
    """Seconds by phase; a new phase ends the one before, a step ends all."""

    def __init__(self, on_gpu: bool) -> None:
        self.steps: list[dict[str, float]] = []
        self._on_gpu = on_gpu
        self._step: dict[str, float] = {}
        self._phase = "rest"
        self._begun, self._cpu = self._now(), time.process_time()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def enter(self, phase: str) -> None:
        """From now on it is this phase's time."""
        now = self._now()
        self._step[self._phase] = self._step.get(self._phase, 0.0) + now - self._begun
        self._phase, self._begun = phase, now

    def end_step(self) -> None:
        """The next phase belongs to the next step."""
        self.enter("rest")
        cpu = time.process_time()
        self.steps.append({**self._step, "step": sum(self._step.values()), "cpu": cpu - self._cpu})
        self._step, self._cpu = {}, cpu

    def restart(self) -> None:
        """Forget the time since the last step ended."""
        self._step, self._phase = {}, "rest"
        self._begun, self._cpu = self._now(), time.process_time()

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


class UpdateMemory:
    """GPU memory of every step: held before it, and at its fullest."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._held = 0
        self._steps: list[tuple[int, int]] = []

    def begin(self) -> None:
        """A step begins."""
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()

    def end(self) -> None:
        """It is over."""
        if self._on_gpu:
            self._steps.append((self._held, torch.cuda.max_memory_allocated()))

    def worst(self, warmup: int) -> dict[str, float]:
        """GiB, of the steps that count; empty without a GPU."""
        if not self._on_gpu:
            return {}
        counted = self._steps[warmup:]
        return {
            "held": max(held for held, _ in counted) / GIB,
            "beyond": max(peak - held for held, peak in counted) / GIB,
            "allocated": max(peak for _, peak in counted) / GIB,
        }


def given_rollouts(work: Work) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts and responses of random tokens, none of them special; a step's worth."""
    draw = random.Random(0)
    vocabulary = range(4, SHAPES[work.shapes[0]]["vocab_size"])
    return [
        (
            tuple(draw.choices(vocabulary, k=work.given_prompt_tokens)),
            tuple(draw.choices(vocabulary, k=work.new_tokens)),
        )
        for _ in range(work.responses)
    ]


def peak_memory(on_gpu: bool) -> dict[str, float]:
    """GiB of this process at its fullest: on the GPU if it uses one, else in the machine's memory."""
    if on_gpu:
        return {
            "allocated": torch.cuda.max_memory_allocated() / GIB,
            "reserved": torch.cuda.max_memory_reserved() / GIB,
        }
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}


def matrix_parameters(shape: str) -> int:
    """N: parameters of the layers' matrices."""
    numbers = SHAPES[shape]
    hidden, heads = numbers["hidden_size"], numbers["num_attention_heads"]
    attention = 2 * hidden * _head_size(shape) * (heads + numbers["num_key_value_heads"])
    return int(numbers["num_hidden_layers"] * (attention + 3 * hidden * numbers["intermediate_size"]))


def learning_flops(shape: str, pairs: Sequence[tuple[int, int]]) -> float:
    """Of prompts and responses of these lengths; see the top of this file."""
    numbers, parameters = SHAPES[shape], matrix_parameters(shape)
    attention = numbers["num_hidden_layers"] * numbers["num_attention_heads"] * _head_size(shape)
    output = numbers["hidden_size"] * numbers["vocab_size"]
    return float(
        sum(
            6 * parameters * (prompt + response)
            + 6 * attention * (prompt + response) ** 2
            + 6 * output * response
            for prompt, response in pairs
        )
    )


def _head_size(shape: str) -> int:
    numbers = SHAPES[shape]
    return int(numbers.get("head_dim", numbers["hidden_size"] // numbers["num_attention_heads"]))


def matmul_peak(size: int = 8192, rounds: int = 20) -> float:
    """FLOP/s of the GPU's bf16 matrix product on random numbers: the best of three means."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 * rounds / best_of(3, lambda: [left @ right for _ in range(rounds)])
