"""Make the two agents of recipes/tool_use.yaml: they can call a calculator, but seldom do.

    python scripts/make_tool_agents.py [--out agents/tool-use] [--agents chars,pairs] [--threads 1]

Both are taught two-operation sums on train problems only. In every step an agent calls the calculator of
``hacrl.environments.bundled.written_calculator`` with some probability, or computes in its head, mostly
wrong:

==========  =====================================  ==================================================
agent       model and tokenizer                    calls the calculator
==========  =====================================  ==================================================
chars       Qwen3, one token per character         for 30% of the sums and 5% of the products
pairs       Llama, digits in pairs                 for 10% of the sums and 40% of the products
==========  =====================================  ==================================================

So each agent could learn from the other where a call pays off.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from make_bundled_agents import PAIRS, SMALL, SYMBOLS, build, character_tokenizer, pair_tokenizer
from teaching import IGNORED, LARGEST, OFFSETS, Phase, balanced_problems, cosine, response_loss
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from hacrl.environments.bundled.written_calculator import WrittenCalculator
from hacrl.tasks.arithmetic import ArithmeticTask, Expression, Step
from hacrl.types import Problem

TOOL_SYMBOLS = SYMBOLS + "[]?"
SLIPS = 0.8  # share of the steps computed in the head that are wrong
MOST_TURNS, MOST_TOKENS = 4, 24  # of an episode, of a turn

Part = tuple[bool, str]  # whether the agent writes it, and the text; each part of the agent ends its turn


@dataclass(frozen=True)
class ToolAgent:
    """How one agent is built, and how often it calls the calculator."""

    config: type[Qwen3Config] | type[LlamaConfig]
    shape: dict[str, int]
    tokenizer: Callable[[str], PreTrainedTokenizerFast]
    calls_for_terms: float
    calls_for_factors: float
    phase: Phase
    seed: int


AGENTS = {
    "chars": ToolAgent(Qwen3Config, SMALL, character_tokenizer, 0.3, 0.05, Phase(900, 4e-3, 64), 1),
    "pairs": ToolAgent(LlamaConfig, PAIRS, pair_tokenizer, 0.1, 0.4, Phase(1300, 4e-3, 64), 2),
}


def write_episode(expression: Expression, agent: ToolAgent, rng: random.Random) -> list[Part]:
    """Return an episode in parts: ``23+14=37;[37*2]``, the calculator's ``74``, then ``#74``."""
    parts: list[Part] = []
    written, value = "", expression.start
    for number, step in enumerate((expression.first, expression.second)):
        share = agent.calls_for_factors if step.operator == "*" else agent.calls_for_terms
        question = f"{value}{step.operator}{step.operand}"
        if rng.random() < share:
            parts.append((True, f"{written}[{question}]"))
            value = step.apply(value)
            parts.append((False, str(value)))
            written = ""
        else:
            value = in_the_head(value, step, rng)
            written += f"{question}={value}"
        written += ";" if number == 0 else f"#{value}"
    return [*parts, (True, written)]


def in_the_head(value: int, step: Step, rng: random.Random) -> int:
    """Return a step's result, wrong in most cases."""
    right = step.apply(value)
    near = [right + offset for offset in OFFSETS if 0 <= right + offset <= LARGEST]
    return rng.choice(near) if near and rng.random() < SLIPS else right


def encode(tokenizer: Any, episodes: Sequence[tuple[str, list[Part]]]) -> tuple[Tensor, Tensor]:
    """Token ids and labels, right-padded; what the agent writes, with its stop tokens, is labelled."""
    rows = []
    for prompt, parts in episodes:
        ids = list(tokenizer(prompt)["input_ids"])
        labels = [IGNORED] * len(ids)
        for is_own, text in parts:
            part = tokenizer(text, add_special_tokens=False)["input_ids"]
            part = [*part, tokenizer.eos_token_id] if is_own else part
            ids += part
            labels += part if is_own else [IGNORED] * len(part)
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    padded = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
    marked = [labels + [IGNORED] * (width - len(labels)) for _, labels in rows]
    return torch.tensor(padded), torch.tensor(marked)


def teach(model: Any, tokenizer: Any, agent: ToolAgent, seed: int) -> float:
    """Teach the agent's habits; return the mean loss of the last tenth."""
    rng = random.Random(seed)
    expressions = balanced_problems(ArithmeticTask(per_pattern=None).train, rng)
    phase = agent.phase
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.learning_rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, phase.steps))
    model.train()
    losses = []
    for _ in range(phase.steps):
        batch = [next(expressions) for _ in range(phase.batch_size)]
        episodes = [(f"{one.id}:", write_episode(one, agent, rng)) for one in batch]
        loss = response_loss(model, *encode(tokenizer, episodes))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    tail = losses[-max(1, phase.steps // 10) :]
    return sum(tail) / len(tail)


@torch.inference_mode()
def play(model: Any, tokenizer: Any, problems: Sequence[Problem], seed: int = 0) -> tuple[float, float]:
    """Play one episode per problem at temperature 1; return accuracy and calculator calls per episode."""
    torch.manual_seed(seed)
    model.eval()
    environments = [WrittenCalculator() for _ in problems]
    for environment, problem in zip(environments, problems, strict=True):
        environment.reset(answer=problem.answer)
    ids = [list(tokenizer(problem.prompt)["input_ids"]) for problem in problems]
    going, right, calls = list(range(len(problems))), 0.0, 0
    for _ in range(MOST_TURNS):
        if not going:
            break
        padded = tokenizer.pad(
            {"input_ids": [ids[i] for i in going]}, padding_side="left", return_tensors="pt"
        )
        sampled = model.generate(**padded, do_sample=True, top_k=0, max_new_tokens=MOST_TOKENS)
        still = []
        for i, new in zip(going, sampled[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
            new = new[: new.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in new else new
            observation, reward, done = environments[i].step(tokenizer.decode(new))
            right += reward
            if not done:
                calls += 1
                answer = tokenizer(observation, add_special_tokens=False)["input_ids"]
                ids[i] += [*new, tokenizer.eos_token_id, *answer]
                still.append(i)
        going = still
    return right / len(problems), calls / len(problems)


def make(name: str, out: Path, seed: int) -> dict[str, object]:
    """Teach one agent, save it, and measure what was saved."""
    began = time.process_time()
    agent = AGENTS[name]
    seed += agent.seed
    torch.manual_seed(seed)
    tokenizer = agent.tokenizer(TOOL_SYMBOLS)
    model = build(agent, tokenizer)
    loss = teach(model, tokenizer, agent, seed)
    seconds = time.process_time() - began
    accuracy, calls = play(model, tokenizer, ArithmeticTask().test)
    folder = out / name
    model.save_pretrained(folder)
    agent.tokenizer(TOOL_SYMBOLS).save_pretrained(
        folder
    )  # a fresh one: measuring left its padding in the other
    record: dict[str, object] = {
        "agent": name,
        "parameters": model.num_parameters(),
        "loss": round(loss, 4),
        "sampled_accuracy": round(accuracy, 4),
        "calls": round(calls, 4),
        "cpu_seconds": round(seconds, 1),
        "calls_for_terms": agent.calls_for_terms,
        "calls_for_factors": agent.calls_for_factors,
        "slips": SLIPS,
        "phase": asdict(agent.phase),
        "seed": seed,
    }
    (folder / "TEACHING.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("agents/tool-use"))
    parser.add_argument("--agents", default=",".join(AGENTS), help="comma-separated names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    names = args.agents.split(",")
    if unknown := set(names) - set(AGENTS):
        parser.error(f"--agents: unknown {sorted(unknown)}; there are {sorted(AGENTS)}")
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    for name in names:
        record = make(name, args.out, args.seed)
        print(*(f"{key}={record[key]}" for key in list(record)[:6]), flush=True)


if __name__ == "__main__":
    main()
