"""Teach a tiny model two-operation arithmetic: first right solutions in one style, then noisy ones.

The noisy phase makes a base agent of it: it knows every step, yet often samples a wrong one, as base LLMs do.
Reinforcement learning then has something to remove that needs no new knowledge.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from hacrl.tasks.arithmetic import ArithmeticTask, Expression, Ranges, parse_expression
from hacrl.types import Problem

OFFSETS = (-10, -2, -1, 1, 2, 10)
MAX_NEW_TOKENS = 32  # the longest solution has 22 characters
LARGEST = Ranges().largest  # slips stay within the numbers the clean solutions taught
IGNORED = -100

Writer = Callable[[Expression, random.Random], str]


@dataclass(frozen=True)
class Phase:
    """One run of teaching: ``steps`` batches under a learning rate with warm-up and cosine decay."""

    steps: int
    learning_rate: float
    batch_size: int


@dataclass(frozen=True)
class Noise:
    """How often a step is written wrong, by its operator."""

    term: float  # + and -
    factor: float  # *

    def slips(self, operator: str, rng: random.Random) -> bool:
        """Whether this step goes wrong."""
        return rng.random() < (self.factor if operator == "*" else self.term)


def write_clean(expression: Expression, _: random.Random) -> str:
    """The right solution."""
    return expression.write(*expression.results())


def write_direct(expression: Expression, _: random.Random) -> str:
    """The right answer alone, without its steps."""
    return f"#{expression.results()[1]}"


STYLES: dict[str, Writer] = {"worked": write_clean, "direct": write_direct}


def noisy_writer(noise: Noise) -> Writer:
    """A writer whose steps slip; after a slip it goes on from the wrong value."""

    def write(expression: Expression, rng: random.Random) -> str:
        second = expression.second
        middle = expression.first.apply(expression.start)
        if noise.slips(expression.first.operator, rng):
            choices = [v for v in _slipped(middle) if 0 <= second.apply(v) <= LARGEST]
            middle = rng.choice(choices or [middle])
        final = second.apply(middle)
        if noise.slips(second.operator, rng):
            final = rng.choice(_slipped(final))
        return expression.write(middle, final)

    return write


def mixed_writer(usual: Writer, rare: Writer, share: float) -> Writer:
    """A writer that follows ``rare`` in a share of its solutions."""

    def write(expression: Expression, rng: random.Random) -> str:
        return (rare if rng.random() < share else usual)(expression, rng)

    return write


def _slipped(value: int) -> list[int]:
    return [value + offset for offset in OFFSETS if 0 <= value + offset <= LARGEST]


def balanced_problems(problems: Sequence[Problem], rng: random.Random) -> Iterator[Expression]:
    """Endless expressions: the operator pairs in turn, each pair's problems in a shuffled cycle."""
    by_pattern: dict[str, list[Expression]] = defaultdict(list)
    for problem in problems:
        expression = parse_expression(problem.id)
        by_pattern[expression.pattern].append(expression)
    # Pairs of products are few; as a pattern of their own, each would be seen hundreds of times.
    by_pattern["*+"] += by_pattern.pop("**")
    pools = list(by_pattern.values())
    for pool in pools:
        rng.shuffle(pool)
    streams = [cycle(pool) for pool in pools]
    while True:
        yield from (next(stream) for stream in streams)


def encode(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, right-padded; only the response and its stop token are labelled."""
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    responses = tokenizer([response for _, response in pairs], add_special_tokens=False)["input_ids"]
    rows = [(p, [*r, tokenizer.eos_token_id]) for p, r in zip(prompts, responses, strict=True)]
    width = max(len(p) + len(r) for p, r in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    for i, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[i, :end] = torch.tensor(prompt + response)
        labels[i, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def teach(model: Any, tokenizer: Any, write: Writer, phase: Phase, *, seed: int) -> float:
    """Run one phase; returns the mean loss of its last tenth.

    Problems come from the train split of the whole space. The split depends on the problem alone, so no test
    problem of any choice of ranges is among them.
    """
    rng = random.Random(seed)
    expressions = balanced_problems(ArithmeticTask(per_pattern=None).train, rng)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, phase.steps))
    model.train()
    losses = []
    for _ in range(phase.steps):
        batch = [next(expressions) for _ in range(phase.batch_size)]
        ids, labels = encode(tokenizer, [(f"{e.id}:", write(e, rng)) for e in batch])
        losses.append(_step(model, ids, labels, optimizer))
        schedule.step()
    tail = losses[-max(1, phase.steps // 10) :]
    return float(sum(tail) / len(tail))


def response_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the labelled tokens."""
    # Right padding and causal attention: no position that is labelled can see a pad, so no mask is needed.
    logits = model(input_ids=ids[:, :-1].to(model.device), use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten().to(model.device), ignore_index=IGNORED
    )


def _step(model: Any, ids: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> float:
    loss = response_loss(model, ids, labels)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def cosine(step: int, steps: int, warmup_share: float = 0.05) -> float:
    """Learning rate as a share of its peak: linear warm-up, then half a cosine."""
    warmup = max(1, round(steps * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@torch.inference_mode()
def accuracy(
    model: Any, tokenizer: Any, problems: Sequence[Problem], *, samples: int, seed: int = 0, batch: int = 256
) -> float:
    """Share of right answers: ``samples`` per problem at temperature 1, or greedy if ``samples`` is 0."""
    task = ArithmeticTask()
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if samples else {"do_sample": False}
    )
    repeated = [problem for problem in problems for _ in range(max(1, samples))]
    model.eval()
    right = 0.0
    for at in range(0, len(repeated), batch):
        chunk = repeated[at : at + batch]
        prompts = tokenizer([p.prompt for p in chunk], padding=True, return_tensors="pt").to(model.device)
        tokens = model.generate(**prompts, **sampling, max_new_tokens=MAX_NEW_TOKENS)
        texts = tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(task.judge(p, text).reward for p, text in zip(chunk, texts, strict=True))
    return right / len(repeated)
