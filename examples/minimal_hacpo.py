"""HACPO in one file: several different language models teach each other on a CPU.

Heterogeneous Agent Collaborative Policy Optimisation, arXiv 2603.02604, from the sampling to the update, with
nothing but torch and transformers. Read it top to bottom; the equation numbers are the paper's.

    python examples/minimal_hacpo.py                  # three bundled tiny agents, a minute or two
    python examples/minimal_hacpo.py DIR DIR ...      # any causal LMs that can answer "(23+14)*2:"

It leaves out what the library adds: other methods, options and ablations, log-probabilities from the sampler
(here one more forward pass gives them), config, run folders, exact repeatability. The library's
version of each equation is in src/hacrl/algorithms/.
"""

from __future__ import annotations

import operator
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

BUNDLED = Path(__file__).parent.parent / "src" / "hacrl" / "models" / "bundled"
STEPS, PROMPTS, G, MAX_NEW_TOKENS = 16, 16, 8, 32
LEARNING_RATE, UPDATES_PER_SOURCE = 5e-5, 2
EPS = 0.05  # own responses are clipped to [1 - EPS, 1 + EPS]
ALPHA, DELTA, DELTA_STEP = 1.0, 0.2, 0.025  # others': exponent, lower clip bound 1 - DELTA + u * DELTA_STEP
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WINDOW = 5  # K: steps over which capability is averaged


@dataclass
class Agent:
    """A model with its own tokenizer and optimizer, and its mean reward of the last K steps."""

    name: str
    model: Any
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    history: list[float] = field(default_factory=list)

    @property
    def capability(self) -> float:
        """P_k (eq. 8)."""
        recent = self.history[-WINDOW:]
        return sum(max(reward, 1e-8) for reward in recent) / len(recent)


@dataclass
class Response:
    """One agent's answer. Agents exchange text; log-probability and length are in the source's tokens."""

    prompt: str
    source: Agent
    text: str
    stopped: bool
    reward: float
    logprob: float = 0.0
    length: int = 0


def load_agent(folder: str | Path) -> Agent:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return Agent(
        Path(folder).name, model, AutoTokenizer.from_pretrained(folder, padding_side="left"), optimizer
    )


def make_problem(rng: random.Random) -> tuple[str, int]:
    """A prompt such as "(23+14)*2:" and its answer, both results between 0 and 119."""
    while True:
        start, operators = rng.randint(10, 39), rng.choices("+-*", k=2)
        by = [rng.randint(2, 3) if op == "*" else rng.randint(2, 19) for op in operators]
        middle = APPLY[operators[0]](start, by[0])
        final = APPLY[operators[1]](middle, by[1])
        if 0 <= middle <= 119 and 0 <= final <= 119:
            return f"({start}{operators[0]}{by[0]}){operators[1]}{by[1]}:", final


@torch.no_grad()
def sample_responses(agent: Agent, problems: list[tuple[str, int]]) -> list[list[Response]]:
    """G responses to every prompt, judged: reward 1 if the number after "#" is right."""
    inputs = agent.tokenizer([prompt for prompt, _ in problems], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    tokens = agent.model.generate(
        **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS,
        num_return_sequences=G, pad_token_id=agent.tokenizer.pad_token_id,
    )[:, inputs["input_ids"].shape[1] :].tolist()  # fmt: skip
    responses = []
    for row, ids in enumerate(tokens):
        prompt, answer = problems[row // G]
        stopped = agent.tokenizer.eos_token_id in ids
        text = agent.tokenizer.decode(ids[: ids.index(agent.tokenizer.eos_token_id)] if stopped else ids)
        reward = float(text.rpartition("#")[2] == str(answer) and "#" in text)
        responses.append(Response(prompt, agent, text, stopped, reward))
    logprobs, lengths = log_likelihood(agent, responses)  # under the policy that sampled them: pi_j_old
    for response, logprob, length in zip(responses, logprobs.tolist(), lengths.tolist(), strict=True):
        response.logprob, response.length = logprob, int(length)
    return [responses[i : i + G] for i in range(0, len(responses), G)]


def log_likelihood(agent: Agent, responses: list[Response]) -> tuple[Tensor, Tensor]:
    """Return log pi_k(y) of any agent's text in agent k's tokens, stop token included, and their number."""
    rows, starts = [], []
    for response in responses:
        prompt_ids = agent.tokenizer(response.prompt).input_ids
        ids = agent.tokenizer(response.text, add_special_tokens=False).input_ids
        rows.append(prompt_ids + ids + [agent.tokenizer.eos_token_id] * response.stopped)
        starts.append(len(prompt_ids))
    width = max(map(len, rows))
    input_ids = torch.tensor(
        [row + [0] * (width - len(row)) for row in rows]
    )  # padding comes last: never seen
    logprobs = agent.model(input_ids=input_ids[:, :-1]).logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    position = torch.arange(1, width)
    start, end = torch.tensor(starts)[:, None], torch.tensor([len(row) for row in rows])[:, None]
    mask = (position >= start) & (position < end)
    return (chosen * mask).sum(dim=-1), mask.sum(dim=-1)


def omega(k: Agent, j: Agent) -> float:
    """Capability ratio P_k / P_j (eq. 9), kept within [0.1, 10]."""
    return min(max(k.capability / j.capability, 0.1), 10.0)


def advantages(
    learner: Agent, groups: dict[str, list[Response]], agents: list[Agent]
) -> list[tuple[Response, float]]:
    """Every agent's responses to one prompt with their advantage for the learner (eq. 6, 7, 10)."""
    rewards = torch.tensor([r.reward for agent in agents for r in groups[agent.name]])
    if rewards.min() == rewards.max():
        return [(r, 0.0) for agent in agents for r in groups[agent.name]]
    weighted = []
    for j in agents:
        mean = {a.name: sum(r.reward for r in groups[a.name]) / len(groups[a.name]) for a in agents}
        mu_j = sum(omega(j, a) * mean[a.name] for a in agents) / len(agents)  # eq. 6: what j should earn here
        if mu_j > 1:  # more than any reward: fall back to what j did earn
            mu_j = mean[j.name]
        coefficient = 1.0 if j is learner else omega(j, learner)  # eq. 10: stronger sources count more
        for r in groups[j.name]:
            advantage = (r.reward - mu_j) / (float(rewards.std()) + 1e-6)  # eq. 7
            weighted.append((r, coefficient * advantage))
    return weighted


def hacpo_loss(learner: Agent, batch: list[tuple[Response, float]], updates_done: int) -> Tensor:
    """Minus the objective: GSPO on own responses, the exponential clipped ratio on others' (eq. 11-14)."""
    responses = [response for response, _ in batch]
    advantage = torch.tensor([value for _, value in batch])
    logprob, _ = log_likelihood(learner, responses)
    old = torch.tensor([response.logprob for response in responses])
    length = torch.tensor([response.length for response in responses])
    s = ((logprob - old) / length).exp()  # eq. 11: sequence-level, over the source's length

    own = torch.minimum(s * advantage, s.clamp(1 - EPS, 1 + EPS) * advantage)
    clipped = s.clamp(1 - DELTA + updates_done * DELTA_STEP, 1.0)  # eq. 13, 14: never up-weighted
    cross = clipped * clipped.detach() ** ALPHA * advantage  # eq. 12
    is_own = torch.tensor([response.source is learner for response in responses])
    return -torch.where(is_own, own, cross).mean()


def train_step(agents: list[Agent], rng: random.Random) -> None:
    """Algorithm 1: all agents answer with frozen policies; then every agent learns from all answers."""
    problems = [make_problem(rng) for _ in range(PROMPTS)]
    answers = {agent.name: sample_responses(agent, problems) for agent in agents}
    for agent in agents:
        agent.history.append(sum(r.reward for group in answers[agent.name] for r in group) / (PROMPTS * G))
    for learner in agents:
        groups = [{name: answers[name][i] for name in answers} for i in range(PROMPTS)]
        samples = [pair for group in groups for pair in advantages(learner, group, agents)]
        rng.shuffle(samples)
        updates = UPDATES_PER_SOURCE * len(agents)
        for u in range(updates):
            loss = hacpo_loss(learner, samples[u::updates], updates_done=u)
            learner.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learner.model.parameters(), 1.0)
            learner.optimizer.step()


def main(folders: list[str], steps: int = STEPS) -> list[Agent]:
    logging.disable_progress_bar()
    torch.manual_seed(0)
    rng = random.Random(0)
    bundled = [str(BUNDLED / name) for name in ("qwen-small-a", "qwen-large", "llama-pairs")]
    agents = [load_agent(folder) for folder in folders or bundled]
    for step in range(1, steps + 1):
        train_step(agents, rng)
        print(f"step {step:2d}  " + "  ".join(f"{a.name} {a.history[-1]:.3f}" for a in agents), flush=True)
    return agents


if __name__ == "__main__":
    main(sys.argv[1:])
