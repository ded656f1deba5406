"""The records that travel between the layers. Frozen, named, and free of any framework but torch.

Axis legend, used as suffixes wherever a tensor is named: ``B`` responses in a batch, ``T`` token
positions (learner's token space), ``V`` vocabulary. A field without a suffix is a scalar.

The journey of one answer::

    Problem ──▶ Rollout (one agent's text) ──▶ VerifiedRollout (judged) ──▶ LearnerSample (one learner's view)
            ──▶ LossBatch (tensors of one micro-batch)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
# "scored": a reward function gave a number, which is no judgement of right and wrong
VerdictLabel = Literal["correct", "wrong", "unparsable", "timeout", "crash", "scored"]
Role = Literal["system", "user", "assistant"]
RatioLength = Literal["source", "own"]  # whose token count normalises a cross-agent ratio


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution responses are drawn from. Temperature 0 means greedy."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0  # 1: no limit


class Turn(NamedTuple):
    """One turn of a conversation, e.g. ``Turn("system", "Answer briefly.")``."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with a checkable answer, e.g. ``Problem("(23+14)*2", "(23+14)*2:", "74")``."""

    id: str  # equal questions have equal ids, so that splits can be checked for overlap
    prompt: str  # what an agent is asked, before its own chat template
    answer: str  # the gold answer, as text
    context: tuple[Turn, ...] = ()  # what comes before the prompt: a system prompt, worked demonstrations
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)  # further columns of the data set


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier said of one response."""

    reward: float
    label: VerdictLabel


@dataclass(frozen=True, slots=True)
class Rollout:
    """One response of one agent, with the probabilities it was really sampled with.

    ``token_logprobs`` are under the sampling distribution (temperature, top-k and top-p included) and
    include the stop token, if there is one: ``len(token_ids) == len(token_logprobs)``.
    """

    problem: Problem
    agent: str  # name of the source agent
    text: str  # decoded without the stop token
    token_ids: tuple[int, ...]  # source's token space, stop token last if finish_reason == "stop"
    token_logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int  # number of updates the source had made when it sampled this

    @property
    def num_tokens(self) -> int:
        """|y|, the response's length in the source's tokens."""
        return len(self.token_ids)

    @property
    def logprob(self) -> float:
        """log pi_j_old(y), the source's log-probability of the whole response."""
        return float(sum(self.token_logprobs))


@dataclass(frozen=True, slots=True)
class VerifiedRollout:
    """A rollout and its verdict: the currency of the exchange."""

    rollout: Rollout
    verdict: Verdict

    @property
    def reward(self) -> float:
        """R(y)."""
        return self.verdict.reward


@dataclass(frozen=True, slots=True)
class LearnerSample:
    """One verified rollout as one learner sees it: the learner's token ids, the learner's advantage."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]  # the tokens that are learnt: all, or all but the stop token
    behaviour_logprobs: tuple[float, ...] | None  # per token; None if retokenised: only the sum is known
    behaviour_logprob: float  # log pi_j_old(y)
    source_length: int  # |y| in the source's tokens
    source: str
    is_own: bool
    advantage: float


@dataclass(frozen=True, slots=True)
class LossBatch:
    """What every loss takes: one micro-batch of responses, right-padded over T."""

    logprobs_BT: Tensor  # learner's log pi_k per token, carries the gradient
    mask_BT: Tensor  # bool: response tokens that count
    behaviour_logprobs_BT: Tensor  # log pi_j_old per token; 0 in retokenised rows, whose sum alone is known
    behaviour_logprob_B: Tensor  # log pi_j_old(y)
    source_length_B: Tensor  # |y| in the source's tokens
    advantages_B: Tensor  # after the capability discrepancy coefficient
    is_own_B: Tensor  # bool: learner == source
    updates_done: int  # u: parameter updates already made in this step
    reference_logprobs_BT: Tensor | None = None  # frozen reference policy; only with a KL term
    # Only where pi_old of own rows is the learner's own forward pass: what they were really sampled with.
    sampler_logprobs_BT: Tensor | None = None
    mismatch_cap: float = math.inf  # C: own rows are weighed by min(pi_old / pi_sampler, C)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What every loss returns, per response, so that the caller owns the mean."""

    loss_B: Tensor  # minus the objective
    ratio_B: Tensor  # s, detached
    clipped_B: Tensor  # share of the response that carries no gradient because of clipping
    weight_B: Tensor  # w of the sampler's mismatch; the mean over tokens if it is per token
    capped_B: Tensor  # share of the response whose w was cut down to the cap
