"""Rollouts with the agent's own transformers model: prompts prefilled once, then decoded as groups of G."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hacrl.agents.agent import Agent
from hacrl.agents.sampling import sampling_logits
from hacrl.errors import ModelError, TrainingError
from hacrl.rollout.engine import Finished
from hacrl.types import Problem, Rollout, Sampling


class TransformersEngine:
    """Decodes a whole batch in step; rows that have ended leave it once they are half of it."""

    def __init__(self, agent: Agent, max_batch: int = 512) -> None:
        self.agent = agent
        self.max_batch = max_batch  # most responses decoded side by side

    @property
    def shares_weights(self) -> bool:
        """Yes: it is the learner's model."""
        return True

    def prepare(self) -> None:
        """Always ready."""

    @torch.inference_mode()
    def generate(
        self,
        problems: Sequence[Problem],
        samples_per_prompt: int,
        sampling: Sampling,
        seed: int,
        on_finished: Finished | None = None,
    ) -> list[Rollout]:
        """See :class:`hacrl.rollout.engine.RolloutEngine`."""
        self._check_context(problems, sampling)
        generator = torch.Generator(device=self.agent.device).manual_seed(seed)
        prompts_at_once = max(1, self.max_batch // samples_per_prompt)
        rollouts: list[Rollout] = []
        for start in range(0, len(problems), prompts_at_once):
            chunk = problems[start : start + prompts_at_once]
            for rollout in self._generate_chunk(chunk, samples_per_prompt, sampling, generator):
                if on_finished is not None:
                    on_finished(len(rollouts), rollout)
                rollouts.append(rollout)
        return rollouts

    def rest(self) -> None:
        """Holds nothing between generations."""

    def close(self) -> None:
        """Holds nothing."""

    def _check_context(self, problems: Sequence[Problem], sampling: Sampling) -> None:
        limit = self.agent.context_length
        for problem in problems:
            needed = len(self.agent.encode_prompt(problem)) + sampling.max_new_tokens
            if limit is not None and needed > limit:
                raise ModelError(
                    f"agent {self.agent.name!r}: problem {problem.id!r} and max_new_tokens="
                    f"{sampling.max_new_tokens} need {needed} tokens, the model's context has {limit}: "
                    "use shorter prompts or fewer new tokens"
                )

    def _check_finite(self, logits: Tensor) -> None:
        """A model that answers NaN has no next token; sampling would fail without saying whose it was."""
        if not bool(logits.isfinite().all()):
            raise TrainingError(
                f"agent {self.agent.name!r} gives logits that are not finite after "
                f"{self.agent.policy_version} updates: its weights are damaged or have diverged; check them, "
                "or lower learning.lr"
            )

    def _generate_chunk(
        self, problems: Sequence[Problem], group: int, sampling: Sampling, generator: torch.Generator
    ) -> list[Rollout]:
        decoding = _Decoding(self.agent.model, [self.agent.encode_prompt(p) for p in problems], group)
        stop_ids = torch.tensor(sorted(self.agent.stop_ids), device=self.agent.device)
        for remaining in reversed(range(sampling.max_new_tokens)):
            self._check_finite(decoding.logits)
            token_ids, logprobs = draw(decoding.logits, sampling, generator)
            stopped = torch.isin(token_ids, stop_ids)
            decoding.append(token_ids, logprobs, stopped)
            if decoding.all_stopped or not remaining:
                break
            decoding.forward(token_ids)
        return [
            self._rollout(problems[row // group], ids, logprobs)
            for row, (ids, logprobs) in enumerate(decoding.responses())
        ]

    def _rollout(self, problem: Problem, ids: list[int], logprobs: list[float]) -> Rollout:
        stopped = ids[-1] in self.agent.stop_ids
        return Rollout(
            problem=problem,
            agent=self.agent.name,
            text=self.agent.decode_response(ids[:-1] if stopped else ids, self.agent.encode_prompt(problem)),
            token_ids=tuple(ids),
            token_logprobs=tuple(logprobs),
            finish_reason="stop" if stopped else "length",
            policy_version=self.agent.policy_version,
        )


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability; (B, V) -> (B,), (B,). Greedy tokens have probability 1."""
    if sampling.temperature == 0:
        token_ids = logits.argmax(dim=-1)
        return token_ids, torch.zeros_like(token_ids, dtype=torch.float32)
    logprobs = sampling_logits(logits, sampling).log_softmax(dim=-1)
    token_ids = torch.multinomial(logprobs.exp(), num_samples=1, generator=generator)
    return token_ids.squeeze(-1), logprobs.gather(-1, token_ids).squeeze(-1)


class _Decoding:
    """State of a batch under way: the cache of the rows still running, and what every row has said.

    ``rows`` maps the running rows to their place in the batch that was asked for.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], group: int) -> None:
        self.model = model
        device = model.device
        width = max(len(prompt) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):  # left-padded, so that all rows end at the same position
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        mask = mask.to(device)
        self.cache = DynamicCache(config=model.config)
        logits = model(
            input_ids=input_ids.to(device),
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        try:
            self.cache.batch_repeat_interleave(group)
        except AttributeError as error:  # state-space layers
            raise ModelError(
                f"{type(model).__name__} keeps a state that cannot be copied per response; "
                "the transformers engine needs a model with an attention cache"
            ) from error
        self.logits: Tensor = logits.repeat_interleave(group, dim=0)
        self.mask = mask.repeat_interleave(group, dim=0)
        self.rows = torch.arange(len(prompts) * group, device=device)
        self.running = torch.ones(len(self.rows), dtype=torch.bool, device=device)
        self._tokens: list[tuple[Tensor, Tensor, Tensor]] = []  # per step: batch rows, ids, log-probabilities
        self._size = len(self.rows)

    @property
    def all_stopped(self) -> bool:
        return not bool(self.running.any())

    def append(self, token_ids: Tensor, logprobs: Tensor, stopped: Tensor) -> None:
        """Record one token for each row that was still running."""
        alive = self.running
        self._tokens.append((self.rows[alive], token_ids[alive], logprobs[alive]))
        self.running = alive & ~stopped

    def forward(self, token_ids: Tensor) -> None:
        """Logits of the next token for the rows still running."""
        if int(self.running.sum()) * 2 <= len(self.running):
            token_ids = self._drop_ended_rows(token_ids)
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        self.logits = self.model(
            input_ids=token_ids.unsqueeze(-1),
            attention_mask=self.mask,
            position_ids=self.mask.sum(dim=-1, keepdim=True) - 1,
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]

    def _drop_ended_rows(self, token_ids: Tensor) -> Tensor:
        keep = self.running.nonzero().squeeze(-1)
        self.cache.batch_select_indices(keep)
        self.mask, self.rows, self.running = self.mask[keep], self.rows[keep], self.running[keep]
        return token_ids[keep]

    def responses(self) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probabilities of every row asked for, in order."""
        said: list[tuple[list[int], list[float]]] = [([], []) for _ in range(self._size)]
        for rows, token_ids, logprobs in self._tokens:
            for row, token, logprob in zip(rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True):
                said[row][0].append(token)
                said[row][1].append(logprob)
        return said
