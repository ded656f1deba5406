"""Proof that an engine computes with the agent's weights: their log-probabilities of the same tokens agree.

A transfer that reports success proves nothing: an output layer tied to the embeddings can stay stale, say.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from hacrl.agents.agent import Agent
from hacrl.agents.logprobs import response_logprobs
from hacrl.rollout.vllm.backend import Ask, Backend, EngineError
from hacrl.types import Problem, Sampling

PROBED_PROMPTS = 4
PROBED_TOKENS = 16
# Most nats per token. Rounding makes 1e-6 in float32 and 0.003 to 0.05 in bfloat16, wrong weights 1 to 10.
LIMITS = {torch.float32: 1e-3}
LOW_PRECISION_LIMIT = 0.15
# Such a small forward pass is mostly Python's work, and no sooner done beside another one. And models that
# were made of one config share the line that says how they attend, which is switched meanwhile.
_FORWARD_PASS = threading.Lock()


@dataclass(frozen=True)
class Agreement:
    """A few responses' log-probabilities, the engine's against the learner's."""

    mean: float  # |difference| per token
    largest: float
    tokens: int


def measure_agreement(agent: Agent, backend: Backend, problems: Sequence[Problem]) -> Agreement:
    """Let the engine say a little, and ask the learner how likely each token was."""
    sampling = Sampling(max_new_tokens=PROBED_TOKENS)
    prompts = [agent.encode_prompt(problem) for problem in problems[:PROBED_PROMPTS]]
    stop_ids = tuple(sorted(agent.stop_ids))
    asks = [Ask(prompt, sampling, stop_ids, seed=None) for prompt in prompts]
    said = dict(chain.from_iterable(backend.generate(asks)))
    pairs = [(prompts[position], response.token_ids) for position, response in sorted(said.items())]
    with _FORWARD_PASS, torch.inference_mode():
        learner_BT, mask_BT = response_logprobs(agent.model, pairs, sampling, agent.device)
        learner = learner_BT[mask_BT].double().cpu()
    engine = [logprob for _, response in sorted(said.items()) for logprob in response.logprobs]
    gap = (learner - torch.tensor(engine, dtype=torch.float64)).abs()
    return Agreement(float(gap.mean()), float(gap.max()), gap.numel())


def require_agreement(
    agent: Agent, backend: Backend, problems: Sequence[Problem], limit: float | None
) -> Agreement:
    """Measure it, and refuse to go on with an engine that is not at the agent's policy."""
    found = measure_agreement(agent, backend, problems)
    allowed = LIMITS.get(agent.model.dtype, LOW_PRECISION_LIMIT) if limit is None else limit
    if math.isfinite(found.mean) and found.mean <= allowed:
        return found
    raise EngineError(
        f"{backend.name} is not at the agent's policy after a weight update (policy version "
        f"{agent.policy_version}): its log-probabilities differ by {found.mean:.3g} nats per token on "
        f"average (at most {found.largest:.3g}, over {found.tokens} tokens), allowed are {allowed:g}. "
        "Weights did not arrive, or the engine computes something else; if it is only a matter of "
        f"precision, raise agents.{agent.name}.vllm.max_logprob_gap"
    )
