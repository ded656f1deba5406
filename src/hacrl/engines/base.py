"""The seam between an agent and what generates its responses: tokens in, tokens and log-probabilities out.

An engine knows no task, no problem and no other agent. It samples from one policy, whose weights it either
shares with the learner or receives by :meth:`Engine.sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hacrl.errors import ModelError
from hacrl.models.stop_strings import StopStrings
from hacrl.seeding import derive_seed
from hacrl.types import Sampling, VersionSpans


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Sample ``samples_per_prompt`` responses to each prompt."""

    prompts: Sequence[tuple[int, ...]]
    samples_per_prompt: int
    sampling: Sampling
    stop_ids: frozenset[int]  # tokens that end a response; the token itself is part of the response
    seed: int  # equal requests with equal seeds and weights give equal samples
    # Texts that end a response, those of sampling.stop. An engine may generate more than one of them: whoever
    # decodes a sample cuts it. Ending such responses early saves time.
    stop_strings: StopStrings | None = None
    # One per response, in place of ``seed``: a response then depends on its prompt, its seed and the weights,
    # and not on the other responses of the request.
    response_seeds: tuple[int, ...] | None = None
    # Most new tokens of each response, at most sampling.max_new_tokens. None: as many for every response.
    limits: tuple[int, ...] | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples in all."""
        return len(self.prompts) * self.samples_per_prompt

    def limit(self, index: int) -> int:
        """Return the most new tokens of one response."""
        return self.sampling.max_new_tokens if self.limits is None else self.limits[index]

    def seeds_of_responses(self) -> tuple[int, ...]:
        """Return ``response_seeds``, or one seed per response derived from ``seed`` and its index."""
        if self.response_seeds is not None:
            return self.response_seeds
        return tuple(derive_seed(self.seed, index) for index in range(self.num_samples))

    def check_lengths(self, agent: str, limit: int | None) -> None:
        """Raise ModelError if a prompt and a full response do not fit into ``limit`` tokens."""
        group = self.samples_per_prompt
        for number, prompt in enumerate(self.prompts):
            new = max(self.limit(index) for index in range(number * group, (number + 1) * group))
            needed = len(prompt) + new
            if limit is not None and needed > limit:
                raise ModelError(
                    f"agent {agent!r}: prompt {number + 1} of {len(self.prompts)} has {len(prompt)} tokens; "
                    f"with max_new_tokens={new} it needs {needed}, the context has "
                    f"{limit}: use shorter prompts or fewer new tokens"
                )


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled response."""

    token_ids: tuple[int, ...]  # with the stop token, if the response ended with one
    logprobs: tuple[float, ...]  # one per token, under the sampling distribution
    # Which policy version sampled how many tokens, in order. Empty: the policy's version at the start of the
    # generation sampled all of them, and was not updated meanwhile.
    versions: VersionSpans = ()


# Samples that have just finished, each with its index: prompt by prompt, ``samples_per_prompt`` to each.
OnFinished = Callable[[Sequence[tuple[int, Sample]]], None]


class Policy(Protocol):
    """What an engine needs of the agent it samples for."""

    name: str  # for messages
    model: Any
    policy_version: int  # number of updates that the learner has made
    context_length: int | None

    @property
    def stop_ids(self) -> Collection[int]:
        """Tokens that end a response."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the learner's weights are."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """How an engine with weights of its own received the policy's weights."""

    policy_version: int
    weight_sync: str  # how the weights were sent
    logprob_gap: float  # mean |engine's - learner's log-probability| per token of a few responses, afterwards
    restarts: int  # times this process started the engine again because it had died


class Sampler(Protocol):
    """What hacrl asks of everything that samples, an engine or an endpoint, besides the samples."""

    # Whether generate() first brings the engine to the policy's weights. A trainer that updates the policy
    # while the engine generates sets this to False, and calls sync() where the weights are whole.
    follows_policy: bool

    @property
    def shares_weights(self) -> bool:
        """Return whether the engine computes with the learner's own tensors, so that no sync is needed."""
        ...

    @property
    def runs_concurrently(self) -> bool:
        """Return whether the engine may generate in any thread, at the same time as other engines.

        False if the engine shares memory with learners.
        """
        ...

    @property
    def updates_while_generating(self) -> bool:
        """Return whether :meth:`sync` may be called in another thread while :meth:`generate` runs.

        Then the running responses go on with the new weights from their next token on, and keep their keys
        and values. Every :attr:`Sample.versions` says which policy sampled which tokens.
        """
        ...

    def sync(self, proven: bool = True) -> SyncReport | None:
        """Start the engine if necessary and bring it to the policy's current weights.

        Return how the weights were sent and how well the log-probabilities agree, or None if the engine
        shares the learner's weights. With ``proven=False`` the comparison of log-probabilities may be left
        to the next :meth:`generate`, which returns nothing unproven.

        The policy must not be trained meanwhile: call this in the thread that trains, between updates.
        """
        ...

    def take_notes(self) -> list[str]:
        """Return sentences for the user that have come up since the last call."""
        ...

    def state_dict(self) -> dict[str, int]:
        """Return what the engine has learnt for later steps, e.g. the largest batch that fits; JSON-ready."""
        ...

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        ...

    def sleep(self) -> None:
        """Give back memory that the learner could use until the next generation."""
        ...

    def close(self) -> None:
        """End processes and free memory. May be called more than once."""
        ...


class Engine(Sampler, Protocol):
    """Samples responses of one policy, with the log-probabilities they were sampled with."""

    policy: Policy

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        """Return all samples, prompt by prompt. ``on_finished`` is called as samples finish, in any order.

        ``on_finished`` must not wait for the thread that updates the engine meanwhile.
        """
        ...
