"""Rollouts with the agent's own transformers model: prompts prefilled once, then decoded as groups of G."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hacrl.agents.agent import Agent
from hacrl.agents.out_of_memory import is_out_of_memory, let_go
from hacrl.agents.sampling import sampling_logits
from hacrl.errors import ModelError, TrainingError
from hacrl.rollout.decoding import Decoding
from hacrl.rollout.engine import Finished
from hacrl.types import Problem, Rollout, Sampling


class TransformersEngine:
    """Decodes a whole batch in step; rows that have ended leave it once they are half of it."""

    def __init__(self, agent: Agent, max_batch: int = 512) -> None:
        self.agent = agent
        self.max_batch = max_batch  # most responses decoded side by side; fewer once memory has run out
        self.notes: list[str] = []  # sentences for the user

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
        rollouts: list[Rollout] = []
        generator = torch.Generator(device=self.agent.device).manual_seed(seed)
        while len(rollouts) < len(problems) * samples_per_prompt:
            chunk, group = self._next_chunk(problems, samples_per_prompt, len(rollouts))
            start = generator.get_state()
            try:
                finished = self._generate_chunk(chunk, group, sampling, generator)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                let_go(error, self.agent.device)
                self._take_fewer(chunk, group, sampling, error)
                generator.set_state(start)
                continue
            for rollout in finished:
                if on_finished is not None:
                    on_finished(len(rollouts), rollout)
                rollouts.append(rollout)
        return rollouts

    def take_notes(self) -> list[str]:
        """What the user should know, once."""
        notes, self.notes = self.notes, []
        return notes

    def state_dict(self) -> dict[str, int]:
        """What lasts from step to step; JSON-ready."""
        return {"max_batch": self.max_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` gave; another kind of engine's has nothing for this one."""
        self.max_batch = state.get("max_batch", self.max_batch)

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

    def _next_chunk(
        self, problems: Sequence[Problem], group: int, done: int
    ) -> tuple[Sequence[Problem], int]:
        """Whole groups if they fit, else as much of one as does: problems, and responses to each."""
        place, said = divmod(done, group)
        if self.max_batch < group:
            return problems[place : place + 1], min(self.max_batch, group - said)
        return problems[place : place + self.max_batch // group], group

    def _take_fewer(
        self, chunk: Sequence[Problem], group: int, sampling: Sampling, error: RuntimeError
    ) -> None:
        """Halve, until a chunk like the one that did not fit would be smaller."""
        name, device, responses = self.agent.name, self.agent.device, len(chunk) * group
        if responses == 1:
            tokens = len(self.agent.encode_prompt(chunk[0])) + sampling.max_new_tokens
            raise TrainingError(
                f"agent {name!r}: a single response of up to {tokens} tokens, prompt included, did not fit "
                f"into the memory of {device} beside what else is there. Give the agent a device of its own "
                f"(agents.{name}.device), agents.{name}.precision=bfloat16, or fewer rollout.max_new_tokens"
            ) from error
        before = self.max_batch
        while self.max_batch >= responses:
            self.max_batch //= 2
        self.notes.append(
            f"agent {name!r}: {responses} responses side by side did not fit into the memory of {device}; "
            f"rollout.max_batch counts as {self.max_batch} instead of {before} from now on. They were begun "
            "again, nothing is lost"
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
        decoding = Decoding(self.agent.model, [self.agent.encode_prompt(p) for p in problems], group)
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
