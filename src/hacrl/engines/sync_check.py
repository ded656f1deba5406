"""Proof that an engine computes with the agent's weights: their log-probabilities of the same tokens agree.

A transfer that reports success proves nothing: an output layer tied to the embeddings can stay stale, say.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hacrl.engines.vllm.backend import Completion, PolicyMismatchError, Request
from hacrl.models.agent import Agent
from hacrl.models.logprobs import padded_logprobs, response_logprobs, response_mask
from hacrl.models.packing import TokenPair
from hacrl.models.policy_gap import limit_of_proof
from hacrl.types import Problem, Sampling

PROBED_PROMPTS = 4
PROBED_TOKENS = 16
# Such a small forward pass is mostly Python's work, and no sooner done beside another one. And models that
# were made of one config share the line that says how they attend, which is switched meanwhile.
_FORWARD_PASS = threading.Lock()


class Proof:
    """A few short responses whose log-probabilities are the engine's and the learner's alike."""

    def __init__(self, agent: Agent, problems: Sequence[Problem]) -> None:
        self._agent = agent
        self._sampling = Sampling(max_new_tokens=PROBED_TOKENS)
        self._prompts = [agent.encode_prompt(problem) for problem in problems[:PROBED_PROMPTS]]
        self._said: dict[int, Completion] = {}
        stop_ids = tuple(sorted(agent.stop_ids))
        self.asks = [Request(prompt, self._sampling, stop_ids, seed=None) for prompt in self._prompts]
        assert self.asks, "without problems nothing can be proven"

    def take(self, position: int, said: Completion) -> bool:
        """An answer; whether that was the last one."""
        self._said[position] = said
        return len(self._said) == len(self.asks)

    def gap(self, engine: str, limit: float | None) -> float:
        """Mean |difference| per token; :class:`PolicyMismatchError` if it cannot be the agent's policy."""
        agent, said = self._agent, [response for _, response in sorted(self._said.items())]
        learner = self._learner(response_logprobs)
        theirs = torch.tensor([logprob for one in said for logprob in one.logprobs], dtype=torch.float64)
        gaps = (learner - theirs).abs()
        mean, largest = float(gaps.mean()), float(gaps.max())
        allowed = limit_of_proof(agent.model.dtype, limit)
        if math.isfinite(mean) and mean <= allowed:
            return mean
        begins = list(accumulate((len(one.token_ids) for one in said[:-1]), initial=0))
        plainly = float((self._learner(_plainly) - theirs).abs().mean())
        raise PolicyMismatchError(
            f"{engine} is not at the agent's policy after a weight update (policy version "
            f"{agent.policy_version}): its log-probabilities differ by {mean:.3g} nats per token on "
            f"average (at most {largest:.3g}, over {gaps.numel()} tokens; first tokens of responses by "
            f"{float(gaps[begins].mean()):.3g}), allowed are {allowed:g}. The engine's are "
            f"{float(theirs.mean()):.3g} on average, the agent's {float(learner.mean()):.3g}; computed in "
            f"rows and with plain attention, the agent's differ by {plainly:.3g}. Weights did not arrive, or "
            "the engine computes something else; if it is only a matter of precision, raise "
            f"agents.{agent.name}.vllm.max_logprob_gap"
        )

    def _learner(self, compute: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """The agent's log-probabilities of all that was said, one response behind the other."""
        agent, said = self._agent, sorted(self._said.items())
        pairs = [(self._prompts[position], response.token_ids) for position, response in said]
        with _FORWARD_PASS, torch.inference_mode():
            logprobs_BT, mask_BT = compute(agent.model, pairs, self._sampling, agent.device)
            return logprobs_BT[mask_BT].double().cpu()


def _plainly(
    model: Any, pairs: Sequence[TokenPair], sampling: Sampling, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Without kernels of ours, in case it is they that are wrong, and not the engine."""
    return padded_logprobs(model, pairs, sampling, device), response_mask(pairs).to(device)
